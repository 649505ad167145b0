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
        # Positions and norms of their tensors by kind, which the host reads on request.
        self._norms: dict[str, list[tuple[Sequence[int], torch.Tensor]]] = {}
        self._errors: list[torch.Tensor] = []

    def begin(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Begin a step."""
        self._norms = {"gradient": [], "momentum": [], "update": []}
        self._errors.clear()
        held = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        self._add("gradient", [i for i, _ in held], [grad for _, grad in held])

    def watch(self, task: StackTask) -> None:
        """Take the first matrix that this rank orthogonalizes alone as the sample."""
        if not self._errors and len(task.owners) == 1:
            self._errors.append(_orthogonality_error(task.tensor[0]))

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
        """Return the metrics of all ranks; see ``MuonStep.last_metrics()``.

        Args:
            group: Ranks that step together; None for all of the job.
            num_groups: Number of parameter groups of this rank.
        """
        # Squares, and elements of updates, by group and kind.
        sums: defaultdict[tuple[int, str], float] = defaultdict(float)
        for kind, entries in self._norms.items():
            for positions, norms in entries:
                for i, norm in zip(positions, norms.tolist(), strict=True):
                    sums[self._group_index[i], kind] += self._share[i] * norm**2
                    if kind == "update":
                        sums[self._group_index[i], "elements"] += self._share[i] * self._sizes[i]
        error = max(map(float, self._errors), default=0.0)
        gathered = gather_objects((num_groups, dict(sums), error), group)
        total: defaultdict[tuple[int, str], float] = defaultdict(float)
        for _, rank_sums, _ in gathered:
            for key, value in rank_sums.items():
                total[key] += value
        # Ranks may have other groups, as pipeline stages do.
        numbers = range(max(num for num, _, _ in gathered))
        return StepMetrics(
            tuple(math.sqrt(total[number, "gradient"]) for number in numbers),
            tuple(math.sqrt(total[number, "momentum"]) for number in numbers),
            tuple(
                math.sqrt(total[number, "update"] / (total[number, "elements"] or 1))
                for number in numbers
            ),
            max(error for _, _, error in gathered),
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
