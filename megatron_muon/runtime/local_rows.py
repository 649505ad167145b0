# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Transfers of this rank's rows, normalized before sending, and scaled as results arrive."""

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.backend import Backend, NewtonSchulzArgs
from megatron_muon.newton_schulz.settings import Namo, NewtonSchulzSettings, StackMethod
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.routes import Route
from megatron_muon.plan.sizes import Stack, num_elements
from megatron_muon.runtime.exchange import RouteView
from megatron_muon.runtime.moments import Moments
from megatron_muon.runtime.norms import BlockNorms
from megatron_muon.runtime.row_moves import Addresses, RowMoves

# Identifies the rows that this rank holds of a matrix: a parameter, or part of one.
type Handle = Hashable
# These rows, (local_rows, cols) float32.
type Rows = Mapping[Handle, torch.Tensor]


@dataclass
class RowTransfer:
    """Routes that are copied together between this rank's rows and other memory.

    Args:
        views: The routes in the other memory.
        moves: Copies them.
        completed: Handles of the rows whose last results these are, computed in the first step:
            the order never changes, and counting takes the host 200 us for 384 matrices.
    """

    views: Sequence[RouteView]
    moves: RowMoves
    completed: list[Handle] | None = None


class LocalRows:
    """Rows of the matrices of one plan on this rank, while a step runs.

    All transfers of a step are added once, at construction. In a step: ``view()`` if rows are not
    those of the step before, ``begin()``, then ``read()`` and ``write()`` of every transfer, in the
    same order in each step.

    Args:
        plan: The plan, equal on all ranks of the group.
        newton_schulz: The scale of results.
        handles: By matrix of the plan, handles of the rows that this rank holds.
        moments: State of a method; None without one.
        group: Ranks of the plan; None for a rank alone.
        addresses: Of messages and stacks, which are all in the tensor of number 0. Rows are added
            to them.
        rows_device: Where rows are.

    Attributes:
        norms: Norms of blocks.

    Communication: ``begin()`` is one all-reduce of 8 bytes a block if rows are sent in bf16, or 16
        if a method needs norms.
    Memory: that of ``RowMoves``, and a few bytes a block.
    """

    _strides: list[tuple[int, ...]] | None = None  # of the rows that the tables are for

    def __init__(
        self,
        plan: ExchangePlan,
        newton_schulz: NewtonSchulzSettings,
        handles: Mapping[int, Handle],
        moments: Moments | None,
        group: dist.ProcessGroup | None,
        addresses: Addresses,
        rows_device: torch.device,
    ) -> None:
        self._plan = plan
        self._newton_schulz = newton_schulz
        self._handles = handles
        device = addresses.device
        self._addresses = addresses
        # The kernel moves rows within one device.
        self._by_kernel = addresses.by_kernel and rows_device == device
        method = newton_schulz.method
        namo = method if isinstance(method, Namo) else None
        self._has_factors = namo is not None
        self.norms = BlockNorms(plan, group, device, rows_device, namo, moments)
        self._missing: Counter[int] = Counter()
        self._reads: list[RowTransfer] = []
        self._writes: list[RowTransfer] = []

    def add_read(self, targets: Sequence[RouteView]) -> RowTransfer:
        """Add a transfer from this rank's rows to targets in the gather dtype."""
        return self._add(self._reads, targets, self._plan.dtypes.normalizes)

    def add_write(self, results: Sequence[RouteView]) -> RowTransfer:
        """Add a transfer from results in the scatter dtype to this rank's rows."""
        # Query, key and value have factors of their own.
        factors = [self._scale(route) for route, _ in results]
        return self._add(self._writes, results, self._has_factors, factors)

    def _add(
        self,
        transfers: list[RowTransfer],
        views: Sequence[RouteView],
        has_norms: bool,
        factors: Sequence[Sequence[float]] | None = None,
    ) -> RowTransfer:
        norms = [self.norms.position(route) for route, _ in views] if has_norms else None
        moves = RowMoves(
            (), self._addresses, norms=norms, factors=factors, by_kernel=self._by_kernel
        )
        transfers.append(RowTransfer(views, moves))
        return transfers[-1]

    def begin(self) -> None:
        """Reduce the norms of the rows of a step."""
        # fp32 rows are not normalized before they are sent.
        if self._plan.dtypes.norm_bytes:
            self.norms.reduce()
        if any(write.completed is None for write in self._writes):
            # The first step, or an earlier one that ended with an exception.
            for write in self._writes:
                write.completed = None
            self._missing = Counter(r.matrix for write in self._writes for r, _ in write.views)

    def view(self, updates: Rows, results: Rows) -> None:
        """View the rows of a step; see ``Engine.orthogonalize()``."""
        sources, targets = self.by_matrix(updates), self.by_matrix(results)
        if self._plan.dtypes.norm_bytes:
            self.norms.view(sources)
        rows = [*sources.values(), *targets.values()]
        first = len(self._addresses.tensors)
        if self._by_kernel:
            self._addresses.tensors += rows
        # Their tables serve rows at other addresses, numbered in the same order.
        strides = [each.stride() for each in rows]
        if self._by_kernel and strides == self._strides:
            return
        number = {matrix: first + i for i, matrix in enumerate(sources)}
        for read in self._reads:
            read.moves.set(
                [(in_shard(sources[r.matrix], r), to, number[r.matrix], 0) for r, to in read.views]
            )
        for write in self._writes:
            write.moves.set(
                [
                    (rows, in_shard(targets[r.matrix], r), 0, number[r.matrix] + len(number))
                    for r, rows in write.views
                ]
            )
        self._strides = strides

    def by_matrix(self, rows: Rows) -> dict[int, torch.Tensor]:
        """Return rows by index of their matrix."""
        return {index: rows[handle] for index, handle in self._handles.items()}

    def forget(self) -> None:
        """Drop the rows, which are memory of the caller's."""
        for transfer in (*self._reads, *self._writes):
            transfer.moves.set(())
        self.norms.view({})

    def read(self, transfer: RowTransfer) -> None:
        """Copy rows to their targets, divided by the norms of their blocks."""
        transfer.moves.run(self.norms.values if self._plan.dtypes.normalizes else None)

    def write(self, transfer: RowTransfer) -> list[Handle]:
        """Scale results in fp32, and write them to this rank's rows.

        Returns:
            Handles of the rows whose last results these are.
        """
        transfer.moves.run(self.norms.factors)
        if transfer.completed is None:
            transfer.completed = []
            for route, _ in transfer.views:
                self._missing[route.matrix] -= 1
                if self._missing[route.matrix] == 0:
                    transfer.completed.append(self._handles[route.matrix])
        return transfer.completed

    def _scale(self, route: Route) -> tuple[float, float]:
        """Return the two factors of a block, which upstream multiplies with in turn."""
        matrix = self._plan.matrices[route.matrix]
        rows, cols = matrix.blocks[route.block]
        return self._newton_schulz.scale(*((cols, rows) if matrix.is_transposed else (rows, cols)))


