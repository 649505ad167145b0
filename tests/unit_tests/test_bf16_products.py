# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Products of bf16 matrices in fp32, forced on: no verdict depends on this CPU."""

from collections.abc import Iterator

import pytest
import torch
from cpu_ranks import bf16_products

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def in_fp32() -> Iterator[None]:
    library = bf16_products.install()
    yield
    library._destroy()


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(dtype is BF16)


def products(a: torch.Tensor, b: torch.Tensor, summand: torch.Tensor) -> list[torch.Tensor]:
    """Return new products, and those written into a given tensor."""
    plain, fused = (torch.bmm, torch.baddbmm) if a.ndim == 3 else (torch.mm, torch.addmm)
    # A tensor of another size is made to fit, as torch does.
    written = [torch.empty(0, dtype=a.dtype), torch.zeros_like(summand), summand.clone()]
    assert plain(a, b, out=written[0]) is written[0]
    assert fused(summand, a, b, alpha=2, out=written[1]) is written[1]
    in_place = written[2].baddbmm_ if a.ndim == 3 else written[2].addmm_
    assert in_place(a, b, beta=0.5) is written[2]
    return [a @ b, fused(summand, a, b, beta=-4.775, alpha=2.0315), *written]


@torch.no_grad()
@pytest.mark.parametrize("stack", [(), (0,), (3,)])
def test_bf16_products_are_fp32_products_rounded_once(stack):
    """Products in bf16 are fp32 products rounded once, also in place."""
    operands = random(*stack, 9, 80)[..., ::2], random(*stack, 5, 40).mT, random(*stack, 9, 5)
    expected = products(*(tensor.float() for tensor in operands))
    for result, fp32 in zip(products(*operands), expected, strict=True):
        assert result.dtype is BF16 and fp32.dtype is torch.float32
        assert torch.equal(result, fp32.bfloat16())
    with pytest.raises(RuntimeError, match="same dtype|expected"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2, dtype=BF16))


def test_backward_of_a_linear_layer_is_in_fp32_too():
    """Gradients of a linear layer, computed in C++, are fp32 products rounded once."""
    x, weight, grad = random(9, 32), random(24, 32), random(9, 24).detach()
    torch.nn.functional.linear(x, weight).backward(grad)
    assert torch.equal(weight.grad, (grad.float().T @ x.detach().float()).bfloat16())
    assert torch.equal(x.grad, (grad.float() @ weight.detach().float()).bfloat16())
