# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks of one check: processes that share the GPU, or the CPU."""

import datetime
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_checks.report import Context, Device

# Between the first rank that fails and the end of the others, which may wait for it.
_GRACE_S = 5.0


class RanksError(RuntimeError):
    """A rank failed, or did not end; the text has the end of what it printed."""


def run_ranks(
    context: Context,
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run a function on every rank of a new world.

    Args:
        context: Where the check runs.
        world_size: Number of ranks.
        function: Called with ``args``; top-level; may return a JSON value.
        *args: Passed on.
        timeout_s: Seconds after which all ranks are killed.
        env: Environment variables to set on every rank.

    Returns:
        What the function returned, by rank.

    Raises:
        RanksError: A rank failed, or did not end in time.
    """
    # CUDA cannot be forked, and whatever was imported here may have asked for a device. On a CPU,
    # ranks have what this process has imported.
    processes: Any = multiprocessing.get_context("spawn" if context.device == "cuda" else "fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = {
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            # All on the one device.
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(_free_port()),
            **(env or {}),
        }
        ranks = [
            processes.Process(target=_run_rank, args=(rank, variables, folder, function, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        late = _wait(ranks, timeout_s)
        codes = [process.exitcode for process in ranks]
        failed = [rank for rank in range(world_size) if codes[rank] and rank not in late]
        for rank in [*failed, *late][:1]:
            sys.stdout.write(f"--- rank {rank}\n{_read(folder, f'output_{rank}')[-6000:]}\n")
        if failed:
            error = _read(folder, f"error_{failed[0]}") or f"exit status {codes[failed[0]]}"
            raise RanksError(f"rank {failed[0]} of {world_size}: {error}")
        if late:
            raise RanksError(
                f"expected {world_size} ranks to end within {timeout_s:.0f} s, got ranks {late} "
                "still running"
            )
        return [json.loads(_read(folder, f"result_{rank}") or "null") for rank in range(world_size)]


def _wait(ranks: Sequence[Any], timeout_s: float) -> list[int]:
    """Wait for the ranks, and kill and list those that do not end."""
    deadline = time.monotonic() + timeout_s
    while alive := [process for process in ranks if process.is_alive()]:
        if any(process.exitcode for process in ranks):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() >= deadline:
            break
        alive[0].join(0.1)
    late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in late:
        ranks[rank].kill()
    for process in ranks:
        process.join()
    return late


def start(device: Device, *, timeout_s: float = 60.0) -> Any:
    """Join the ranks of this world, in the process of one.

    Returns:
        The device of this rank's tensors.

    Communication: over NCCL where one rank has the GPU for itself, otherwise over gloo.
    """
    import torch
    import torch.distributed as dist

    from gpu_checks import bounce

    world_size = int(os.environ["WORLD_SIZE"])
    is_alone_on_gpu = device == "cuda" and world_size == 1
    if device == "cuda":
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if is_alone_on_gpu else "gloo", timeout=datetime.timedelta(seconds=timeout_s)
    )
    found = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    if device == "cuda" and not is_alone_on_gpu:
        replaced = bounce.replace_missing(found)
        if replaced:
            sys.stdout.write(f"through the CPU: {', '.join(replaced)}\n")
    return found


def prepare_megatron(device: Device) -> None:
    """Adapt megatron to a CPU, before anything of it is imported; does nothing on a GPU."""
    if device == "cpu":
        from megatron_muon import cpu_ranks

        cpu_ranks.enable(force=True)


def _run_rank(
    rank: int, variables: Mapping[str, str], folder: Path, function: Callable[..., Any], args: tuple
) -> None:
    os.environ.update(variables, RANK=str(rank))
    with open(folder / f"output_{rank}", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # closefd: ranks do the same, and what they drop must not close their own output.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    try:
        result = function(*args)
        (folder / f"result_{rank}").write_text(json.dumps(result))
        import torch.distributed as dist

        if dist.is_initialized():
            # A rank that left early would take its connections along.
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as error:  # noqa: B036 - reported by the process that waits
        if not (isinstance(error, SystemExit) and error.code in (0, None)):
            traceback.print_exc()
            sys.stderr.flush()
            (folder / f"error_{rank}").write_text(f"{type(error).__name__}: {error}"[:1000])
            os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def _read(folder: Path, name: str) -> str:
    path = folder / name
    return path.read_text(errors="replace") if path.exists() else ""
