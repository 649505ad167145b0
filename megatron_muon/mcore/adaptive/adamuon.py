# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""AdaMuon: a second moment for each element of the orthogonalized momentum."""

from collections.abc import Sequence
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor

from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon
from megatron_muon.runtime.dtensor_layout import local_tensor


class FSDPAdaMuon(FSDPZeROTensorParallelMuon):
    """Step as ``TensorParallelAdaptiveMuon`` of Megatron-LM main with ``adamuon``, on row shards.

    The second moment is elementwise, so each rank has that of its rows. As upstream, an update is
    scaled by the tensor-parallel-local shape of its parameter. Upstream also multiplies by the
    scale before the second moment, which then divides by it: only ``eps`` sees it.

    Method: AdaMuon (https://arxiv.org/abs/2507.11005).

    Args:
        params: See :class:`FSDPZeROTensorParallelMuon`.
        beta2: Decay rate of the second moment.
        eps: Added to its root.
        **muon_kwargs: See :class:`FSDPZeROTensorParallelMuon`.

    Memory: a second moment of the size of the momentum; while results are applied, two copies of
        those of a bucket.
    """

    def __init__(
        self, params: Any, *, beta2: float = 0.95, eps: float = 1e-8, **muon_kwargs: Any
    ) -> None:
        self._scale_mode = muon_kwargs.get("scale_mode", "spectral")
        self._extra_scale_factor = muon_kwargs.get("extra_scale_factor", 1.0)
        super().__init__(params, **muon_kwargs)
        for group in self.param_groups:
            group.setdefault("beta2", beta2)
            group.setdefault("eps", eps)

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        super()._init_group(group, skip_non_grad_params)
        for param in group["params"]:
            if "moment2_buffer" not in self.state[param]:
                self.state[param]["moment2_buffer"] = torch.zeros_like(param.data)

    def _apply(self, params: Sequence[Any]) -> None:
        """Divide results by the root of their second moment, scale them, and subtract them."""
        for group, held in self._by_group(params):
            results = [local_tensor(param.grad) for param in held]
            moments = [local_tensor(self.state[param]["moment2_buffer"]) for param in held]
            squares = torch._foreach_mul(results, results)
            torch._foreach_lerp_(moments, squares, 1 - group["beta2"])
            del squares
            roots = torch._foreach_sqrt(moments)
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_div_(results, roots)
            layouts = [self._matrices[param].layout for param in held]
            factors = [
                get_muon_scale_factor(layout.num_rows, layout.num_cols, mode=self._scale_mode)
                for layout in layouts
            ]
            # One after the other, as upstream does: their product has other bits.
            torch._foreach_mul_(results, factors)
            torch._foreach_mul_(results, self._extra_scale_factor)
        super()._apply(params)
