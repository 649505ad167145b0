# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks of a benchmark, and measures of a step: time of the slowest rank, bytes, memory."""

import argparse
import datetime
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def start_ranks() -> torch.device:
    """Connect the ranks of torchrun, over NCCL on GPUs, otherwise over gloo."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(minutes=5)
    # Under scripts/cpu_ranks torch.cuda is available, and acts on the CPU.
    if torch.device("cuda").type == "cpu" or not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl", timeout=timeout)
    return torch.device("cuda", torch.cuda.current_device())


def setup_of(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return options, machine and versions, for the head of a table."""
    return {
        "ranks": dist.get_world_size(),
        **{name: getattr(options, name) for name in names},
        "gpu": torch.cuda.get_device_name() if dist.get_backend() == "nccl" else "none",
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def of_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, of any type."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slowest(value: float) -> float:
    """Return the largest of all ranks' values."""
    return max(of_all_ranks(value))


class FunctionTimer:
    """Add up the time spent in functions, looked up by name in their module at each call.

    On a GPU by events around each call, read after the step.
    """

    def __init__(self, functions: Sequence[tuple[Any, str]]) -> None:
        self._functions = functions
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace the functions by timed ones."""
        originals = [(owner, name, getattr(owner, name)) for owner, name in self._functions]
        for owner, name, original in originals:
            setattr(owner, name, self._timed(original))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            """Call, and keep when it began and ended."""
            start = self._now()
            result = original(*args, **kwargs)
            self._spans.append((start, self._now()))
            return result

        return timed

    def _now(self) -> Any:
        if dist.get_backend() != "nccl":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take_seconds(self) -> float:
        """Return what has been added up, and start again at zero."""
        spans, self._spans = self._spans, []
        if spans and not isinstance(spans[0][0], float):
            return sum(start.elapsed_time(stop) for start, stop in spans) * 1e-3
        return sum(stop - start for start, stop in spans)


class CollectiveCounter(TorchDispatchMode):
    """Count collectives, and the bytes that this rank sends to others, by kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a collective on plain tensors; DTensor comes here again with its local ones."""
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented
        names = [argument.name for argument in func._schema.arguments]
        # Whatever names a group is a collective, in any namespace; wait_tensor names none.
        if "process_group" in names or "group_name" in names:
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            kind = func._schema.name.partition("::")[2].replace("_", "").removesuffix("coalesced")
            self.calls[kind] += 1
            self.num_bytes[kind] += round(_bytes_sent(kind, given))
        return func(*args, **(kwargs or {}))


def _bytes_sent(kind: str, given: Mapping[str, Any]) -> float:
    """Return the bytes that this rank sends to others in one collective."""
    if "group_name" in given:
        group = torch._C._distributed_c10d._resolve_process_group(given["group_name"])
    else:
        group = dist.ProcessGroup.unbox(given["process_group"])
    sources = ("input", "inputs", "input_tensor", "input_tensors", "tensors")
    tensors = [tensor for name in sources for tensor in tree_leaves(given.get(name))]
    num_bytes = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
    rank, size = group.rank(), group.size()
    if kind.startswith("allgather"):
        return num_bytes * (size - 1)
    if kind == "allreduce":
        return num_bytes * 2 * (size - 1) / size
    if kind == "alltoall":
        return num_bytes - given["input_tensors"][rank].nbytes
    if kind in ("alltoallbase", "alltoallsingle"):
        splits = given["input_split_sizes"]
        stays = splits[rank] / max(1, sum(splits)) if splits else 1 / size
        return num_bytes * (1 - stays)
    raise NotImplementedError(f"{kind}: expected a collective whose bytes are known here")


@contextmanager
def peak_memory() -> Iterator[dict[str, int]]:
    """Measure the peak growth of memory, bytes: of the allocator on a GPU, otherwise resident."""
    peak = {"bytes": 0}
    if dist.get_backend() == "nccl":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        peak["bytes"] = torch.cuda.max_memory_allocated() - before
        return
    # 5 sets the high-water mark back to the present (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    yield peak
    peak["bytes"] = max(0, _status_bytes("VmHWM") - before)


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status: expected {key}, got none. This needs Linux.")


def step_seconds(step: Callable[[], Any]) -> float:
    """Time one step that all ranks start together; of the slowest rank."""
    dist.barrier()
    _synchronize()
    start = time.perf_counter()
    step()
    _synchronize()
    return slowest(time.perf_counter() - start)


def _synchronize() -> None:
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()
