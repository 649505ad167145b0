# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Count the work that a step sends to torch's dispatcher.

- Operation: one call. A ``_foreach_`` operation counts once for its whole list, as a GPU runs it as
  one fused kernel. Views, allocations and calls on empty tensors are not counted, and DTensor's
  calls only on local tensors.
- Matrix products and collectives have counts of their own.
- Bytes: all tensors that an operation reads and writes. A tensor that is changed in place counts
  twice; ``copy_``, ``fill_`` and ``out=`` write only.
- Host read: a call that makes the host wait for a GPU. ``item()`` reaches the dispatcher;
  ``tolist()``, ``cpu()``, and ``torch.tensor`` of tensors or of numbers on a device do not.
"""

from collections import Counter
from collections.abc import Callable, Sequence
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


class OperationCounter(TorchDispatchMode):
    """Count what is sent to the dispatcher in this thread; as a context.

    DTensor's own operations are not counted, those on its local tensors are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.matrix_products: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        # Reads past the dispatcher are there by the function that does them.
        self.host_reads: Counter[str] = Counter()
        self._past_dispatcher = _ReadsPastDispatcher(self.host_reads)

    def __enter__(self) -> "OperationCounter":
        """Count from here on."""
        self._past_dispatcher.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Count no more."""
        super().__exit__(*error)
        self._past_dispatcher.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count an operation on plain tensors; leave DTensor's to DTensor, which makes them."""
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        full_name = func._schema.name
        name = full_name.partition("::")[2]
        if func.namespace in COLLECTIVES:
            # wait_tensor launches nothing.
            self.collectives[full_name] += "wait" not in name
        elif name in HOST_READS:
            self.host_reads[full_name] += 1
        elif name in MATRIX_PRODUCTS:
            self.matrix_products[full_name] += 1
        elif not (name in ALLOCATIONS or name in NOTHING or _is_view(func)):
            num_bytes = _bytes_moved(name, func, args, kwargs, result)
            # An empty tensor launches no kernel.
            if num_bytes:
                self.operations[full_name] += 1
                self.num_bytes[full_name] += num_bytes
        return result

    def count_row_kernel(self) -> None:
        """Count a launch of the kernel that moves rows as one operation, and not what runs it."""
        from megatron_muon.runtime import row_kernel

        launch = row_kernel.launch

        def counted(table: Any, *args: Any) -> None:
            """Count a launch, and what it reads and writes; run it uncounted."""
            # Triton's interpreter copies tensors, which no GPU does.
            uncounted(launch)(table, *args)
            num_elements = int((table.moves[:, 8] * table.moves[:, 9]).sum())
            self.operations["row_kernel"] += 1
            self.num_bytes["row_kernel"] += num_elements * sum(d.itemsize for d in table.dtypes)

        row_kernel.launch = uncounted(counted)


def uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose calls of torch are not counted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return call


def _is_view(func: Any) -> bool:
    """Return whether what comes back shares memory with an argument, and nothing is written."""
    aliases = [argument.alias_info for argument in func._schema.arguments]
    returned = [value.alias_info is not None for value in func._schema.returns]
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
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    # Not data_ptr(), which fake tensors lack.
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


class _ReadsPastDispatcher(TorchFunctionMode):
    """Find reads by the host that do not reach the dispatcher where tensors are on a CPU."""

    def __init__(self, reads: Counter[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count the tensors that become numbers."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.as_tensor and isinstance(args[0], torch.Tensor):
            pass  # it is there already
        elif func in (torch.tensor, torch.as_tensor):
            # One after the other: each is an item() of its own.
            found = sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(args))
            # Numbers are copied from pageable memory, for which the host waits as well.
            is_copy = isinstance(kwargs.get("device"), torch.device)
            self._reads[f"torch.{name}"] += found or is_copy
        elif func in (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy):
            self._reads[f"Tensor.{name}"] += 1
        elif func is torch.Tensor.to and "cpu" in map(str, (*args[1:], *kwargs.values())):
            self._reads["Tensor.to"] += 1
        return func(*args, **kwargs)


class Launches:
    """Replace what a GPU would run by functions that count, and do nothing; as a context."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> "Launches":
        """Replace nothing yet."""
        return self

    def __exit__(self, *error: Any) -> None:
        """Undo all replacements."""
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)

    def replace(self, owner: Any, name: str, result: Callable[..., Any]) -> None:
        """Replace a function by one that counts, and returns ``result`` of its arguments."""
        self._replaced.append((owner, name, getattr(owner, name)))

        def counted(*args: Any, **kwargs: Any) -> Any:
            """Count instead of computing."""
            self.counts[name] += 1
            return result(*args, **kwargs)

        setattr(owner, name, counted)

    def replace_arithmetic(self) -> None:
        """Replace the functions that the step and AdamW call on lists and whole tensors."""
        from megatron_muon.newton_schulz import BACKENDS
        from megatron_muon.runtime import row_kernel

        numbers: dict[tuple[int, Any], Any] = {}

        def norms(tensors: Sequence[Any], *_: Any, dtype: Any = None, **__: Any) -> Any:
            """Return as many numbers as tensors."""
            key = len(tensors), dtype or tensors[0].dtype
            if key not in numbers:
                device = tensors[0].device
                numbers[key] = tuple(torch.ones((), dtype=key[1], device=device) for _ in tensors)
            return numbers[key]

        def same(first: Any, *_: Any, **kwargs: Any) -> Any:
            """Return the result where it is given, otherwise what is as large."""
            return kwargs.get("out", first)

        for name in dir(torch):
            if name.startswith("_foreach_") and callable(getattr(torch, name)):
                self.replace(torch, name, norms if name == "_foreach_norm" else same)
        for name in ("div", "mul"):
            self.replace(torch, name, same)
        for backend in BACKENDS.values():
            self.replace(type(backend), "run", lambda self, stack, call: stack)
        self.replace(row_kernel, "launch", lambda *_, **__: None)

    def of(self, step: Callable[[], Any]) -> Counter[str]:
        """Count a step: what is replaced, and what else reaches the dispatcher."""
        self.counts.clear()
        with OperationCounter() as counter:
            step()
        return self.counts + Counter({"other": counter.operations.total()})
