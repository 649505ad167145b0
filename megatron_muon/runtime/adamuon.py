# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""AdaMuon: results are divided by the root of a second moment for each element."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_muon.runtime.dtensor_layout import local_tensor
from megatron_muon.runtime.matrix_step import CHUNK_ELEMENTS, StepHooks, chunks_of


class AdaMuon(StepHooks):
    """Divide results, and multiply them by factors.

    Method: AdaMuon (https://arxiv.org/abs/2507.11005).

    Args:
        params: By position, the parameters of which this rank holds rows.
        moments: Returns the second moment of a position, float32 like its weight.
        factors: By position, factors of a result, multiplied one after the other.
        beta2: Decay rate of the second moment.
        eps: Keeps the divisor from zero.

    Memory: 64 MB or the largest parameter in float32, while results are divided.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        moments: Callable[[int], torch.Tensor],
        factors: Sequence[tuple[float, float]],
        beta2: float,
        eps: float,
    ) -> None:
        self._moments, self._factors = moments, list(factors)
        self._beta2, self._eps = beta2, eps
        sizes = [local_tensor(param).numel() for param in params]
        self.num_bytes = 4 * max(min(CHUNK_ELEMENTS, sum(sizes)), *sizes, 0)

    def arrived(
        self, group: Mapping[str, Any], positions: Sequence[int], results: Sequence[torch.Tensor]
    ) -> None:
        """Divide results by the root of their second moment, and scale them."""
        sizes = enumerate(map(torch.numel, results))
        for chunk in chunks_of(sizes, CHUNK_ELEMENTS):
            own = [results[n] for n in chunk]
            moments = [self._moments(positions[n]) for n in chunk]
            roots = list(torch._foreach_mul(own, own))
            torch._foreach_lerp_(moments, roots, 1 - self._beta2)
            torch._foreach_copy_(roots, moments)
            torch._foreach_sqrt_(roots)
            torch._foreach_add_(roots, self._eps)
            torch._foreach_div_(own, roots)
            for factors in zip(*(self._factors[positions[n]] for n in chunk), strict=True):
                torch._foreach_mul_(own, list(factors))
