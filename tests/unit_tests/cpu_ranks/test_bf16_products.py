# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Products of bf16 matrices in fp32, forced on: no verdict depends on this CPU."""

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from helpers.stacks import orthogonalized

from megatron_muon.cpu_ranks import bf16_products

ROOT = Path(__file__).resolve().parents[3]
SHAPES = [(64, 64, 64), (128, 384, 128), (96, 8, 40), (8, 40, 96), (1, 33, 7), (33, 7, 1)]


@contextlib.contextmanager
def products_in_fp32() -> Iterator[None]:
    """Replace the kernels, whatever the CPU."""
    library = bf16_products.install()
    try:
        yield
    finally:
        library._destroy()


@pytest.fixture
def in_fp32() -> Iterator[None]:
    with products_in_fp32():
        yield


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, **options: bool) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(options.get("requires_grad", False))


@pytest.mark.usefixtures("in_fp32")
@pytest.mark.parametrize("num_matrices", [0, 3])
@pytest.mark.parametrize(("rows", "inner", "cols"), SHAPES)
def test_bf16_products_are_fp32_products_rounded_once(rows, inner, cols, num_matrices):
    """Plain, transposed and strided factors, alone and in stacks, with beta and alpha."""
    torch.manual_seed(rows)
    stack = (num_matrices,) if num_matrices else ()
    fused = torch.baddbmm if num_matrices else torch.addmm
    summand = random(*stack, rows, cols)
    for a, b in (
        (random(*stack, rows, inner), random(*stack, inner, cols)),
        (random(*stack, inner, rows).mT, random(*stack, cols, inner).mT),
        (random(*stack, rows, 2 * inner)[..., ::2], random(*stack, inner, 2 * cols)[..., ::2]),
    ):
        assert torch.equal(a @ b, (a.float() @ b.float()).bfloat16())
        for beta, alpha in ((1, 1), (-4.775, 2.0315), (0, 1.0)):
            scalars = {"beta": beta, "alpha": alpha}
            expected = fused(summand.float(), a.float(), b.float(), **scalars).bfloat16()
            assert torch.equal(fused(summand, a, b, **scalars), expected)


def written(a: torch.Tensor, b: torch.Tensor, summand: torch.Tensor) -> list[torch.Tensor]:
    """Return what the products that write into a given tensor leave there."""
    is_stack = a.ndim == 3
    plain, fused = (torch.bmm, torch.baddbmm) if is_stack else (torch.mm, torch.addmm)
    first, second, third = (torch.zeros_like(summand) for _ in range(3))
    assert plain(a, b, out=first) is first
    assert fused(summand, a, b, alpha=2, out=second) is second
    third.copy_(summand)
    in_place = third.baddbmm_ if is_stack else third.addmm_
    assert in_place(a, b, beta=0.5) is third
    # A tensor of another size is made to fit, as torch does.
    empty = torch.empty(0, dtype=a.dtype)
    plain(a, b, out=empty)
    return [first, second, third, empty]


@pytest.mark.usefixtures("in_fp32")
@pytest.mark.parametrize("stack", [(), (3,)])
def test_products_write_into_the_tensor_they_are_given(stack):
    """``out=`` and in place: the same tensor comes back, with the rounded fp32 result."""
    operands = random(*stack, 9, 40), random(*stack, 40, 5), random(*stack, 9, 5)
    expected = written(*(x.float() for x in operands))
    for found, fp32 in zip(written(*operands), expected, strict=True):
        assert found.dtype is torch.bfloat16
        assert torch.equal(found, fp32.bfloat16())


