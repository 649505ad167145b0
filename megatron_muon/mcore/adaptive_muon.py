# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""``--optimizer adaptive_muon``: Muon whose results are divided by a second moment."""

import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import log_single_rank
from torch.distributed.tensor import DTensor, Replicate

from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon
from megatron_muon.newton_schulz.methods import Namo
from megatron_muon.rows.parameters import PlannedParameter
from megatron_muon.runtime.agreement import own_rank
from megatron_muon.runtime.norms import Moments
from megatron_muon.runtime.tensors import local_tensor
from megatron_muon.step.second_moments import KEY, SecondMoments, method_problems

logger = logging.getLogger(__name__)


class FSDPAdaptiveMuon(FSDPZeROTensorParallelMuon):
    """Step as emerging-optimizers' ``AdaptiveMuon`` does with every block as a parameter.

    adamuon is ``TensorParallelAdaptiveMuon`` of Megatron-LM main: an update is scaled by the
    tensor-parallel-local shape of its parameter, also before it is divided.

    State, beside the momentum: see :class:`TensorParallelMoments`.

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
        self._moments = moment2_method, beta2, eps
        super().__init__(params, **muon_kwargs)
        problems = method_problems(moment2_method, self.weight_decay_method)
        if problems:
            raise ValueError(f"{problems[0]} (--adaptive-muon-moment2-method).")
        for group in self.param_groups:
            group.setdefault("beta2", beta2)
            group.setdefault("eps", eps)
        if moment2_method != "adamuon":
            _warn_of_scale(moment2_method)

    def second_moments(self) -> SecondMoments:
        """Return the second moments of the method."""
        return TensorParallelMoments(self, *self._moments)


class TensorParallelMoments(SecondMoments):
    """Second moments whose state is sharded, and saved, as Megatron's parameters are.

    adamuon has ``moment2_buffer``, like the parameter. namo has ``moment2_buffer``, ``(blocks,)``.
    normuon has ``moment2_rows``, a column sharded as the parameter's rows, if the parameter has
    tall or square blocks, and ``moment2_cols``, ``(wide blocks, cols)``, if it has wide ones. What
    is not sharded is the same on every rank.

    Args:
        muon: One of the optimizers, for groups and layouts that all of them share.
        name: Of the method.
        beta2: Decay rate.
        eps: Keeps the divisor from zero.
    """

    def __init__(self, muon: FSDPAdaptiveMuon, name: str, beta2: float, eps: float) -> None:
        super().__init__(name, beta2, eps, muon.scale)
        self._muon = muon

    def _scaled_shape(self, each: PlannedParameter) -> Sequence[int]:
        return self._muon.tensor_shards[each.param].view.shape

    def _place(self, param: torch.Tensor, of_param: dict[str, Any]) -> None:
        if len(of_param) > 1:
            return
        moments, index = self._places[param]
        numbers = local_tensor(self._views[param])
        if isinstance(self.method, Namo):
            of_param[self._key(KEY, param)] = numbers
            return
        # Of q, k and v some may be wide and others tall: a parameter can have both states. Ranks
        # with empty shards have them too, as a save needs equal keys on all ranks.
        blocks = moments.matrices[index].blocks
        num_rows = sum(rows for rows, cols in blocks if rows >= cols)
        if num_rows:
            is_joined = self._muon.is_joined(param)
            of_param["moment2_rows"] = _rows_like(param, is_joined=is_joined)
        if num_rows < len(numbers):
            wide = numbers[num_rows:].view(-1, blocks[0][1])
            of_param[self._key("moment2_cols", param)] = wide

    def _key(self, name: str, param: Any) -> str:
        """Return the name of a state that is the same on all ranks that hold a block.

        Tensor-parallel ranks that orthogonalize their own blocks use different names, as a
        checkpoint keeps one tensor per name.
        """
        if self._muon.is_joined(param) or not self._muon.is_tensor_sharded(param):
            return name
        group = self._muon.tensor_group(param)
        return f"{name}_tensor_rank_{dist.get_rank(group)}_of_{dist.get_world_size(group)}"

    def publish(self, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Copy the numbers of this rank's rows to their state."""
        for moments, numbers, own in self._shared(state):
            own.copy_(moments.values[numbers])

    def collect(self, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Read the numbers of all rows from the state of their ranks."""
        found: dict[Moments, torch.Tensor] = {}
        for moments, numbers, own in self._shared(state):
            if moments not in found:
                found[moments] = torch.zeros_like(moments.values)
            found[moments][numbers] = own
        for moments, values in found.items():
            # Ranks that hold the same rows have the same moments, which are not negative.
            moments.combine(values, dist.ReduceOp.MAX)

    def _shared(
        self, state: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> Iterator[tuple[Moments, slice, torch.Tensor]]:
        """Yield the numbers that ranks share: of a plan, a range, and their state.

        Rows are a part of this rank's ``moment2_rows``.
        """
        if isinstance(self.method, Namo):
            return
        for param, (moments, index) in self._places.items():
            _, stop = moments.range_of(index)
            matrix = moments.matrices[index]
            for region in matrix.regions if "moment2_rows" in state[param] else ():
                rows, cols = matrix.blocks[region.block]
                if rows >= cols and own_rank() in region.holders:
                    start = moments.first(index, region.block) + region.row
                    own = local_tensor(state[param]["moment2_rows"])
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
