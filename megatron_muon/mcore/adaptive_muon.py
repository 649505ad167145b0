# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""``--optimizer adaptive_muon``: Muon whose results are divided by a second moment."""

import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import log_single_rank
from torch.distributed.tensor import DTensor, Replicate

from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon
from megatron_muon.runtime.adamuon import AdaMuon
from megatron_muon.runtime.adaptive import GradientNorms, method_of, method_problems
from megatron_muon.runtime.agreement import own_rank
from megatron_muon.runtime.dtensor_layout import local_tensor
from megatron_muon.runtime.matrix_step import StepHooks
from megatron_muon.runtime.moments import Moments
from megatron_muon.runtime.owner_compute import OwnerCompute

logger = logging.getLogger(__name__)


class FSDPAdaptiveMuon(FSDPZeROTensorParallelMuon):
    """Step as emerging-optimizers' ``AdaptiveMuon`` does with every block as a parameter.

    adamuon is ``TensorParallelAdaptiveMuon`` of Megatron-LM main: an update is scaled by the
    tensor-parallel-local shape of its parameter, also before it is divided.

    State, beside the momentum: adamuon has ``moment2_buffer``, like the parameter. namo has
    ``moment2_buffer``, ``(blocks,)``. normuon has ``moment2_rows``, a column sharded as the
    parameter's rows, if the parameter has tall or square blocks, and ``moment2_cols``, ``(wide
    blocks, cols)``, if it has wide ones. What is not sharded is the same on every rank.

    Args:
        params: See :class:`FSDPZeROTensorParallelMuon`.
        moment2_method: ``adamuon``, ``normuon`` or ``namo``.
        beta2: Decay rate of the second moment.
        eps: Keeps the divisor from zero.
        **muon_kwargs: See :class:`FSDPZeROTensorParallelMuon`.

    Raises:
        ValueError: Unknown method, or weight decay in gradients whose norms namo averages.
    """

    def __init__(
        self,
        params: Any,
        *,
        moment2_method: str = "adamuon",
        beta2: float = 0.95,
        eps: float = 1e-8,
        **muon_kwargs: Any,
    ) -> None:
        self.moment2_method = moment2_method
        self.method = method_of(moment2_method, beta2, eps)
        self._places: dict[Any, tuple[Moments, int]] = {}
        super().__init__(params, **muon_kwargs)
        problems = method_problems(moment2_method, self.weight_decay_method)
        if problems:
            raise ValueError(f"{problems[0]} (--adaptive-muon-moment2-method).")
        for group in self.param_groups:
            group.setdefault("beta2", beta2)
            group.setdefault("eps", eps)
        if self.method is not None:
            _warn_of_scale(moment2_method)

    def bind(self, compute: OwnerCompute) -> None:
        """Find the moments of blocks, of which adamuon has none."""
        self._compute, params = compute, set(self.params)
        self._places = {
            param: (moments, matrix)
            for given, moments in zip(compute.inputs, compute.moments, strict=False)
            for matrix, param in enumerate(given.params)
            if param in params
        }

    def hooks(self, held: Sequence[tuple[Any, Any]]) -> list[StepHooks]:
        """Divide results by second moments of elements, or show gradients to namo."""
        if self.moment2_method == "namo":
            return [GradientNorms([param for _, param in held], self._compute)]
        if self.moment2_method == "normuon":
            return []
        group, states = self.param_groups[0], [muon.state[param] for muon, param in held]
        return [
            AdaMuon(
                [param for _, param in held],
                lambda position: local_tensor(states[position]["moment2_buffer"]),
                [muon.scale(*muon.parts[param].view.shape) for muon, param in held],
                group["beta2"],
                group["eps"],
            )
        ]

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        super()._init_group(group, skip_non_grad_params)
        for param in group["params"]:
            state = self.state[param]
            if len(state) > 1:
                continue
            if self.moment2_method == "adamuon":
                state["moment2_buffer"] = torch.zeros_like(param.data)
                continue
            moments, index = self._places[param]
            numbers = moments.values[slice(*moments.range_of(index))]
            if self.moment2_method == "namo":
                state[self._key("moment2_buffer", param)] = numbers
                continue
            # Of q, k and v some may be wide and others tall: a parameter can have both states.
            # Ranks with empty shards have them too, as a save needs equal keys on all ranks.
            blocks = moments.matrices[index].blocks
            num_rows = sum(rows for rows, cols in blocks if rows >= cols)
            if num_rows:
                state["moment2_rows"] = _rows_like(param, is_joined=self.is_joined(param))
            if num_rows < len(numbers):
                wide = numbers[num_rows:].view(-1, blocks[0][1])
                state[self._key("moment2_cols", param)] = wide

    def _key(self, name: str, param: Any) -> str:
        """Return the name of a state that is the same on all ranks that hold a block.

        Tensor-parallel ranks that orthogonalize their own blocks use different names, as a
        checkpoint keeps one tensor per name.
        """
        if self.is_joined(param) or not self._is_tensor_sharded(param):
            return name
        group = self._tensor_group(param)
        return f"{name}_tensor_rank_{dist.get_rank(group)}_of_{dist.get_world_size(group)}"

    def shared_state(self) -> Iterator[tuple[Moments, slice, torch.Tensor]]:
        """Yield the second moments that ranks share: those of their plan, a range, and the state.

        That of rows is a part of this rank's ``moment2_rows``.
        """
        if self.moment2_method == "namo":
            return
        for param, (moments, index) in self._places.items():
            _, stop = moments.range_of(index)
            matrix, state = moments.matrices[index], self.state[param]
            for region in matrix.regions if "moment2_rows" in state else ():
                rows, cols = matrix.blocks[region.block]
                if rows >= cols and own_rank() in region.holders:
                    start = moments.first(index, region.block) + region.row
                    own = local_tensor(state["moment2_rows"])
                    own = own[region.local_row : region.local_row + region.num_rows, 0]
                    yield moments, slice(start, start + region.num_rows), own
            start = stop - sum(cols for rows, cols in matrix.blocks if rows < cols)
            yield moments, slice(start, stop), moments.values[start:stop]


# Once, though experts and dense matrices have two optimizers.
@functools.cache
def _warn_of_scale(method: str) -> None:
    log_single_rank(
        logger,
        logging.WARNING,
        "%s: results are scaled once, as in emerging-optimizers 0.3.0; Megatron-LM main of "
        "2026-08-22 scales them twice",
        method,
    )


def _rows_like(param: Any, *, is_joined: bool) -> DTensor:
    """Return zeros of one column, sharded as the rows of a parameter.

    Args:
        param: DTensor parameter.
        is_joined: Whether tensor-parallel ranks that shard columns hold one block together. They
            then replicate the column; otherwise each has its own, as a shard of the columns.
    """
    placements = [
        Replicate() if is_joined and placement.is_shard(1) else placement
        for placement in param.placements
    ]
    num_cols = 1
    for axis, placement in enumerate(placements):
        if placement.is_shard(1):
            num_cols *= param.device_mesh.size(axis)
    # Without a check, a collective per parameter: the model's own DTensor has been checked.
    return DTensor.from_local(
        local_tensor(param).new_zeros(local_tensor(param).shape[0], 1),
        param.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size((param.shape[0], num_cols)),
        stride=(num_cols, 1),
    )
