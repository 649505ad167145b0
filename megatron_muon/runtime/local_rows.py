# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""This rank's rows: read normalized for sending, and written scaled as results arrive."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.methods import Namo
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.routes import Route
from megatron_muon.runtime.moments import Moments
from megatron_muon.runtime.norms import BlockNorms
from megatron_muon.runtime.row_moves import RowMoves
from megatron_muon.runtime.stacks import in_shard

# Identifies the rows that this rank holds of a matrix: a parameter, or part of one.
type Handle = Hashable
# These rows, (local_rows, cols) float32.
type Rows = Mapping[Handle, torch.Tensor]


class LocalRows:
    """Rows of the matrices of one plan on this rank, while a step runs.

    At construction every list of rectangles that a step reads or writes is added, once. In a step:
    :meth:`begin`, then :meth:`read` and :meth:`write` of every list, in the same order in each
    step, and :meth:`end`.

    Args:
        plan: The plan, equal on all ranks of the group.
        newton_schulz: The scale of results.
        handles: By matrix of the plan, handles of the rows that this rank holds.
        moments: State of a method; None without one.
        rank: This rank of the job.
        group: Ranks of the plan; None for a rank alone.
        device: Where messages and stacks are.
        rows_device: Where rows are, if they are in CPU memory; None for ``device``.

    Communication: :meth:`begin` is one all-reduce of 8 bytes a block if rows are sent in bf16, or
        16 if a method needs norms.
    Memory: that of :class:`RowMoves`, and a few bytes a block.
    """

    # Of the step before too, so that their views serve this one if they are the same.
    _updates: Rows | None
    _results: Rows | None
    _reads: list[RowMoves]
    _writes: list[RowMoves]
    # By write, the handles that are complete then; found in the first step.
    _completed: dict[int, list[Handle]]
    _is_known: bool

    def __init__(
        self,
        plan: ExchangePlan,
        newton_schulz: NewtonSchulzSettings,
        handles: Mapping[int, Handle],
        moments: Moments | None = None,
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        rows_device: torch.device | None = None,
    ) -> None:
        self._plan = plan
        self._newton_schulz = newton_schulz
        self._handles = handles
        self._device = device
        # One device alone has a kernel for all rows.
        self._by_kernel = False if rows_device not in (None, device) else None
        method = newton_schulz.method
        self._norm_method = method if isinstance(method, Namo) else None
        self.norms = BlockNorms(
            plan, rank, group, device, rows_device or device, self._norm_method, moments
        )
        self._to_read: list[Sequence[tuple[Route, torch.Tensor]]] = []
        self._to_write: list[Sequence[tuple[Route, torch.Tensor]]] = []
        self._missing: Counter[int] = Counter()
        self._completed, self._is_known = {}, False
        self._updates = self._results = None
        self._reads, self._writes = [], []

    def add_read(self, targets: Sequence[tuple[Route, torch.Tensor]]) -> int:
        """Add a list of routes that are copied to targets, and return its number.

        Args:
            targets: Routes, with ``(num_rows, num_cols)`` in the gather dtype.
        """
        self._to_read.append(targets)
        return len(self._to_read) - 1

    def add_write(self, results: Sequence[tuple[Route, torch.Tensor]]) -> int:
        """Add a list of results that are written to this rank's rows, and return its number.

        Args:
            results: Routes, with ``(num_rows, num_cols)`` in the scatter dtype.
        """
        self._to_write.append(results)
        return len(self._to_write) - 1

    def begin(self, updates: Rows, results: Rows) -> None:
        """Set the rows of a step, and reduce their norms; see :meth:`Engine.orthogonalize`."""
        if updates is not self._updates or results is not self._results:
            self._view(updates, results)
        # fp32 rows are not normalized before they are sent.
        if self._plan.wire.norm_bytes:
            self.norms.reduce()
        if not self._is_known:
            # An earlier step may have ended with an exception.
            self._completed.clear()
            self._missing = Counter(
                route.matrix for results in self._to_write for route, _ in results
            )

    def _view(self, updates: Rows, results: Rows) -> None:
        """View the rows that the lists read and write."""
        of_updates = {index: updates[each] for index, each in self._handles.items()}
        of_results = {index: results[each] for index, each in self._handles.items()}
        normalizes = self._plan.wire.normalizes
        if self._plan.wire.norm_bytes:
            self.norms.view(of_updates)
        self._reads = self._reads or [
            RowMoves(
                (),
                norms=[self.norms.position(route) for route, _ in targets] if normalizes else None,
                device=self._device,
                by_kernel=self._by_kernel,
            )
            for targets in self._to_read
        ]
        # Query, key and value have factors of their own.
        self._writes = self._writes or [
            RowMoves(
                (),
                norms=None
                if self._norm_method is None
                else [self.norms.position(route) for route, _ in written],
                factors=[self._scale(route) for route, _ in written],
                device=self._device,
                by_kernel=self._by_kernel,
            )
            for written in self._to_write
        ]
        for read, targets in zip(self._reads, self._to_read, strict=True):
            read.set([(in_shard(of_updates[r.matrix], r), target) for r, target in targets])
        for write, written in zip(self._writes, self._to_write, strict=True):
            write.set([(result, in_shard(of_results[r.matrix], r)) for r, result in written])
        self._updates, self._results = updates, results

    def end(self) -> None:
        """End a step in which everything has been read and written."""
        self._is_known = True

    def forget(self) -> None:
        """Drop the rows, which are memory of the caller's."""
        self._updates = self._results = None
        for moves in (*self._reads, *self._writes):
            moves.set(())
        self.norms.view({})

    def read(self, number: int) -> None:
        """Copy the routes of a list to their targets, divided by the norms of their blocks."""
        self._reads[number].run(self.norms.values if self._plan.wire.normalizes else None)

    def write(self, number: int) -> list[Handle]:
        """Scale the results of a list in fp32, and write them to this rank's rows.

        Returns:
            Handles of the rows whose last results these are.
        """
        self._writes[number].run(self.norms.factors)
        if not self._is_known:
            self._completed[number] = []
            for route, _ in self._to_write[number]:
                self._missing[route.matrix] -= 1
                if self._missing[route.matrix] == 0:
                    self._completed[number].append(self._handles[route.matrix])
        return self._completed[number]

    def _scale(self, route: Route) -> Sequence[float]:
        """Return the two factors of a block, which upstream multiplies with in turn."""
        matrix = self._plan.matrices[route.matrix]
        rows, cols = matrix.blocks[route.block]
        return self._newton_schulz.scale(*((cols, rows) if matrix.is_transposed else (rows, cols)))
