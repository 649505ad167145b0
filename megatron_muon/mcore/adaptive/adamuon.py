# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""AdaMuon: a second moment per element of the orthogonalized momentum."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_muon.mcore.adaptive.second_moment import FSDPAdaptiveMuon
from megatron_muon.runtime.adamuon import AdaMuon
from megatron_muon.runtime.dtensor_layout import local_tensor
from megatron_muon.runtime.matrix_step import StepHooks


class FSDPAdaMuon(FSDPAdaptiveMuon):
    """Step as ``TensorParallelAdaptiveMuon`` of Megatron-LM main with ``adamuon``, on row shards.

    The second moment is elementwise, so a rank has that of its rows. As in upstream, an update is
    scaled by the tensor-parallel-local shape of its parameter. Upstream also multiplies by the
    scale before the second moment, which then divides by it: this would only rescale ``eps``.

    Method: AdaMuon (https://arxiv.org/abs/2507.11005).

    Memory: a second moment of the size of the momentum; in a step that of
        :class:`~megatron_muon.runtime.adamuon.AdaMuon`.
    """

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        super()._init_group(group, skip_non_grad_params)
        for param in group["params"]:
            if "moment2_buffer" not in self.state[param]:
                self.state[param]["moment2_buffer"] = torch.zeros_like(param.data)

    def hooks(
        self, optimizers: Sequence[Any], params: Sequence[tuple[Any, Any]]
    ) -> list[StepHooks]:
        """Divide results by the root of their second moment, and scale them."""
        return [
            AdaMuon(
                lambda i: local_tensor(params[i][0].state[params[i][1]]["moment2_buffer"]),
                [muon.scale(*muon.parts[param].view.shape) for muon, param in params],
                [local_tensor(param).numel() for _, param in params],
            )
        ]