# Tensors like a stack that a method may allocate; see StackMethod.
_METHOD_TENSORS = 3


@dataclass
class StackTask:
    """Orthogonalization of a stack, and a method on its results.

    Args:
        tensor: ``(num_matrices, rows, cols)``.
        backend: Backend of Newton-Schulz.
        args: Arguments of the backend.
        owners: Ranks that orthogonalize it together.
        state_index: Indices of a method's state among all values of the plan; None without one.
    """

    tensor: torch.Tensor
    backend: Backend
    args: NewtonSchulzArgs
    owners: tuple[int, ...]
    state_index: torch.Tensor | None = None

    def run(self) -> None:
        """Replace the matrices by their results."""
        # One stack after the other: results of all would need as much memory again. The
        # copy also makes results of tall matrices contiguous, which are transposed views.
        rows, size = self._rows(), batch_size(self.tensor)
        if size == len(rows):
            # Views of all its matrices would take the host 8 us more.
            self._replace(self.tensor, rows)
            return
        for stack, part in zip(self.tensor.split(size), rows.split(size), strict=True):
            self._replace(stack, part)

    def _replace(self, stack: torch.Tensor, rows: torch.Tensor) -> None:
        function = self.args.settings.function
        if function is None:
            stack.copy_(self.backend.run(rows, self.args))
        else:
            stack.copy_(_checked(function(rows), rows, "newton_schulz"))

    def _rows(self) -> torch.Tensor:
        """Return the stack in the dtype in which rows are sent: results may need a wider one."""
        return self.tensor.bfloat16() if self.args.is_normalized else self.tensor

    def check(self) -> None:
        """Compare the backend with its reference; see ``Backend.check()``."""
        # On this rank alone: if its kernel fails, others must not wait for it.
        args = dataclasses.replace(self.args, parts_group=None)
        dtype = torch.bfloat16 if args.is_normalized else self.tensor.dtype
        # The memory of the stack itself exists in a step alone.
        drawn = torch.empty(self.tensor.shape, dtype=dtype, device=self.tensor.device)
        self.backend.check(drawn, args)

    def apply_method(self, values: torch.Tensor) -> None:
        """Call the method on the results.

        Args:
            values: State of the plan, ``(num_values,)`` float32, which it updates.
        """
        method = self.args.settings.method
        if self.state_index is None or not isinstance(method, StackMethod):
            return
        state = values[self.state_index]
        results = method(self.tensor, state)
        self.tensor.copy_(_checked(results, self.tensor, type(method).__name__))
        values[self.state_index] = state

    @property
    def workspace_bytes(self) -> int:
        """Memory that is needed beside the stack, at most."""
        rows = self.tensor.to("meta")
        if self.args.is_normalized:
            rows = rows.bfloat16()
        num_bytes = self.backend.workspace_bytes(rows, self.args.whole_shape)
        num_bytes += rows.nbytes * (rows.dtype != self.tensor.dtype)
        if self.state_index is not None:
            num_bytes = max(
                num_bytes, _METHOD_TENSORS * self.tensor.nbytes + 4 * self.state_index.numel()
            )
        return num_bytes


