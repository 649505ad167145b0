# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step: norms that the device sums, and the host reads on request."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_muon.rows.parameters import PlannedParameter
from megatron_muon.runtime.agreement import gather_objects
from megatron_muon.runtime.local_rows import StackTask
from megatron_muon.runtime.tensors import local_tensor
from megatron_muon.step.matrix_step import StepHooks


class StepMetrics(NamedTuple):
    """Metrics of a step over the matrices of all ranks.

    Args:
        gradient_norms: By parameter group, before weight decay.
        momentum_norms: By parameter group, of the momentum buffers after the step.
        update_rms: By parameter group, root mean square of the elements of updates, before the
            learning rate.
        orthogonality_error: Maximum over ranks of ``|X X^T - I| / sqrt(n)`` for the first matrix
            that a rank orthogonalizes alone, n its shorter side; 0 if there is none. With the
            quintic coefficients it is about 0.2, as they do not converge to singular values of 1.
    """

    gradient_norms: tuple[float, ...]
    momentum_norms: tuple[float, ...]
    update_rms: tuple[float, ...]
    orthogonality_error: float


class MetricSums(StepHooks):
    """Sums of squares of this rank, by parameter group.

    Args:
        parameters: By position; rows that several ranks hold count once.
        group_index: Index of the parameter group by position.
    """

    def __init__(self, parameters: Sequence[PlannedParameter], group_index: Sequence[int]) -> None:
        self._share = [1.0 / _num_replicas(each.view) for each in parameters]
        # The sample in float32, its Gram matrix, and the square of that.
        sizes = (math.prod(each.view.shape[-2:]) for each in parameters)
        self.num_bytes = 12 * max(sizes, default=0)
        self._group_index = list(group_index)
        self._sizes = [local_tensor(each.param).numel() for each in parameters]
        # By kind, positions and the norms of their tensors, which the host reads when asked.
        self._norms: dict[str, list[tuple[Sequence[int], torch.Tensor]]] = {}
        self._errors: list[torch.Tensor] = []

    def begin(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Begin a step."""
        self._norms = {"gradient": [], "momentum": [], "update": []}
        self._errors.clear()
        held = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        self._add("gradient", [i for i, _ in held], [grad for _, grad in held])

    def watch(self, stack: StackTask) -> None:
        """Take the first matrix that this rank orthogonalizes alone as the sample."""
        if not self._errors and len(stack.owners) == 1:
            self._errors.append(_orthogonality_error(stack.tensor[0]))

    def advanced(self, momentum: Sequence[torch.Tensor]) -> None:
        """Add the squares of momentum."""
        self._add("momentum", range(len(momentum)), momentum)

    def arrived(self, positions: Sequence[int], results: Sequence[torch.Tensor]) -> None:
        """Add the squares of updates."""
        self._add("update", positions, results)

    def _add(self, kind: str, positions: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        if tensors:
            norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float32)
            self._norms[kind].append((positions, torch.stack(norms)))

    def metrics(self, group: dist.ProcessGroup | None, num_groups: int) -> StepMetrics:
        """Return the metrics of all ranks; see :meth:`MuonStep.last_metrics`.

        Args:
            group: Ranks that step together; None for all of the job.
            num_groups: Number of parameter groups of this rank.
        """
        # Squares by group and kind, and elements of updates.
        sums: defaultdict[tuple[int, str], float] = defaultdict(float)
        for kind, found in self._norms.items():
            for positions, norms in found:
                for i, norm in zip(positions, norms.tolist(), strict=True):
                    sums[self._group_index[i], kind] += self._share[i] * norm**2
                    if kind == "update":
                        sums[self._group_index[i], "elements"] += self._share[i] * self._sizes[i]
        mine = (
            num_groups,
            dict(sums),
            max((float(error) for error in self._errors), default=0.0),
        )
        of_ranks = gather_objects(mine, group)
        # Ranks may have other groups, as pipeline stages do.
        numbers = range(max(each[0] for each in of_ranks))

        def total(kind: str, number: int) -> float:
            """Return a sum over all ranks."""
            return sum(of_rank.get((number, kind), 0.0) for _, of_rank, _ in of_ranks)

        updated = [total("elements", number) for number in numbers]
        return StepMetrics(
            tuple(math.sqrt(total("gradient", number)) for number in numbers),
            tuple(math.sqrt(total("momentum", number)) for number in numbers),
            tuple(
                math.sqrt(total("update", number) / count) if count else 0.0
                for number, count in zip(numbers, updated, strict=True)
            ),
            max(each[2] for each in of_ranks),
        )


def _orthogonality_error(matrix: torch.Tensor) -> torch.Tensor:
    """Return ``|X X^T - I| / sqrt(n)`` of a matrix, n its shorter side, on its device."""
    x = matrix.float()
    x = x if x.shape[0] <= x.shape[1] else x.mT
    gram = x @ x.mT
    gram.diagonal().sub_(1.0)
    return gram.norm() / math.sqrt(len(gram))


def _num_replicas(view: torch.Tensor) -> int:
    if not isinstance(view, DTensor):
        return 1
    sizes = zip(view.placements, view.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())
