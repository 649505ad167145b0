# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Check a machine before a run, and measure its rates.

    python -m megatron_muon.check
    torchrun --nproc-per-node 8 -m megatron_muon.check

Works on GPUs and on CPU ranks. Each line is a check, with PASS, FAIL or SKIP (not here), and what
to do. The exit status is 1 if a check fails. A warning names a kernel that cannot be compiled;
results are right without it.
"""

import argparse
import datetime
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.tools.check import results
from megatron_muon.tools.check.rates import Rates
from megatron_muon.tools.check.verdicts import Finding, LostRanksError, on_all_ranks

# A check takes seconds: ranks that wait longer have lost a peer.
_TIMEOUT = datetime.timedelta(seconds=60)
_EXCHANGES = {
    "fp32 messages": ExchangeSettings(comm_dtype="fp32", max_owners=1),
    "bf16 messages": ExchangeSettings(),
    "gram": ExchangeSettings(newton_schulz="gram"),
}


def _start_ranks() -> torch.device:
    torch.set_num_threads(1)
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # On CPU ranks (scripts/cpu_ranks) torch.cuda acts on the CPU.
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    else:
        store = dist.HashStore()
        dist.init_process_group(backend, timeout=_TIMEOUT, store=store, rank=0, world_size=1)
    # Connected ranks learn at once that a peer has ended; gloo tries for minutes to reach one that
    # ended before.
    dist.barrier()
    return device


def _run() -> int:
    start = time.monotonic()
    device = _start_ranks()
    rates = Rates(device)
    checks: dict[str, Callable[[], Finding]] = {
        "versions": results.check_versions,
        **{
            f"step of Muon, {name}": functools.partial(results.check_step, device, exchange)
            for name, exchange in _EXCHANGES.items()
        },
        "rate of Newton-Schulz": rates.check_newton_schulz,
        "rate of all-to-all": rates.check_all_to_all,
    }
    failed = [name for name, check in checks.items() if on_all_ranks(name, check).verdict == "FAIL"]
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        verdict = f"FAIL: {', '.join(failed)}" if failed else "PASS"
        cost_model = ",".join(f"{name}={rate:.4g}" for name, rate in rates.measured.items())
        sys.stdout.write(
            f"{verdict} on {dist.get_world_size()} ranks ({name}), "
            f"{time.monotonic() - start:.0f} s\nrates: {cost_model}\n"
        )
    dist.destroy_process_group()
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print a line for each check on rank 0, and return the exit status."""
    argparse.ArgumentParser(
        prog="python -m megatron_muon.check", description=__doc__.partition("\n")[0]
    ).parse_args(arguments)
    try:
        return _run()
    except LostRanksError as error:
        sys.stderr.write(f"\n{error}\n")
        sys.stderr.flush()
        # Not by an exception: handlers at exit would wait for the ranks that are gone.
        os._exit(1)