@pytest.mark.usefixtures("in_fp32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_other_dtypes_go_to_the_kernel_they_went_to(dtype):
    """Forced on or not, the bits of fp32 are those of the original kernel."""
    a, b, c = (random(*shape).to(dtype) for shape in ((7, 33), (33, 5), (7, 5)))
    forced = [a @ b, torch.addmm(c, a, b, beta=2), *written(a, b, c)]
    assert all(x.dtype is dtype for x in forced)
    assert torch.allclose(forced[0].double(), a.double() @ b.double())
    with pytest.raises(RuntimeError, match="same dtype|expected"):
        torch.mm(a, b.bfloat16())


@pytest.mark.usefixtures("in_fp32")
@pytest.mark.parametrize("has_bias", [False, True])
def test_backward_of_a_linear_layer_is_in_fp32_too(has_bias):
    """The gradients come from C++, where no mode for Python functions sees a product."""
    x, weight = random(2, 9, 32, requires_grad=True), random(24, 32, requires_grad=True)
    bias = random(24, requires_grad=True) if has_bias else None
    upstream = random(2, 9, 24)
    found = torch.nn.functional.linear(x, weight, bias)
    found.backward(upstream)
    flat, grad = x.detach().float().view(-1, 32), upstream.float().view(-1, 24)
    assert torch.equal(weight.grad, (grad.T @ flat).bfloat16())
    assert torch.equal(x.grad, (grad @ weight.detach().float()).bfloat16().view(x.shape))


def calls_of_products(function):
    """Return how often ``function`` computes a bf16 product by a kernel that was replaced."""
    calls = []
    original = bf16_products._in_fp32

    def counting(*args):
        kernel = original(*args)

        def counted(keys, *tensors, **options):
            if tensors[-1].dtype is torch.bfloat16:
                calls.append(tensors[-1].shape)
            return kernel(keys, *tensors, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bf16_products, "_in_fp32", counting)
        with products_in_fp32():
            function()
    return len(calls)


def attention(num_heads: int = 2) -> None:
    """Scores and context as Megatron's local attention computes them, forward and backward."""
    query, key, value = (random(num_heads, 6, 8, requires_grad=True) for _ in range(3))
    scores = torch.empty(num_heads, 6, 6, dtype=torch.bfloat16)
    scores = torch.baddbmm(scores, query, key.mT, beta=0.0, alpha=0.5)
    torch.bmm(scores.softmax(-1), value).sum().backward()


@pytest.mark.parametrize(
    ("function", "num_products"),
    [
        (lambda: muon_utils.newton_schulz_step(random(8, 12), 3.4, -4.8, 2.0), 3),
        (lambda: muon_utils.batched_newton_schulz_step(random(2, 8, 12), 3.4, -4.8, 2.0), 3),
        (lambda: torch.einsum("bij,bjk->bik", random(2, 3, 4), random(2, 4, 5)), 1),
        (lambda: torch.matmul(random(2, 3, 4), random(4, 5)), 1),
        (lambda: torch.nn.functional.linear(random(2, 3, 4), random(5, 4), random(5)), 1),
        (attention, 6),
    ],
    ids=["newton_schulz", "batched_newton_schulz", "einsum", "matmul", "linear", "attention"],
)
def test_every_product_that_runs_is_among_the_replaced(function, num_products):
    """Newton-Schulz took ten times as long as all of Adam where a product went by."""
    assert calls_of_products(function) == num_products


@pytest.mark.usefixtures("in_fp32")
def test_newton_schulz_of_stacks_is_upstreams_of_each_matrix():
    """One process sees one product: ours and upstream's take the same, whatever the CPU."""
    stack = torch.nn.functional.normalize(torch.randn(3, 24, 40), dim=(1, 2)).bfloat16()
    together = orthogonalized(stack)
    for matrix, result in zip(stack, together, strict=True):
        x = matrix
        for a, b, c in muon_utils._COEFFICIENT_SETS["quintic"]:
            x = muon_utils.newton_schulz_step(x, a, b, c)
        # Sums of 24 or 40 products in another order: bf16's last bits.
        assert torch.allclose(result.float(), x.float(), rtol=2**-6, atol=2**-8)
        (alone,) = orthogonalized(matrix.unsqueeze(0))
        assert torch.equal(alone, x)


def test_kernels_come_back_when_they_are_removed():
    """Removed, a bf16 product is bit by bit the one from before."""
    a = random(64, 96)
    before = a @ a.T
    with products_in_fp32():
        inside = a @ a.T
    assert torch.equal(a @ a.T, before)
    assert torch.equal(inside, (a.float() @ a.float().T).bfloat16())
    assert calls_of_products(lambda: None) == 0


def test_kernels_are_replaced_where_the_cpu_needs_it_and_restored():
    """``enable`` asks for the CPU's instructions; ``disable`` restores the kernels."""
    code = """
        import torch
        from megatron_muon import cpu_ranks
        from megatron_muon.cpu_ranks import bf16_products, table

        table.MEGATRON_REPLACEMENTS = ()
        calls, in_fp32 = [], bf16_products._in_fp32
        bf16_products._in_fp32 = lambda *args: lambda *call, **kw: (
            calls.append(call) or in_fp32(*args)(*call, **kw)
        )
        for has_instructions in (True, False):
            bf16_products.has_bf16_instructions = lambda: has_instructions
            cpu_ranks.enable(force=True)
            a = torch.randn(8, 8, device="cuda").bfloat16()
            assert (a @ a).dtype is torch.bfloat16
            assert bool(calls) is not has_instructions
            cpu_ranks.disable()
            calls.clear()
            a @ a
            assert not calls
        print("reverted")
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "reverted"


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or os.uname().machine != "x86_64", reason="x86-64 only"
)
def test_cpu_held_to_avx2_counts_as_one_without_bf16_instructions():
    """What withholds the instructions from oneDNN is seen, so such a CPU can be tried on any."""
    code = (
        "from megatron_muon.cpu_ranks import bf16_products as p; print(p.has_bf16_instructions())"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "False", done.stderr


def test_torch_without_onednn_counts_as_without_bf16_instructions(monkeypatch):
    """There is no operator to ask then, and its bf16 products are slow on any CPU."""
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert not bf16_products.has_bf16_instructions()
