# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz on stacks: upstream's function, one matrix at a time, is the reference."""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from emerging_optimizers.utils import fp32_matmul_precision
from helpers import whole_matrices
from helpers.device import device
from helpers.stacks import orthogonalized, settings
from helpers.whole_matrices import normalized_bf16

from megatron_muon.newton_schulz import BACKENDS, standard
from megatron_muon.newton_schulz.backend import NewtonSchulzArgs
from megatron_muon.newton_schulz.standard import least_norm
from megatron_muon.plan.routes import Part, stack_elements
from megatron_muon.runtime.stack_task import StackTask

SHAPES = [(48, 24), (24, 48), (32, 32), (1, 16), (16, 1), (130, 67)]
TYPES = sorted(set(muon_utils._COEFFICIENT_SETS))


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
    numbers = {"steps": steps, "coefficient_type": coefficient_type}
    of = settings(**numbers)
    for matrix in stack:
        expected = whole_matrices.orthogonalized(matrix, "medium", has_float64_norm=True, **numbers)
        found = orthogonalized(normalized_bf16(matrix)[None], of=of)[0].float()
        # One row and 7 steps of cans overflow, in upstream's function as here.
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [*SHAPES, (32, 8), (4, 16)])
def test_result_is_independent_of_the_other_matrices_in_a_stack(shape):
    """A result depends neither on other matrices of an owner nor on the contents of padding."""
    stack = torch.stack([normalized_bf16(x) for x in torch.randn(4, *shape, device=device())])
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
    """The least norm comes from the installed emerging-optimizers."""
    for eps in (1e-7, 1e-15):
        least_norm.cache_clear()
        monkeypatch.setattr(muon_utils, "newton_schulz", lambda x, eps=eps: x)
        assert least_norm() == eps
    least_norm.cache_clear()


def test_workspace_of_a_part_has_the_gram_matrix_of_the_whole():
    """The workspace of a part counts Gram matrices as large as the whole's."""
    part = torch.empty(1, 4096, 1792, dtype=torch.bfloat16, device="meta")
    expected = 2 * (3 * 4096 * 1792 + 3 * 4096**2)
    assert standard.Standard().workspace_bytes(part, (4096, 14336)) == expected


# Stacks on CPU ranks have the bits of upstream's steps on one matrix at a time.


def _run(stack: torch.Tensor, backend: str = "standard") -> torch.Tensor:
    found = stack.clone()
    whole = stack.shape[1], stack.shape[2]
    StackTask(found, BACKENDS[backend], NewtonSchulzArgs(settings(), whole, True)).run()
    return found


def _one_by_one(stack: torch.Tensor) -> torch.Tensor:
    results = []
    for matrix in stack:
        x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
        for coefficients in settings().coefficients:
            x = muon_utils.newton_schulz_step(x, *coefficients)
        results.append(x.mT if matrix.shape[0] > matrix.shape[1] else x)
    return torch.stack(results)


def _drawn(shape: tuple[int, ...]) -> torch.Tensor:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return torch.stack([normalized_bf16(matrix) for matrix in matrices])


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "shape",
    [(32, 8, 8), (7, 4, 4), (31, 16, 16), (9, 7, 9), (5, 9, 33), (8, 32, 16), (32, 48, 32),
     (3, 15, 256), (5, 64, 130)],
)  # fmt: skip
def test_stack_has_the_bits_of_single_matrices(shape):
    """A stack has the bits of single matrices on any CPU."""
    stack = _drawn(shape)
    assert torch.equal(_run(stack), _one_by_one(stack))


@pytest.mark.cpu_only
def test_other_backends_are_not_batched_on_a_cpu():
    """Results of other backends on a CPU do not depend on other matrices of a rank."""
    stack = _drawn((4, 24, 40))
    assert torch.equal(_run(stack, "gram")[:2], _run(stack[:2], "gram"))


@pytest.mark.cpu_only
def test_stacks_of_odd_shapes_begin_at_16_bytes():
    """Stacks begin at 16 bytes, as a GPU chooses kernels by alignment."""
    shapes = ((3, 5), (7, 1), (16, 8), (9, 11))
    stacks = [tuple(Part(i, number, (0,), 0, 0, rows, 0, cols) for i in range(2))
              for number, (rows, cols) in enumerate(shapes)]  # fmt: skip
    assert [stack_elements(stack) for stack in stacks] == [128, 128, 256, 256]
