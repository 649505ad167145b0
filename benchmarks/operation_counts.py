# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Count what code sends to torch's dispatcher: operations, bytes, collectives, host reads."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_"}
# Each waits for the GPU: the host needs what it returns, or the shape of it.
HOST_READS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero", "item"}
COLLECTIVES = {"c10d", "_c10d_functional", "c10d_functional"}
# Memory without contents. Views are recognized by their schema.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# They return what they are given, or another view of it, which their schema does not say.
NOTHING = {"lift_fresh", "_unsafe_view", "_reshape_alias", "set_", "resize_"}
# Written from other arguments alone: what these arguments hold before is not read.
ONLY_WRITTEN = {"copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_"}


@dataclass
class Counts:
    """What one part of a step sent to the dispatcher.

    Args:
        operations: Calls by name, beside matrix products and collectives.
        num_bytes: Bytes that these calls read and write, by name.
        matrix_products: Calls.
        collectives: Calls by name.
        host_reads: Calls by name.
        unseen_reads: Values that the host reads past the dispatcher, by the function that does.
    """

    operations: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)
    matrix_products: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    host_reads: Counter[str] = field(default_factory=Counter)
    unseen_reads: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Counts") -> None:
        """Add another part's counts to these."""
        for name in ("operations", "num_bytes", "collectives", "host_reads", "unseen_reads"):
            getattr(self, name).update(getattr(other, name))
        self.matrix_products += other.matrix_products

    def as_json(self) -> dict[str, Any]:
        """Return plain dictionaries, the most frequent first."""
        return {
            name: dict(value.most_common()) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }


class OperationCounter:
    """Count by parts of a step: :meth:`within` names the part that runs.

    Calls outside of every part are counted as part ``""``. DTensor's own operations are not
    counted, those on its local tensors are.
    """

    def __init__(self) -> None:
        self.parts: dict[str, Counts] = defaultdict(Counts)
        self._part = ""

    @property
    def now(self) -> Counts:
        """Return the counts of the part that runs."""
        return self.parts[self._part]

    def within(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is counted as a part of its own."""

        def call(*args: Any, **kwargs: Any) -> Any:
            """Call, and count here."""
            before, self._part = self._part, part
            try:
                return function(*args, **kwargs)
            finally:
                self._part = before

        return call

    def count_row_kernel(self) -> None:
        """Count a launch of the kernel that moves rows as one operation, and not what runs it."""
        from megatron_muon.runtime import row_kernel

        launch = row_kernel.launch

        def counted(table: Any, pointers: Any, norms: Any) -> None:
            """Count a launch, and what it reads and writes; run it uncounted."""
            # Triton's interpreter copies tensors, which no GPU does.
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                num_elements = int((table.moves[:, 8] * table.moves[:, 9]).sum())
                launch(table, pointers, norms)
            num_bytes = num_elements * sum(dtype.itemsize for dtype in table.dtypes)
            self.now.operations["row_kernel"] += 1
            self.now.num_bytes["row_kernel"] += num_bytes

        row_kernel.launch = counted

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what the block sends to the dispatcher in this thread."""
        with _UnseenReads(self), _Dispatched(self):
            yield


class _Dispatched(TorchDispatchMode):
    def __init__(self, counter: OperationCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count an operation on plain tensors; leave DTensor's to DTensor, which makes them."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        _count(self._counter.now, func, args, kwargs or {}, result)
        return result


def _count(
    counts: Counts, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> None:
    full_name = func._schema.name
    name = full_name.partition("::")[2]
    if func.namespace in COLLECTIVES:
        # wait_tensor launches nothing.
        counts.collectives[full_name] += "wait" not in name
    elif name in HOST_READS:
        counts.host_reads[full_name] += 1
    elif name in MATRIX_PRODUCTS:
        counts.matrix_products += 1
    elif not (name in ALLOCATIONS or name in NOTHING or _is_view(func)):
        num_bytes = _bytes_moved(name, func, args, kwargs, result)
        # An empty tensor launches no kernel.
        if num_bytes:
            counts.operations[full_name] += 1
            counts.num_bytes[full_name] += num_bytes


def _is_view(func: Any) -> bool:
    """Return whether what comes back shares memory with an argument, and nothing is written."""
    aliases = [argument.alias_info for argument in func._schema.arguments]
    returned = [each.alias_info is not None for each in func._schema.returns]
    is_written = any(alias is not None and alias.is_write for alias in aliases)
    return any(returned) and not is_written


def _bytes_moved(
    name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> int:
    """Add up what is read and what is written."""
    num_bytes = 0
    written = set()
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not is_written or not (argument.is_out or name in ONLY_WRITTEN)
        for tensor in _tensors(value):
            num_bytes += tensor.nbytes * (is_written + is_read)
            if is_written:
                written.add(_memory(tensor))
    # What was written in place, or to out=, comes back.
    return num_bytes + sum(t.nbytes for t in _tensors(result) if _memory(t) not in written)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class _UnseenReads(TorchFunctionMode):
    """Find reads by the host that do not reach the dispatcher where tensors are on a CPU."""

    def __init__(self, counter: OperationCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count the tensors that become numbers."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        reads = self._counter.now.unseen_reads
        if func in (torch.tensor, torch.as_tensor):
            # One after the other: each is an item() of its own.
            found = sum(isinstance(each, torch.Tensor) for each in tree_leaves(args))
            # Numbers are copied from pageable memory, for which the host waits as well.
            is_copy = isinstance(kwargs.get("device"), torch.device)
            reads[f"torch.{name}"] += found or is_copy
        elif func in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy):
            reads[f"Tensor.{name}"] += 1
        elif func is torch.Tensor.to and any(
            str(a) == "cpu" for a in (*args[1:], *kwargs.values())
        ):
            reads["Tensor.to"] += 1
        return func(*args, **kwargs)
