# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step: norms that the device sums, and the host reads on request."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megatron_muon.rows.parameters import PlannedParameter
from megatron_muon.runtime.agreement import gather_objects
from megatron_muon.runtime.tensors import local_tensor
from megatron_muon.step.elementwise import TensorList
from megatron_muon.step.hooks import StepHooks


class StepMetrics(NamedTuple):
    """Metrics of a step over the matrices of all ranks, by parameter group.

    Args:
        gradient_norms: Norms of gradients, before weight decay.
        momentum_norms: Norms of the momentum buffers after the step.
        update_rms: Root mean squares of the elements of updates, before weight decay and learning
            rate.
    """

    gradient_norms: tuple[float, ...]
    momentum_norms: tuple[float, ...]
    update_rms: tuple[float, ...]


class MetricSums(StepHooks):
    """Norms of this rank's tensors in the last step.

    Args:
        parameters: By position; rows that several ranks hold count once.
        group_index: Index of the parameter group by position.
    """

    def __init__(self, parameters: Sequence[PlannedParameter], group_index: Sequence[int]) -> None:
        self._weights = [1.0 / _num_replicas(parameter.view) for parameter in parameters]
        self._sizes = [local_tensor(parameter.param).numel() for parameter in parameters]
        self._group_index = group_index
        # Name of a sum, positions, and norms of their tensors.
        self._norms: list[tuple[str, Sequence[int], torch.Tensor]] = []

    def on_gradients(self, weights: TensorList, grads: Sequence[torch.Tensor | None]) -> None:
        """Begin a step."""
        self._norms.clear()
        held = {i: grad for i, grad in enumerate(grads) if grad is not None}
        self._add("gradients", list(held), list(held.values()))

    def on_momentum(self, weights: TensorList, momentum: TensorList) -> None:
        """Add the norms of momentum."""
        self._add("momentum", range(len(momentum)), momentum)

    def on_results(
        self,
        group: Mapping[str, Any],
        positions: Sequence[int],
        weights: TensorList,
        results: TensorList,
    ) -> None:
        """Add the norms of updates."""
        self._add("updates", positions, results)

    def _add(self, name: str, positions: Sequence[int], tensors: TensorList) -> None:
        if tensors:
            norms = torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))
            self._norms.append((name, positions, norms))

    def metrics(self, group: dist.ProcessGroup | None, num_groups: int) -> StepMetrics:
        """Return the metrics of all ranks; see ``MuonStep.last_metrics()``.

        Args:
            group: Ranks that step together; None for all of the job.
            num_groups: Number of parameter groups of this rank.
        """
        sums: defaultdict[tuple[str, int], float] = defaultdict(float)
        for name, positions, norms in self._norms:
            for i, norm in zip(positions, norms.tolist(), strict=True):
                index = self._group_index[i]
                sums[name, index] += self._weights[i] * norm**2
                if name == "updates":
                    sums["elements", index] += self._weights[i] * self._sizes[i]
        # Ranks may have other groups, as pipeline stages do.
        gathered = gather_objects((num_groups, sums), group)
        by_group = range(max(num for num, _ in gathered))
        total: defaultdict[tuple[str, int], float] = defaultdict(float)
        for _, rank_sums in gathered:
            for key, value in rank_sums.items():
                total[key] += value
        return StepMetrics(
            tuple(math.sqrt(total["gradients", i]) for i in by_group),
            tuple(math.sqrt(total["momentum", i]) for i in by_group),
            tuple(math.sqrt(total["updates", i] / (total["elements", i] or 1)) for i in by_group),
        )


def _num_replicas(view: torch.Tensor) -> int:
    if not isinstance(view, DTensor):
        return 1
    sizes = zip(view.placements, view.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())
