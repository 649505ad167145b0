# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""``torch.cuda`` on the CPU, and NCCL's collectives over gloo.

A CPU runs operations in program order, so streams and events have nothing to order. Importing this
module replaces nothing; the tables at its end list what ``cpu_ranks.enable`` replaces.
"""

import functools
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
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

    device = CPU
    enter_result = None

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Accept and ignore ``device`` and ``priority``."""

    def synchronize(self) -> None:
        """Return at once."""

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:  # type: ignore[override]
        """Record ``event``, or a new one, and return it."""
        event = CpuEvent() if event is None else event
        event.record()
        return event


DEFAULT_STREAM = CpuStream()
# The capability is that of Hopper: Megatron then asks for its CUDA_DEVICE_MAX_CONNECTIONS.
PROPERTIES = SimpleNamespace(name="cpu", major=9, minor=0, total_memory=1 << 34)


def constant[T](value: T) -> Callable[..., T]:
    """Return a function that ignores its arguments and returns ``value``."""
    return lambda *_args, **_kwargs: value


def _is_cuda(device: object) -> bool:
    """Return whether ``device``, in any form that torch accepts, is a CUDA device."""
    if isinstance(device, int):
        return not isinstance(device, bool)
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
    ) -> Any:
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


def without_pinning(original: Callable[..., None]) -> Callable[..., None]:
    """Return ``DataLoader.__init__`` with ``pin_memory`` off: it fails without a driver."""

    def __init__(self: torch.utils.data.DataLoader[Any], *args: object, **kwargs: object) -> None:
        original(self, *args, **{**kwargs, "pin_memory": False})

    return __init__


def as_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return c10d's ``_new_process_group_helper`` that creates gloo groups in place of NCCL's.

    ``init_process_group``, ``new_group`` and their relatives all end in it. NCCL's options and the
    device to bind to are dropped with the backend.
    """

    @functools.wraps(original)
    def _new_process_group_helper(
        size: int, rank: int, ranks: list[int], backend: str, *args: object, **kwargs: object
    ) -> tuple[dist.ProcessGroup | None, dist.Store | None]:
        # "undefined" is init_process_group without a backend: torch would choose NCCL, as a GPU is
        # "available". Megatron's callers ask for both backends by "cpu:gloo,cuda:nccl".
        if "nccl" in str(backend) or str(backend) == "undefined":
            backend = dist.Backend(dist.Backend.GLOO)
            kwargs["backend_options"] = None
        kwargs["device_id"] = None
        return original(size, rank, ranks, backend, *args, **kwargs)

    return _new_process_group_helper


def mesh_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``DeviceMesh.from_group`` that makes CPU meshes in place of CUDA's."""

    @functools.wraps(original)
    def from_group(group: Any, device_type: str, *args: object, **kwargs: object) -> Any:
        return original(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return from_group


def averaging(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reduction that averages by dividing its input, then summing.

    Communication: as the original.
    Memory: for an average a copy of the input, unless the reduction is in place.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def reduction(*args: object, **kwargs: object) -> dist.Work | None:
        """Replace an average by a sum of shares."""
        bound = signature.bind(*args, **kwargs)
        values: dict[str, Any] = bound.arguments
        if values.get("op") == dist.ReduceOp.AVG:
            values["op"] = dist.ReduceOp.SUM
            size = dist.get_world_size(values.get("group"))
            if "input" in values:
                values["input"] = values["input"] / size
            else:
                values["tensor"].div_(size)
        return original(*bound.args, **bound.kwargs)

    return reduction


def uneven_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``all_gather`` that accepts outputs of different sizes, as layer-wise Muon has.

    Gloo gathers equal blocks only, so all are padded to the largest. Every rank knows all the
    sizes, so that all decide in the same way.

    Communication: one ``all_gather`` of the largest size per rank, blocking if sizes differ.
    Memory: world size blocks of the largest size.
    """

    @functools.wraps(original)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather padded tensors if their sizes differ."""
        numel = max(output.numel() for output in tensor_list)
        if all(output.numel() == numel for output in tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        gathered = [tensor.new_empty(numel) for _ in tensor_list]
        padded = torch.nn.functional.pad(tensor.detach().reshape(-1), (0, numel - tensor.numel()))
        original(gathered, padded, group=group)
        for output, flat in zip(tensor_list, gathered, strict=True):
            output.copy_(flat[: output.numel()].view(output.shape))
        # Callers wait for work only if there is some.
        return None

    return all_gather


def waiting_coalescing_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``_coalescing_manager`` whose collectives are complete when the context ends.

    A stand-in stream cannot keep a buffer alive while a collective uses it.

    Communication: as the original, blocking even with ``async_ops``.
    """

    @contextmanager
    def _coalescing_manager(
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        async_ops: bool = False,
    ) -> Iterator[Any]:
        with original(group, device, async_ops=False) as pending:
            yield pending

    return functools.wraps(original)(_coalescing_manager)


_CUDA: dict[str, Any] = {
    # One device per rank, the CPU, always present; there is no driver to initialise.
    "is_available": constant(True),
    "device_count": constant(1),
    "current_device": constant(0),
    "set_device": constant(None),
    "device": nullcontext,
    "get_device_properties": constant(PROPERTIES),
    "_lazy_call": lambda function, **_: function(),
    # A CPU runs in program order.
    "Stream": CpuStream,
    "Event": CpuEvent,
    "stream": nullcontext,
    "current_stream": constant(DEFAULT_STREAM),
    "is_current_stream_capturing": constant(False),
    "synchronize": constant(None),
    # The device draws from the CPU's generator. torch.manual_seed calls manual_seed_all after
    # seeding the CPU's generator, which is harmless.
    "default_generators": (torch.default_generator,),
    "manual_seed": torch.default_generator.manual_seed,
    "manual_seed_all": torch.default_generator.manual_seed,
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "random.get_rng_state": lambda *_, **__: torch.get_rng_state(),
    # The original would wait for a driver and leave the generator as it is.
    "set_rng_state": lambda new_state, *_, **__: torch.set_rng_state(new_state),
    # No device memory to count.
    "empty_cache": constant(None),
    "memory_allocated": constant(0),
    "memory_reserved": constant(0),
    "max_memory_allocated": constant(0),
    "max_memory_reserved": constant(0),
    "memory_stats": constant(Counter()),
    "nvtx.range_push": constant(None),
    "nvtx.range_pop": constant(None),
}

VALUES: dict[str, Any] = {
    **{f"torch.cuda.{name}": value for name, value in _CUDA.items()},
    # torch.optim asks an accelerator's stream, which needs a driver, from torch 2.15 on.
    "torch.accelerator.is_available": constant(False),
    "torch.Tensor.cuda": lambda tensor, *_, **__: tensor,
}

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "torch.utils.data.DataLoader.__init__": without_pinning,
    # Megatron asks for CUDA meshes by name.
    "torch.distributed.device_mesh.DeviceMesh.from_group": mesh_on_cpu,
}

COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    # --distributed-backend defaults to NCCL, which needs GPUs.
    "torch.distributed.distributed_c10d._new_process_group_helper": as_gloo,
    # Gloo has no average.
    "torch.distributed.all_reduce": averaging,
    "torch.distributed.reduce_scatter_tensor": averaging,
    # Gloo gathers equal blocks only.
    "torch.distributed.all_gather": uneven_all_gather,
    "torch.distributed._coalescing_manager": waiting_coalescing_manager,
}
