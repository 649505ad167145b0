# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on stacks: upstream's function, one matrix at a time, is the reference."""

from unittest import mock

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from emerging_optimizers.utils import fp32_matmul_precision
from helpers.device import device
from helpers.stacks import orthogonalized, settings

from megatron_muon.newton_schulz import standard
from megatron_muon.newton_schulz.standard import least_norm

SHAPES = [(48, 24), (24, 48), (32, 32), (1, 16), (16, 1), (130, 67)]
TYPES = sorted(set(muon_utils._COEFFICIENT_SETS))


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return x / x.double().square().sum().sqrt().clamp_min(least_norm()).float()


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("coefficient_type", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_normalized_stack_equals_upstream_with_a_float64_norm(shape, coefficient_type):
    """A stack of one gives the bits of upstream's steps, for all sets of coefficients."""
    stack = torch.randn(5, *shape, device=device())
    # More than most sets have; emerging-optimizers 0.4 takes 5 steps alone of cubic5.
    steps = 5 if coefficient_type == "cubic5" else 7
    with (
        fp32_matmul_precision("medium"),
        mock.patch("torch.nn.functional.normalize", lambda x, **_: _normalized(x)),
    ):
        expected = torch.stack(
            [muon_utils.newton_schulz(x, steps, coefficient_type) for x in stack]
        )
    rows = torch.stack([_normalized(x) for x in stack]).bfloat16()
    of = settings(steps, coefficient_type)
    found = torch.cat([orthogonalized(x, of=of) for x in rows.split(1)])
    # One row and 7 steps of cans overflow, in upstream's function as here.
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [*SHAPES, (32, 8), (4, 16)])
def test_result_is_independent_of_the_other_matrices_in_a_stack(shape):
    """Results on any number of ranks are the same, whatever else an owner has or padding holds.

    Between stack sizes the last bits may differ: on a CPU for (32, 8), for one.
    """
    stack = torch.stack(
        [_normalized(x) for x in torch.randn(4, *shape, device=device())]
    ).bfloat16()
    expected = orthogonalized(stack)
    assert torch.equal(orthogonalized(stack.flip(0)), expected.flip(0))
    for leftover in (0.0, torch.nan, 1e30):
        padded = stack.clone()
        padded[2:] = leftover
        assert torch.equal(orthogonalized(padded)[:2], expected[:2])
    one_by_one = [orthogonalized(x) for x in stack.split(1)]
    # A few units of bf16's last of 8 bits, on elements below 1.5.
    torch.testing.assert_close(torch.cat(one_by_one), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("precision", ["medium", "high"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_stack_is_upstreams_function(shape, precision):
    """``comm_dtype`` fp32 adds nothing to emerging-optimizers."""
    stack = torch.randn(3, *shape, device=device())
    with fp32_matmul_precision(precision):
        expected = torch.stack([muon_utils.newton_schulz(x, 5, "quintic") for x in stack])
        of = settings(is_bf16=precision == "medium")
        found = orthogonalized(stack, of=of, is_normalized=False)
    assert torch.equal(found, expected)


def test_least_norm_is_that_of_the_installed_release(monkeypatch):
    """Another one in emerging-optimizers 0.4: matrices of zeros would be divided by another."""
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    for eps in (1e-7, 1e-15):
        least_norm.cache_clear()
        monkeypatch.setattr(muon_utils, "newton_schulz", lambda x, eps=eps: x)
        assert least_norm() == eps
    least_norm.cache_clear()


@pytest.mark.parametrize("shape", [(48, 24), (3, 48, 24), (130, 67)])
def test_steps_of_tall_matrices_are_those_of_transposed_ones(shape):
    """In float64, where rounding hides nothing."""
    x = torch.randn(shape, dtype=torch.float64) / 40
    step = muon_utils.newton_schulz_step if x.ndim == 2 else muon_utils.batched_newton_schulz_step
    expected = step(x.mT, 3.4, -4.8, 2.0).mT
    torch.testing.assert_close(standard._tall_step(x, 3.4, -4.8, 2.0), expected, rtol=0, atol=1e-14)


def test_tall_matrices_are_transposed_where_bits_would_change():
    """The comparison sees a last bit; kernels of CPUs choose by themselves, so both are given."""
    shape, cpu = torch.Size((64, 32)), torch.device("cpu")

    def upstream(x: torch.Tensor, *coefficients: float) -> torch.Tensor:
        """Step as emerging-optimizers does."""
        return muon_utils.newton_schulz_step(x.mT, *coefficients).mT

    def other(x: torch.Tensor, *coefficients: float) -> torch.Tensor:
        """Change one element by a last bit."""
        found = upstream(x, *coefficients).contiguous()
        found.view(torch.int16)[5, 7] ^= 1
        return found

    for step, is_equal in ((upstream, True), (other, False)):
        standard._tall_steps_keep_bits.cache_clear()
        with mock.patch.object(standard, "_tall_step", step):
            assert standard._tall_steps_keep_bits(shape, cpu) == is_equal
    standard._tall_steps_keep_bits.cache_clear()


def test_workspace_of_a_part_has_the_gram_matrix_of_the_whole():
    """Of 4096 x 14336 over eight owners: 1,792 columns are fewer than rows."""
    part = torch.empty(1, 4096, 1792, dtype=torch.bfloat16, device="meta")
    expected = 2 * (3 * 4096 * 1792 + 3 * 4096**2)
    assert standard.Standard().workspace_bytes(part, (4096, 14336)) == expected
