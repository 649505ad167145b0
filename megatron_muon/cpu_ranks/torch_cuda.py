# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins that make ``torch.cuda`` act on the CPU.

A CPU runs operations in program order, so streams and events have nothing to order. Importing this
module replaces nothing: ``cpu_ranks.table`` lists what is replaced.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils.data
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CpuEvent(torch.cpu.Event):
    """Stands in for ``torch.cuda.Event``; is complete as soon as it is recorded."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Accept and ignore ``enable_timing``, ``blocking`` and ``interprocess``."""
        self.record()

    def record(self, stream: object = None) -> None:
        """Take the time."""
        self._time_ms = time.perf_counter() * 1e3

    def elapsed_time(self, end_event: "CpuEvent") -> float:
        """Return the milliseconds from this event to ``end_event``."""
        return end_event._time_ms - self._time_ms


# Megatron enters a stream itself in places, instead of torch.cuda.stream(stream).
class CpuStream(torch.cpu.Stream, nullcontext[None]):
    """Stands in for ``torch.cuda.Stream``; everything runs in program order."""

    cuda_stream = 0
    device = CPU
    device_index = 0
    enter_result = None

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Accept and ignore ``device`` and ``priority``."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the only priority there is, as (least, greatest)."""
        return 0, 0

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: the stream is idle."""
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:  # type: ignore[override]
        """Record ``event``, or a new one, and return it."""
        event = CpuEvent() if event is None else event
        event.record()
        return event


DEFAULT_STREAM = CpuStream()


class CpuDeviceProperties:
    """Stands in for the result of ``torch.cuda.get_device_properties``."""

    name = "cpu"
    # Hopper's, so that Megatron asks for the same CUDA_DEVICE_MAX_CONNECTIONS as on most GPUs.
    major, minor = 9, 0
    total_memory = 1 << 34
    multi_processor_count = 1


def refusal(what: str) -> type:
    """Return a class whose construction raises that ``what`` needs a GPU.

    Args:
        what: The feature, as the user knows it.
    """

    def __init__(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError(
            f"{what}: expected a CUDA device, got CPU ranks. Turn the feature off, or run on GPUs."
        )

    return type("Refused", (), {"__init__": __init__})


def constant[T](value: T) -> Callable[..., T]:
    """Return a function that ignores its arguments and returns ``value``."""
    return lambda *_args, **_kwargs: value


def without_pinning(original: Callable[..., None]) -> Callable[..., None]:
    """Return ``DataLoader.__init__`` with ``pin_memory`` off.

    ``torch.cuda.is_available`` being true, the loader would start to pin, and fail.
    """

    def __init__(self: torch.utils.data.DataLoader[Any], *args: object, **kwargs: object) -> None:
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        original(self, *args, **kwargs)

    return __init__


def _is_cuda(device: object) -> bool:
    """Return whether ``device``, in any form that torch accepts, is a CUDA device."""
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


# Functions that accept a device as another argument than the keyword ``device``.
_WITH_DEVICES = frozenset([torch.device, torch.Tensor.to, torch.Tensor.type])


class CpuDeviceMode(TorchFunctionMode):
    """Turns CUDA devices in torch calls into the CPU, in the thread that entered it.

    ``Tensor.type()`` returns ``torch.cuda.FloatTensor`` and the like, since Megatron's optimizers
    group parameters by that name.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the intercepted function returns
        """Call ``func`` with CUDA devices among its arguments replaced."""
        # Every call of torch passes through here, so the usual one must be quick.
        if not kwargs:
            if func not in _WITH_DEVICES:
                return func(*args)
            kwargs = {}
        elif _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.device:
            if (args and _is_cuda(args[0])) or _is_cuda(kwargs.get("type")):
                return CPU
        elif func is torch.Tensor.to:
            # An int is a device only as the first argument; later ones are flags or a format.
            args = tuple(
                CPU if i and _is_cuda(arg) and (i == 1 or not isinstance(arg, int)) else arg
                for i, arg in enumerate(args)
            )
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)
