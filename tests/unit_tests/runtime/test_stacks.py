# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Stacks on CPU ranks have the bits of upstream's steps on one matrix at a time."""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from helpers.stacks import settings

from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.newton_schulz.backend import NewtonSchulzArgs
from megatron_muon.plan.routes import Part
from megatron_muon.plan.sizes import num_elements
from megatron_muon.runtime.local_rows import StackBuffers, StackTask

pytestmark = pytest.mark.cpu_only

_ODD_SHAPES = ((3, 5), (7, 1), (16, 8), (9, 11))


def _run(stack: torch.Tensor, backend: str = "standard") -> torch.Tensor:
    """Orthogonalize a stack as a step does."""
    found = stack.clone()
    whole = stack.shape[1], stack.shape[2]
    StackTask(found, BACKENDS[backend], NewtonSchulzArgs(settings(), whole, True), (0,)).run()
    return found


def _one_by_one(stack: torch.Tensor) -> torch.Tensor:
    """Run upstream's steps on every matrix."""
    results = []
    for matrix in stack:
        x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
        for a, b, c in settings().coefficients:
            x = muon_utils.newton_schulz_step(x, a, b, c)
        results.append(x.mT if matrix.shape[0] > matrix.shape[1] else x)
    return torch.stack(results)


def _normalized(shape: tuple[int, ...]) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return (x / x.norm(dim=(1, 2), keepdim=True)).bfloat16()


@pytest.mark.parametrize(
    "shape",
    [(32, 8, 8), (7, 4, 4), (31, 16, 16), (9, 7, 9), (5, 9, 33), (8, 32, 16), (32, 48, 32),
     (3, 15, 256), (5, 64, 130)],
)  # fmt: skip
def test_stack_has_the_bits_of_single_matrices(shape):
    """Whatever the CPU: 32 matrices of 8 x 8 in one product differed on an AMD EPYC."""
    stack = _normalized(shape)
    assert torch.equal(_run(stack), _one_by_one(stack))


def test_other_backends_are_not_batched_on_a_cpu():
    """Results must not depend on what else a rank owns."""
    stack = _normalized((4, 24, 40))
    assert torch.equal(_run(stack, "gram")[:2], _run(stack[:2], "gram"))


def test_stacks_of_odd_shapes_begin_at_16_bytes():
    """A GPU chooses kernels by alignment, and a matrix alone is aligned."""
    stacks = [tuple(Part(i, number, (0,), 0, 0, rows, 0, cols) for i in range(2))
              for number, (rows, cols) in enumerate(_ODD_SHAPES)]  # fmt: skip
    memory = torch.zeros(sum(map(num_elements, stacks)), dtype=torch.bfloat16)
    tensors = [tensor for _, tensor in StackBuffers(stacks, memory).stacks]
    assert [tensor.shape[1:] for tensor in tensors] == [torch.Size(shape) for shape in _ODD_SHAPES]
    assert all(tensor.data_ptr() % 16 == memory.data_ptr() % 16 for tensor in tensors)
