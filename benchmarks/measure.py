# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Measure a step: time of the slowest rank, Newton-Schulz time, bytes, memory."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def synchronize() -> None:
    """Wait for this rank's GPU, where it has one."""
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()


def slowest(value: float) -> float:
    """Return the largest of all ranks' values."""
    values = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


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


@contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    """Count the bytes this rank hands to collectives of torch.distributed for other ranks.

    An all-reduce counts as a ring: 2 (W - 1) / W of the tensor. What torch's compiled collectives
    send (``DTensor.full_tensor``) is not seen.
    """
    counted = {"bytes": 0, "calls": 0}
    world = dist.get_world_size()

    def add(num_bytes: float) -> None:
        """Count one call."""
        counted["bytes"] += round(num_bytes)
        counted["calls"] += 1

    sent = {
        "all_to_all_single": _bytes_to_others,
        "all_gather_into_tensor": lambda args, group: args[1].nbytes * (world - 1),
        "all_gather": lambda args, group: args[1].nbytes * (world - 1),
        "all_reduce": lambda args, group: args[0].nbytes * 2 * (world - 1) / world,
    }
    originals = {name: getattr(dist, name) for name in sent}

    def counting(name: str) -> Callable[..., Any]:
        """Return the collective of this name, counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            """Count, then call."""
            add(sent[name](args, kwargs.get("group")))
            return originals[name](*args, **kwargs)

        return call

    for name in sent:
        setattr(dist, name, counting(name))
    try:
        yield counted
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _bytes_to_others(args: Sequence[Any], group: dist.ProcessGroup | None) -> float:
    """Return the bytes of an ``all_to_all_single`` that leave this rank."""
    _, sent, _, sizes = args
    return sent.nbytes - sizes[dist.get_rank(group)] * sent.element_size()


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
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return slowest(time.perf_counter() - start)


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)
