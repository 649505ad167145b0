# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""This rank's rows: read normalized for sending, and written scaled as results arrive."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.routes import Route
from megatron_muon.runtime.equally_spaced import as_one
from megatron_muon.runtime.newton_schulz import NewtonSchulzSettings
from megatron_muon.runtime.norms import BlockNorms
from megatron_muon.runtime.stacks import in_shard

# Rows of this rank, (local_rows, cols) float32, by parameter.
type Rows = Mapping[torch.Tensor, torch.Tensor]


class LocalRows:
    """Rows of the parameters of one plan on this rank, while a step runs.

    In a step: :meth:`begin`, then :meth:`read` and :meth:`write` for each route, or for whole local
    matrices :meth:`read_stack` and :meth:`write_stack`.

    Args:
        plan: The plan, equal on all ranks of the group.
        newton_schulz: The scale of results.
        parameters: By matrix of the plan, the parameters of which this rank holds rows.
        rank: This rank of the job.
        group: Ranks of the plan; None where nothing travels.
        device: Where shards live.

    Communication: :meth:`begin` is one all-reduce of 8 bytes a block where rows travel in bf16.
    Memory: a few bytes a block.
    """

    _momentum: dict[int, torch.Tensor]  # by matrix, in this step
    _results: dict[int, torch.Tensor]  # by matrix, in this step; may be the same memory
    _norms: BlockNorms
    _num_routes: Counter[int]  # of which this rank gets the result, by matrix
    _missing: Counter[int]  # of them, those whose results have yet to come in this step
    _factors: dict[float, torch.Tensor]  # (1, 1) float32 on the device, by value

    def __init__(
        self,
        plan: ExchangePlan,
        newton_schulz: NewtonSchulzSettings,
        parameters: Mapping[int, torch.Tensor],
        *,
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._plan = plan
        self._newton_schulz = newton_schulz
        self._parameters = parameters
        self._device = device
        self._norms = BlockNorms(plan, rank, group, device)
        self._num_routes = Counter(
            index for index in parameters for route in plan.routes(index) if rank in route.holders
        )
        self._factors = {}

    def begin(self, momentum: Rows, results: Rows) -> None:
        """Take the rows of a step, and their norms; arguments as for :meth:`Engine.orthogonalize`.

        What an earlier step left behind that ended with an exception is dropped.
        """
        self._momentum = {index: momentum[param] for index, param in self._parameters.items()}
        self._results = {index: results[param] for index, param in self._parameters.items()}
        self._missing = Counter(self._num_routes)
        # fp32 rows are not normalized before they travel.
        if self._plan.wire.normalizes:
            self._norms.reduce(self._momentum)

    def end(self) -> None:
        """Drop the rows, which may be memory of the caller's."""
        self._momentum, self._results = {}, {}

    def read(self, targets: Sequence[tuple[Route, torch.Tensor]]) -> None:
        """Copy routes to where they go, ``(num_rows, num_cols)`` in the gather dtype."""
        pairs = [(route, self._rows(route), target) for route, target in targets]
        if self._plan.wire.normalizes:
            for route, rows, target in _merged(pairs):
                # One pass: the quotient is taken in fp32, and rounded as it is written.
                torch.div(rows, self._norms.of(route), out=target)
        elif targets:
            torch._foreach_copy_([target for _, _, target in pairs], [rows for _, rows, _ in pairs])

    def read_stack(self, routes: Sequence[Route], stack: torch.Tensor) -> bool:
        """Copy whole local matrices into a stack by one call.

        Args:
            routes: A route for each matrix.
            stack: ``(room, rows, cols)`` in the gather dtype.

        Returns:
            Whether it was done. It is not where the routes are no whole matrices, or lie unevenly
            in memory.
        """
        if not self._plan.wire.normalizes or not _are_whole(routes, stack):
            return False
        rows = as_one([self._rows(route) for route in routes])
        norms = self._norms.of_all(routes)
        if rows is None or norms is None:
            return False
        torch.div(rows, norms, out=stack[: len(routes)])
        return True

    def write(self, results: Sequence[tuple[Route, torch.Tensor]]) -> list[torch.Tensor]:
        """Scale results in fp32, and write them to this rank's rows.

        Args:
            results: Routes, with ``(num_rows, num_cols)`` in the scatter dtype.

        Returns:
            Parameters whose last results these are.
        """
        if not results:
            return []
        pairs = _merged(
            [(route, in_shard(self._results[route.matrix], route), each) for route, each in results]
        )
        # Query, key and value have factors of their own. Upstream multiplies with one factor after
        # the other; their product would round differently.
        first, *others = zip(*(self._scale(route) for route, _, _ in pairs), strict=True)
        for (_, target, result), factor in zip(pairs, first, strict=True):
            # One pass for the copy to fp32 and the first factor.
            torch.mul(result, self._on_device(factor), out=target)
        targets = [target for _, target, _ in pairs]
        for factors in others:
            if any(factor != 1.0 for factor in factors):
                torch._foreach_mul_(targets, list(factors))
        return self._completed([route for route, _ in results])

    def write_stack(
        self, routes: Sequence[Route], result: torch.Tensor
    ) -> list[torch.Tensor] | None:
        """Scale and write the results of whole local matrices by one call.

        Args:
            routes: A route for each matrix.
            result: ``(room, rows, cols)`` in the scatter dtype.

        Returns:
            As :meth:`write`; None where nothing was done, as in :meth:`read_stack`.
        """
        if not _are_whole(routes, result):
            return None
        target = as_one([in_shard(self._results[route.matrix], route) for route in routes])
        if target is None:
            return None
        # Matrices of a stack have one shape, and with it the same factors.
        first, *others = self._scale(routes[0])
        torch.mul(result[: len(routes)], self._on_device(first), out=target)
        for factor in others:
            if factor != 1.0:
                target.mul_(factor)
        return self._completed(routes)

    def _rows(self, route: Route) -> torch.Tensor:
        return in_shard(self._momentum[route.matrix], route)

    def _scale(self, route: Route) -> Sequence[float]:
        return self._newton_schulz.scale(*self._plan.matrices[route.matrix].blocks[route.block])

    def _on_device(self, factor: float) -> torch.Tensor:
        """Return a factor as a float32 matrix of one element.

        A number, or a tensor without dimensions, would be multiplied in the dtype of the result,
        which is bf16.
        """
        if factor not in self._factors:
            self._factors[factor] = torch.full((1, 1), factor, device=self._device)
        return self._factors[factor]

    def _completed(self, routes: Sequence[Route]) -> list[torch.Tensor]:
        parameters = []
        for route in routes:
            self._missing[route.matrix] -= 1
            if self._missing[route.matrix] == 0:
                parameters.append(self._parameters[route.matrix])
        return parameters


def _merged(
    pairs: Sequence[tuple[Route, torch.Tensor, torch.Tensor]],
) -> list[tuple[Route, torch.Tensor, torch.Tensor]]:
    """Join routes of one block that lie evenly both where they come from and where they go.

    Fused query, key and value take turns in a shard, a query group after the other: without this,
    each group would take three calls.

    Args:
        pairs: Routes, with this rank's rows, and the memory that they go to or come from.

    Returns:
        The same, with ``(num_routes, num_rows, num_cols)`` where routes were joined.
    """
    blocks: dict[tuple[int, int], list[tuple[Route, torch.Tensor, torch.Tensor]]] = {}
    for pair in pairs:
        blocks.setdefault((pair[0].matrix, pair[0].block), []).append(pair)
    merged = []
    for block in blocks.values():
        # The first and the last are often cut by the border of the shard.
        for _, same in itertools.groupby(block, key=lambda pair: pair[1].shape):
            run = list(same)
            rows = as_one([rows for _, rows, _ in run]) if len(run) > 1 else None
            other = as_one([other for _, _, other in run]) if rows is not None else None
            if rows is None or other is None:
                merged += run
            else:
                merged.append((run[0][0], rows, other))
    return merged


def _are_whole(routes: Sequence[Route], stack: torch.Tensor) -> bool:
    """Return whether each route is a whole matrix of the stack."""
    shape = tuple(stack.shape[1:])
    return all((route.num_rows, route.num_cols) == shape for route in routes)
