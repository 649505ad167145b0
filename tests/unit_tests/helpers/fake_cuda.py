# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors without a GPU: torch's FakeTensors, which have shapes, dtypes and devices alone.

What a GPU would be asked for is recorded: launches, bytes and collectives, as counting.py of the
benchmarks counts them, allocations, and whatever makes the host wait. Flags that the package reads
are not set; other numbers are 1, and comparisons true.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from counting import OperationCounter, uncounted
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

_PACKAGE = "megatron_muon"
# Optimizers of others, by the ends of their folders: their files are told from those of torch.
_OTHERS = (("torch", "optim"), ("megatron", "core"))
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_")

# They allocate what the question before the agreement has asked for.
_ASKED_FOR = (
    "newton_schulz/",
    "step/elementwise.py",
    "step/lion.py",
    "torch/optim/adam.py",
    "megatron/core/utils.py",
)


class Allocation(NamedTuple):
    """Memory that an operation took on the device."""

    num_bytes: int
    file: str
    live_bytes: int  # of all that are there since the last wait of the host


class Wait(NamedTuple):
    """A wait of the host for the GPU."""

    file: str
    line: int
    cause: str
    num_allocations: int


class Recorder(OperationCounter):
    """Records what is asked of CUDA devices while it is on.

    Attributes:
        allocations: In their order.
        waits: Reads of values, and synchronized streams.
        slow: Operations on tensors of the host and of a device. Copies between them are slow if the
            host waits: memory is not pinned, as that of Python's numbers, or not ``non_blocking``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pinned: dict[int, torch.UntypedStorage] = {}
        # Tables of the kernel that moves rows, and their elements.
        self.tables: list[tuple[Any, int]] = []
        self._since_wait: list[tuple[StorageWeakRef, int]] = []
        self.num_recordings = 0
        self.clear()

    def clear(self) -> None:
        """Record anew, as from the beginning of a step."""
        self.num_recordings += 1
        self.allocations: list[Allocation] = []
        self.waits: list[Wait] = []
        self.slow: list[Wait] = []
        for counts in (self.operations, self.num_bytes, self.matrix_products, self.collectives):
            counts.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation; list the storages that it returns and was not given."""
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented
        kwargs = dict(kwargs or {})
        given = _tensors((args, kwargs))
        places = {each.device.type for each in given}
        if func is torch.ops.aten._local_scalar_dense.default:
            if "cuda" in places:
                self.wait("item")
            return _number(given[0].dtype)
        name = func._schema.name
        target = torch.device(kwargs.get("device") or "cpu").type
        if name in _COPIES:
            self._record_copy(name, args, kwargs)
        elif len(places) > 1:
            self.slow.append(self._wait(name))
        old = {each.untyped_storage()._cdata for each in given}
        # The host's own operations are no launches.
        is_launched = ("cuda" in places or target == "cuda") and func.namespace != "prim"
        if is_launched:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        else:
            out = func(*args, **kwargs)
        new = {
            each.untyped_storage()._cdata: each.untyped_storage()
            for each in _tensors(out)
            if each.device.type == "cuda" and each.untyped_storage()._cdata not in old
        }
        if func is torch.ops.aten.resize_.default:
            new = {0: args[0].untyped_storage()}
        for storage in new.values():
            self._record_allocation(storage)
        return out

    def _record_allocation(self, storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        there = [each for each in self._since_wait if not each[0].expired()]
        self._since_wait = [*there, (StorageWeakRef(storage), num_bytes)]
        live_bytes = sum(size for _, size in self._since_wait)
        self.allocations.append(Allocation(num_bytes, _place()[0], live_bytes))

    def _record_copy(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        """List a copy between host and device if the host waits for it."""
        tensors = _tensors(args)
        devices = {each.device.type for each in tensors}
        if kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        on_host = [each for each in tensors if each.device.type == "cpu"]
        is_pinned = all(each.untyped_storage()._cdata in self._pinned for each in on_host)
        is_async = kwargs.get("non_blocking", len(args) > 2 and args[2])
        if devices == {"cpu", "cuda"} and not (is_pinned and is_async):
            self.slow.append(self._wait(name))

    def not_agreed_on(self, num_before: int, small_bytes: int) -> list[Allocation]:
        """Return the allocations that nothing before an agreement of ranks has asked for."""
        before, after = self.allocations[:num_before], self.allocations[num_before:]
        asked_bytes = max(each.num_bytes for each in before if each.file == "runtime/engine.py")
        assert asked_bytes > 100 * small_bytes
        most_bytes = asked_bytes + len(after) * small_bytes
        # It is no list of nothing: Newton-Schulz has temporaries.
        assert max(each.num_bytes for each in after) > small_bytes
        return [
            each
            for each in after
            if each.num_bytes > small_bytes
            and not (each.file.startswith(_ASKED_FOR) and each.live_bytes <= most_bytes)
        ]

    def wait(self, cause: str) -> None:
        self.waits.append(self._wait(cause))
        self._since_wait = []

    def _wait(self, cause: str) -> Wait:
        return Wait(*_place(), cause, len(self.allocations))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    def launch(self, table: Any, *_: Any) -> None:
        """Count the kernel that moves rows, and what it reads and writes."""
        num_elements = next(elements for known, elements in self.tables if known is table)
        self.operations["row_kernel"] += 1
        self.num_bytes["row_kernel"] += num_elements * sum(d.itemsize for d in table.dtypes)


def _number(dtype: torch.dtype) -> bool | float:
    """Return what the host reads: the package asks for problems, and whether ranks are equal."""
    if dtype == torch.bool:
        return True
    is_ours = not _place()[0].startswith(("torch", "megatron/"))
    return 0 if is_ours or not dtype.is_floating_point else 1.0


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def _place() -> tuple[str, int]:
    """Return the file and line that run, innermost first: of the package or of an optimizer."""
    frame = sys._getframe(2)
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        if _PACKAGE in parts:
            return "/".join(parts[parts.index(_PACKAGE) + 1 :]), frame.f_lineno
        for first, second in _OTHERS:
            if first in parts and second == parts[parts.index(first) + 1]:
                return "/".join(parts[parts.index(first) :]), frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "", 0


class _Stream:
    """A stream, which is its own context, or an event, which is over after its step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._recording: int | None = None

    def record(self, *_: Any) -> None:
        """Remember in which recording."""
        self._recording = self._recorder.num_recordings

    def synchronize(self) -> None:
        if self._recording in (None, self._recorder.num_recordings):
            self._recorder.wait("synchronize")

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    wait_stream = record_event = wait_event = wait = lambda self, *args: self


@contextmanager
def fake_cuda() -> Iterator[Recorder]:
    """Let tensors on "cuda" be fake ones; the kernel that moves rows is counted, and not run."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import optimizer

    from megatron_muon.runtime import row_kernel, row_moves

    recorder = Recorder()
    stream = _Stream(recorder)

    # They make tensors, of which some are pinned.
    def pinned(function: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            return recorder.pin(made) if pin_memory else made

        return make

    def tolist(tensor: torch.Tensor) -> Any:
        if tensor.device.type == "cuda":
            recorder.wait("tolist")
        return _zeros(tensor.shape)

    build = row_kernel.build_table

    def build_table(moves: Any, *args: Any) -> Any:
        num_elements = sum(move[8] * move[9] for move in moves)
        recorder.tables.append((build(moves, *args), num_elements))
        return recorder.tables[-1][0]

    replaced = [
        *((torch.cuda, name, lambda *_, **__: stream) for name in ("Stream", "stream")),
        (torch.cuda, "Event", lambda *_, **__: _Stream(recorder)),
        (torch.cuda, "current_stream", lambda *_: stream),
        (torch.cuda, "synchronize", lambda *_: recorder.wait("synchronize")),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "mem_get_info", lambda *args: (70 << 30, 80 << 30)),
        (torch.cuda, "get_device_capability", lambda *args: (9, 0)),
        (FakeTensor, "tolist", tolist),
        (torch.Tensor, "pin_memory", lambda self, *_: recorder.pin(self)),
        (torch, "empty", pinned(torch.empty)),
        (torch, "zeros", pinned(torch.zeros)),
        # Parameters are of this class in place of Parameter.
        (optimizer, "_foreach_supported_types", [*optimizer._foreach_supported_types, FakeTensor]),
        (DeviceMesh, "__init__", uncounted(DeviceMesh.__init__)),
        (row_moves, "uses_kernel", lambda device: device.type == "cuda"),
        (torch.Tensor, "data_ptr", lambda self: self.untyped_storage()._cdata),
        # The number of tiles follows from numbers.
        (row_kernel, "_tiles", lambda moves: torch.empty(1, 2, dtype=torch.int32)),
        (row_kernel, "build_table", build_table),
        (row_kernel, "launch", recorder.launch),
    ]
    # Torch keeps the functions that torch.device("meta") acts on, as they are in its first use.
    _device_constructors()
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(recorder)


def _zeros(shape: torch.Size) -> Any:
    return [_zeros(shape[1:]) for _ in range(shape[0])] if shape else 0
