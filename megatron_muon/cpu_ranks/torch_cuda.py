# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins that make ``torch.cuda`` act on the CPU.

A CPU runs what it is given in order, so streams and events order nothing here. Nothing in this
module is active by itself: ``cpu_ranks.table`` lists what replaces what.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch
import torch.utils.data
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")

# Whatever the intercepted function returns.
type Result = Any


class CpuEvent:
    """Stands in for ``torch.cuda.Event``; is complete as soon as it is recorded."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Accept and ignore ``enable_timing``, ``blocking`` and ``interprocess``."""
        self._time_ms = time.perf_counter() * 1e3

    def record(self, _stream: object = None) -> None:
        """Take the time."""
        self._time_ms = time.perf_counter() * 1e3

    def wait(self, _stream: object = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: the work before the event is done."""
        return True

    def elapsed_time(self, end_event: "CpuEvent") -> float:
        """Return the milliseconds from this event to ``end_event``."""
        return end_event._time_ms - self._time_ms


class CpuStream:
    """Stands in for ``torch.cuda.Stream``; everything runs in program order."""

    cuda_stream = 0
    device = CPU
    device_index = 0

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Accept and ignore ``device`` and ``priority``."""

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the only priority there is, as (least, greatest)."""
        return 0, 0

    def wait_stream(self, _stream: object) -> None:
        """Return at once."""

    def wait_event(self, _event: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: the stream is idle."""
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Record ``event``, or a new one, and return it."""
        event = CpuEvent() if event is None else event
        event.record()
        return event

    # Megatron enters a stream itself in places, instead of torch.cuda.stream(stream).
    def __enter__(self) -> "CpuStream":
        """Return the stream."""
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Do nothing."""


DEFAULT_STREAM = CpuStream()


class NullContext(nullcontext[None]):
    """Stands in for ``torch.cuda.stream`` and ``torch.cuda.device``: changes nothing."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Accept and ignore the stream or the device."""
        super().__init__()


class CpuGenerators:
    """Stands in for ``torch.cuda.default_generators``: the CPU generator at every index."""

    def __len__(self) -> int:
        """Return 1, the number of devices."""
        return 1

    def __getitem__(self, _index: object) -> torch.Generator:
        """Return the CPU's default generator whatever the device."""
        return torch.default_generator


class CpuDeviceProperties:
    """Stands in for the result of ``torch.cuda.get_device_properties``.

    The compute capability is that of Hopper: Megatron then asks for the same
    ``CUDA_DEVICE_MAX_CONNECTIONS`` as on the GPUs most runs use.
    """

    name = "cpu"
    major = 9
    minor = 0
    total_memory = 1 << 34
    multi_processor_count = 1


def refusal(what: str) -> type:
    """Return a class whose construction says that ``what`` needs a GPU.

    Args:
        what: The feature, as the user knows it.
    """

    class Refused:
        """A class that refuses to make an instance."""

        def __init__(self, *_args: object, **_kwargs: object) -> None:
            raise RuntimeError(
                f"{what}: expected a CUDA device, got CPU ranks. "
                "Turn the feature off, or run on GPUs."
            )

    return Refused


def constant[T](value: T) -> Callable[..., T]:
    """Return a function that ignores its arguments and returns ``value``."""

    def function(*_args: object, **_kwargs: object) -> T:
        """Return the value, whatever is passed."""
        return value

    return function


def get_rng_state(*_args: object, **_kwargs: object) -> torch.Tensor:
    """Return the CPU generator's state, uint8, whatever device is asked for."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
    """Set the CPU generator's state, uint8, whatever device is asked for."""
    torch.set_rng_state(new_state)


def manual_seed(seed: int) -> None:
    """Seed the CPU generator, which is also the device's."""
    torch.default_generator.manual_seed(int(seed))


def lazy_call(function: Callable[[], object], **_kwargs: object) -> None:
    """Call ``function`` now: there is no device to wait for."""
    function()


def return_self(tensor: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
    """Return ``tensor``: it is already where it is wanted."""
    return tensor


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
    """Return whether ``device``, as torch functions take it, means a CUDA device."""
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


# Functions that name a device in other places than a keyword.
_WITH_DEVICES = frozenset([torch.device, torch.Tensor.to, torch.Tensor.type])


class CpuDeviceMode(TorchFunctionMode):
    """Turns CUDA devices in torch calls into the CPU, in the thread that entered it.

    ``Tensor.type()`` answers ``torch.cuda.FloatTensor`` and the like, since Megatron's optimizers
    tell parameters apart by that name.
    """

    def __torch_function__(
        self,
        func: Callable[..., Result],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Result:
        """Call ``func`` with CUDA devices among its arguments replaced."""
        # Each call of torch comes here, so the usual one must be quick.
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
            # An int is a device in the first place only; after it, it is a flag or a format.
            args = tuple(
                CPU if i and _is_cuda(arg) and (i == 1 or not isinstance(arg, int)) else arg
                for i, arg in enumerate(args)
            )
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)
