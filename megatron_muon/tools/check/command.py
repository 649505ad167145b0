# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Check a machine before a run, and measure its rates.

    python -m megatron_muon.check
    torchrun --nproc-per-node 8 -m megatron_muon.check --json check.json

Works on GPUs and on CPU ranks. Each line is a check, with PASS, FAIL, SLOW (right, but slower than
plans assume) or SKIP (not here), and what to do. The exit status is 1 if a check fails.
"""

import argparse
import datetime
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_muon.fsdp2.muon import Muon
from megatron_muon.fsdp2.muon_adamw import MuonAdamW
from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.tools.check import environment, results
from megatron_muon.tools.check.rates import Rates
from megatron_muon.tools.check.verdicts import Finding, LostRanksError, on_all_ranks
from megatron_muon.tools.plan.model_shape import PRESETS

# A check takes seconds: ranks that wait longer have lost a peer.
_TIMEOUT = datetime.timedelta(seconds=60)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_muon.check", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--seconds", type=int, default=120, help="no rate is measured after that")
    parser.add_argument("--preset", choices=PRESETS, help="model of the timed step")
    parser.add_argument("--layers", type=int, default=1, help="its layers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write findings and rates")
    return parser


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
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT
        )
    return device


def _checks(
    device: torch.device, rates: Rates, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Finding], bool]]:
    """Yield the name of a check, the check, and whether it measures a rate."""
    yield "versions", environment.check_versions, False
    yield "compiler", functools.partial(environment.check_compiler, device), False
    yield "communication", environment.check_communication, False
    yield "row kernel", functools.partial(results.check_row_kernel, device), False
    for name in BACKENDS:
        check = functools.partial(results.check_backend, name, device)
        yield f"Newton-Schulz {name}", check, False
    for kind in (Muon, MuonAdamW):
        check = functools.partial(results.check_fsdp2_step, kind, device)
        yield f"step of fsdp2.{kind.__name__}", check, False
    yield "step of Megatron-FSDP", results.check_megatron_step, False
    yield "rate of row moves", rates.check_row_moves, True
    yield "rate of Newton-Schulz", rates.check_newton_schulz, True
    yield "rate of all-to-all", rates.check_all_to_all, True
    # A layer of the smallest preset is 218 M elements: a GPU's work.
    preset = options.preset or ("llama3-8b" if device.type == "cuda" else None)
    if preset is not None:
        check = functools.partial(rates.check_step, preset, options.layers)
        yield "step beside AdamW's", check, True


def _run(options: argparse.Namespace) -> int:
    start = time.monotonic()
    device = _start_ranks()
    rates = Rates(device)
    findings: dict[str, Finding] = {}
    for name, check, is_rate in _checks(device, rates, options):
        # Rank 0 decides, as clocks differ.
        is_late = [time.monotonic() - start > options.seconds]
        dist.broadcast_object_list(is_late)
        if is_rate and is_late[0]:
            check = functools.partial(Finding, "SKIP", "no time left", "Raise --seconds")
        findings[name] = on_all_ranks(name, check)
    failed = [name for name, finding in findings.items() if finding.verdict == "FAIL"]
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        verdict = f"FAIL: {', '.join(failed)}" if failed else "PASS"
        sys.stdout.write(
            f"{verdict} on {dist.get_world_size()} ranks ({name}), "
            f"{time.monotonic() - start:.0f} s\nrates: {rates.cost_model()}\n"
        )
        if options.json is not None:
            content = {
                "device": name,
                "ranks": dist.get_world_size(),
                "checks": {name: finding._asdict() for name, finding in findings.items()},
                "cost_model": rates.cost_model(),
            }
            options.json.write_text(json.dumps(content, indent=1) + "\n")
    dist.destroy_process_group()
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print a line for each check on rank 0, and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return 130
    except LostRanksError as error:
        sys.stderr.write(f"\n{error}\n")
        sys.stderr.flush()
        # Not by an exception: handlers at exit would wait for the ranks that are gone.
        os._exit(1)
