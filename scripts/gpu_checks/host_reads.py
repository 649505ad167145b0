# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Where a step of the optimizer makes the host wait for the device.

On a GPU torch reports operations that synchronize. On a CPU, reads of values are counted, which
would.
"""

import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpu_checks.ranks import run_ranks
from gpu_checks.report import Context, Device, Report

# The gradient norm and the number of problems of all ranks, together, before momentum moves.
MAX_OWN = 1
_PACKAGES = ("megatron_muon", "megatron", "emerging_optimizers", "torch")
_ENGINE = "megatron_muon/runtime/engine.py"
# Parts of torch that may read a value by themselves; calls go through others of it.
_TORCH_PARTS = ("torch/distributed/", "torch/nn/", "torch/optim/")
_NUM_STEPS = 2


def check(context: Context, report: Report) -> None:
    """Count in the step of a real Megatron-FSDP model, by package and line."""
    (found,) = run_ranks(context, 1, _count, context.device, timeout_s=0.9 * context.limit_s)
    own = {place: n for place, n in found.items() if place.startswith("megatron_muon/")}
    inside = {place: n for place, n in found.items() if place.endswith("(engine)")}
    num_own = sum(own.values()) / _NUM_STEPS
    report.data("places", found)
    report.table(
        "Where the host waits in a step",
        ("place", "times a step"),
        [[place, f"{n / _NUM_STEPS:g}"] for place, n in sorted(found.items())],
    )
    report.expect(not inside, f"expected no wait inside of the exchange, got {inside}")
    report.expect(
        num_own <= MAX_OWN, f"expected {MAX_OWN} waits of this package or fewer, got {own}"
    )
    others = (sum(found.values()) - sum(own.values())) / _NUM_STEPS
    what = "operations that wait" if context.device == "cuda" else "values read"
    report.figure(f"{what} a step: {num_own:g} of this package, {others:g} of megatron and torch")


def _count(device: Device) -> dict[str, int]:
    from gpu_checks import toy_model

    where = toy_model.start(device)
    gpt, config = toy_model.build_gpt(toy_model.Size(), where)
    model = toy_model.wrap(gpt, config, "optim_grads_params", where)
    optimizer = toy_model.build_optimizer(model)
    places: Counter[str] = Counter()
    for step in range(1 + _NUM_STEPS):
        toy_model.run_backward(model, where, seeds=[step])
        model.finish_grad_sync()
        if step == 0:
            # The first step allocates and compiles.
            optimizer.step()
            continue
        with _waits_on_gpu(places) if device == "cuda" else _reads_on_cpu(places):
            optimizer.step()
    return dict(places)


@contextmanager
def _waits_on_gpu(places: Counter[str]) -> Iterator[None]:
    """Count torch's warnings of synchronizing operations by where they come from."""
    import torch

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")

        def show(message: Any, *_args: Any, **_kwargs: Any) -> None:
            """Note the place in place of printing."""
            if "synchronizing" in str(message):
                places[_place()] += 1

        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def _reads_on_cpu(places: Counter[str]) -> Iterator[None]:
    """Count operations that return a tensor's value as a number."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class CountLists(TorchFunctionMode):
        """Pass everything on."""

        def __torch_function__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            """Note a read that goes past the dispatcher, then do it."""
            if func is torch.Tensor.tolist:
                places[_place()] += 1
            return func(*args, **(kwargs or {}))

    class CountReads(TorchDispatchMode):
        """Pass everything on."""

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            """Note a read, then do it."""
            if func is torch.ops.aten._local_scalar_dense.default:
                places[_place()] += 1
            return func(*args, **(kwargs or {}))

    with CountReads(), CountLists():
        yield


def _place() -> str:
    """Return the innermost line of a package, and whether the engine is above it."""
    frames = [
        (_below_package(frame.filename), frame.lineno)
        for frame in reversed(traceback.extract_stack(sys._getframe(1)))
    ]
    places = (
        f"{path}:{line}"
        for path, line in frames
        if path.startswith(_TORCH_PARTS) or (path and not path.startswith("torch/"))
    )
    mark = " (engine)" if any(path == _ENGINE for path, _ in frames) else ""
    return next(places, "elsewhere") + mark


def _below_package(filename: str) -> str:
    """Return a path from the folder of its package on; empty for files of no package."""
    folders = filename.split("/")
    for index in reversed(range(len(folders) - 1)):
        if folders[index] in _PACKAGES:
            # Stand-ins of a CPU are between a package and torch.
            is_stand_in = folders[index : index + 2] == ["megatron_muon", "cpu_ranks"]
            return "" if is_stand_in else "/".join(folders[index:])
    return ""
