# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""This rank's rows: read normalized for sending, and written scaled as results arrive."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.routes import Route
from megatron_muon.runtime.equally_spaced import as_one
from megatron_muon.runtime.norms import BlockNorms
from megatron_muon.runtime.stacks import in_shard

# Identifies the rows that this rank holds of a matrix: a parameter, or part of one.
type Handle = Hashable
# These rows, (local_rows, cols) float32.
type Rows = Mapping[Handle, torch.Tensor]


class LocalRows:
    """Rows of the matrices of one plan on this rank, while a step runs.

    In a step: :meth:`begin`, then :meth:`read` and :meth:`write` for every route, :meth:`end`.

    Args:
        plan: The plan, equal on all ranks of the group.
        newton_schulz: The scale of results.
        handles: By matrix of the plan, handles of the rows that this rank holds.
        num_results: By matrix, how many pieces their results arrive in.
        rank: This rank of the job.
        group: Ranks of the plan; None for a rank alone.
        device: Where shards are.

    Communication: :meth:`begin` is one all-reduce of 8 bytes a block if rows are sent in bf16.
    Memory: a few bytes a block.
    """

    _momentum: dict[int, torch.Tensor]  # by matrix, in this step
    _results: dict[int, torch.Tensor]  # by matrix, in this step; may be the same memory
    _norms: BlockNorms
    _num_results: Mapping[int, int]  # pieces that results arrive in, by matrix
    _missing: dict[int, int]  # of them, those that have not arrived yet in this step
    _factors: dict[float, torch.Tensor]  # (1, 1) float32 on the device, by value

    def __init__(
        self,
        plan: ExchangePlan,
        newton_schulz: NewtonSchulzSettings,
        handles: Mapping[int, Handle],
        num_results: Mapping[int, int],
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._newton_schulz = newton_schulz
        self._handles = handles
        self._device = device
        self._norms = BlockNorms(plan, rank, group, device)
        self._num_results = num_results
        self._factors = {}

    def begin(self, momentum: Rows, results: Rows) -> None:
        """Set the rows of a step, and reduce their norms; see :meth:`Engine.orthogonalize`.

        The rows of an earlier step that ended with an exception are dropped.
        """
        self._momentum = {index: momentum[each] for index, each in self._handles.items()}
        self._results = {index: results[each] for index, each in self._handles.items()}
        self._missing = dict(self._num_results)
        # fp32 rows are not normalized before they are sent.
        if self._plan.wire.normalizes:
            self._norms.reduce(self._momentum)

    def end(self) -> None:
        """Drop the rows, which may be memory of the caller's."""
        self._momentum, self._results = {}, {}

    def read(self, targets: Sequence[tuple[Route, torch.Tensor]]) -> None:
        """Copy routes to their targets, ``(num_rows, num_cols)`` in the gather dtype."""
        calls = [
            _Call([route], in_shard(self._momentum[route.matrix], route), target)
            for route, target in targets
        ]
        if not self._plan.wire.normalizes:
            if calls:
                torch._foreach_copy_([call.other for call in calls], [call.rows for call in calls])
            return
        for routes, rows, target in self._merged(calls, can_join=self._norms.are_even):
            # One pass: the quotient is computed in fp32, and rounded as it is written.
            torch.div(rows, self._norms.of(routes), out=target)

    def write(self, results: Sequence[tuple[Route, torch.Tensor]]) -> list[Handle]:
        """Scale results in fp32, and write them to this rank's rows.

        Args:
            results: Routes, with ``(num_rows, num_cols)`` in the scatter dtype.

        Returns:
            Handles of the rows whose last results these are.
        """
        calls = self._merged(
            [
                _Call([route], in_shard(self._results[route.matrix], route), result)
                for route, result in results
            ]
        )
        if not calls:
            return []
        # Query, key and value have factors of their own. Upstream multiplies with two factors in
        # turn; their product would round differently.
        first, *others = zip(*(self._scale(call.routes[0]) for call in calls), strict=True)
        for call, factor in zip(calls, first, strict=True):
            # One pass for the copy to fp32 and the first factor.
            torch.mul(call.other, self._on_device(factor), out=call.rows)
        for factors in others:
            if any(factor != 1.0 for factor in factors):
                torch._foreach_mul_([call.rows for call in calls], list(factors))
        return self._completed([route for route, _ in results])

    def _merged(
        self,
        calls: Sequence["_Call"],
        can_join: Callable[[Sequence[Route]], bool] = lambda routes: True,
    ) -> list["_Call"]:
        """Join the calls of routes that are equally spaced in memory on both sides.

        Fused query, key and value alternate in a shard: the rows of one of them are equally spaced
        over the query groups. So are experts of a layer in the buffer of Megatron-FSDP, and in a
        stack.

        Args:
            calls: With one route.
            can_join: Whether one call can replace those of some routes of one shape.
        """
        by_shape: dict[object, list[_Call]] = defaultdict(list)
        num_routes = Counter(_block(call) for call in calls)
        for call in calls:
            # Query groups of a block have one norm; whole blocks of one shape have one factor.
            block = _block(call) if num_routes[_block(call)] > 1 else None
            by_shape[block, self._scaled_shape(call.routes[0]), call.rows.shape].append(call)
        merged: list[_Call] = []
        for group in by_shape.values():
            routes = [call.routes[0] for call in group]
            rows = as_one([call.rows for call in group])
            other = as_one([call.other for call in group])
            if len(group) == 1 or rows is None or other is None or not can_join(routes):
                merged += group
            else:
                merged.append(_Call(routes, rows, other))
        return merged

    def _scaled_shape(self, route: Route) -> tuple[int, int]:
        """Return outputs and inputs of a block, by which its result is scaled."""
        matrix = self._plan.matrices[route.matrix]
        rows, cols = matrix.blocks[route.block]
        return (cols, rows) if matrix.is_transposed else (rows, cols)

    def _scale(self, route: Route) -> Sequence[float]:
        return self._newton_schulz.scale(*self._scaled_shape(route))

    def _on_device(self, factor: float) -> torch.Tensor:
        """Return a factor as a float32 matrix of one element.

        A number, or a tensor without dimensions, would be multiplied in the dtype of the result,
        which is bf16.
        """
        if factor not in self._factors:
            self._factors[factor] = torch.full((1, 1), factor, device=self._device)
        return self._factors[factor]

    def _completed(self, routes: Sequence[Route]) -> list[Handle]:
        complete = []
        for route in routes:
            self._missing[route.matrix] -= 1
            if self._missing[route.matrix] == 0:
                complete.append(self._handles[route.matrix])
        return complete


class _Call(NamedTuple):
    """Rows that are read or written by one call.

    Args:
        routes: One, or several of one shape.
        rows: This rank's rows, ``(num_rows, num_cols)``, of several routes
            ``(num_routes, num_rows, num_cols)``.
        other: Where they go to or come from, of the same shape.
    """

    routes: Sequence[Route]
    rows: torch.Tensor
    other: torch.Tensor


def _block(call: _Call) -> tuple[int, int]:
    return call.routes[0].matrix, call.routes[0].block
