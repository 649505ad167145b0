# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""AdaMuon: a second moment per element of the orthogonalized momentum."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_muon.mcore.adaptive.second_moment import FSDPAdaptiveMuon
from megatron_muon.runtime.dtensor_layout import local_tensor


class FSDPAdaMuon(FSDPAdaptiveMuon):
    """Step as ``TensorParallelAdaptiveMuon`` of Megatron-LM main with ``adamuon``, on row shards.

    The second moment is elementwise, so a rank has that of its rows. As in upstream, an update is
    scaled by the tensor-parallel-local shape of its parameter. Upstream also multiplies by the
    scale before the second moment, which then divides by it: this would only rescale ``eps``.

    Method: AdaMuon (https://arxiv.org/abs/2507.11005).

    Memory: a second moment of the size of the momentum; while results are applied, a copy of those
        of a bucket.
    """

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        super()._init_group(group, skip_non_grad_params)
        for param in group["params"]:
            if "moment2_buffer" not in self.state[param]:
                self.state[param]["moment2_buffer"] = torch.zeros_like(param.data)

    def apply(self, params: Sequence[Any]) -> None:
        """Divide results by the root of their second moment, scale and subtract them."""
        for batch in self._batches_of(params):
            group, held = self.param_groups[batch.group], batch.params
            results = [local_tensor(param.grad) for param in held]
            moments = [local_tensor(self.state[param]["moment2_buffer"]) for param in held]
            squares = torch._foreach_mul(results, results)
            torch._foreach_lerp_(moments, squares, 1 - group["beta2"])
            del squares
            roots = torch._foreach_sqrt(moments)
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_div_(results, roots)
            factors, extras = zip(
                *(self.scale(*self.parts[param].view.shape) for param in held), strict=True
            )
            torch._foreach_mul_(results, list(factors))
            torch._foreach_mul_(results, list(extras))
        super().apply(params)
