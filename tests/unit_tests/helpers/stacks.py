# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on a stack, with settings by name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_muon.newton_schulz.registry import BACKENDS
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings


def settings(
    steps: int = 5, coefficient_type: str = "quintic", *, is_bf16: bool = True
) -> NewtonSchulzSettings:
    """Return settings without a scale."""
    return NewtonSchulzSettings(steps, coefficient_type, is_bf16, lambda rows, cols: (1.0,))


def orthogonalized(
    stack: torch.Tensor,
    backend: str = "standard",
    *,
    of: NewtonSchulzSettings | None = None,
    is_normalized: bool = True,
    **options: Any,
) -> torch.Tensor:
    """Orthogonalize a stack of whole matrices."""
    return BACKENDS[backend].run(
        stack,
        settings=of or settings(),
        is_normalized=is_normalized,
        **{"whole_shape": tuple(stack.shape[1:]), **options},
    )


@contextmanager
def fp16_products() -> Iterator[None]:
    """Round the results of batched products to fp16, sums in fp32: the Gram form as on a GPU.

    So is what is added in place: the diagonal of Q.
    """

    def rounded(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: function(*args, **kwargs).half().float()

    add_ = torch.Tensor.add_
    with (
        mock.patch.object(torch, "baddbmm", rounded(torch.baddbmm)),
        mock.patch.object(torch.Tensor, "__matmul__", rounded(torch.Tensor.__matmul__)),
        mock.patch.object(torch.Tensor, "add_", lambda x, y: x.copy_(add_(x, y).half())),
    ):
        yield