def batch_size(stack: torch.Tensor) -> int:
    """Return how many matrices are orthogonalized in one call: on a GPU all of a stack.

    On a CPU it is one. Which kernel multiplies a batch there, and so the last bits, depends on the
    size of the batch: on what else a rank owns.
    """
    return 1 if stack.device.type == "cpu" else len(stack)


def _checked(result: object, stack: torch.Tensor, name: str) -> torch.Tensor:
    """Return a result of a user's function, which must have the shape and dtype of the stack."""
    if not isinstance(result, torch.Tensor):
        got = type(result).__name__
    elif (result.shape, result.dtype) != (stack.shape, stack.dtype):
        got = f"{tuple(result.shape)} {result.dtype}"
    else:
        return result
    raise TypeError(
        f"{name}: expected a function that returns {tuple(stack.shape)} {stack.dtype}, as it was "
        f"given, got {got}. Convert its result"
    )


class StackBuffers:
    """Stacks of one bucket, or one stack of local matrices, end to end in flat memory.

    Args:
        stacks: Shapes of the stacks.
        memory: Flat, with ``num_elements()`` of all stacks.

    Attributes:
        stacks: The stacks with their tensors, ``(num_matrices, rows, cols)``.
    """

    stacks: list[tuple[Stack, torch.Tensor]]
    _position: dict[tuple[int, int], tuple[int, int]]  # (matrix, block) -> (stack, index in it)

    def __init__(self, stacks: Sequence[Stack], memory: torch.Tensor) -> None:
        self.stacks = []
        self._position = {}
        offset = 0
        for number, stack in enumerate(stacks):
            shape = (len(stack), stack[0].num_rows, stack[0].num_cols)
            tensor = memory[offset : offset + math.prod(shape)].view(shape)
            self.stacks.append((stack, tensor))
            offset += num_elements(stack)
            for index, part in enumerate(stack):
                self._position[part.matrix, part.block] = (number, index)

    def view(self, route: Route) -> torch.Tensor:
        """View a route in the stacks, ``(num_rows, num_cols)``."""
        number, index = self._position[route.matrix, route.block]
        part = self.stacks[number][1][index]
        return part[route.row : route.row + route.num_rows, route.col : route.col + route.num_cols]


def in_shard(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """View a route in the shard of a holder, ``(local_rows, cols)``."""
    # Most are all of it, and a view is made for every route where rows move in every step.
    if (route.num_rows, route.num_cols) == rows.shape:
        return rows
    return rows[
        route.local_row : route.local_row + route.num_rows,
        route.local_col : route.local_col + route.num_cols,
    ]
