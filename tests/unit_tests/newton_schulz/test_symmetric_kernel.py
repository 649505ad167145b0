# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""emerging-optimizers' Triton kernel itself, interpreted on a CPU: its numbers, not its speed."""

import itertools
import json
import os
import sys
from typing import Any

import pytest
from helpers.commands import run_command
from helpers.ranks import ROOT

# Sides that are multiples of 8, and of the kernel's tiles of 64 or not; tall and wide.
SHAPES = [(64, 128), (72, 136), (136, 72)]
# Rows and columns of a tile, and what it adds up at a time: square ones and others.
TILES = [(64, 64, 64), (64, 128, 64)]


def _interpreted() -> list[list[Any]]:
    """Run the kernel and the backend; return shapes with errors."""
    import torch
    from helpers import triton_interpreter

    triton_interpreter.mend()
    from emerging_optimizers.triton_kernels import syrk
    from helpers.exact import relative_error
    from helpers.stacks import orthogonalized

    generator = torch.Generator().manual_seed(0)
    found = []
    for shape, tile in itertools.product(SHAPES, TILES):
        # One configuration: of several the kernel would take the fastest.
        syrk.syrk_kernel_bf16.configs = [
            each
            for each in syrk._CONFIGS
            if tuple(each.kwargs[f"TILE_{side}"] for side in "MNK") == tile
        ][:1]
        x = torch.randn(2, *shape, generator=generator)
        x = (x / x.norm(dim=(1, 2), keepdim=True)).bfloat16()
        # One that begins where the kernel cannot load: the backend copies it.
        memory = torch.empty(x.numel() + 1, dtype=x.dtype)
        stack = memory[1:].view(x.shape).copy_(x)
        wide = x[0] if shape[0] <= shape[1] else x[0].mT
        gram = syrk.tsyrk_ex(wide)
        exact = wide.float() @ wide.float().mT
        factor = syrk.tsyrk_ex(gram, gram, alpha=2.0, beta=-4.0)
        exact_factor = 2.0 * gram.float() @ gram.float() - 4.0 * gram.float()
        standard, symmetric = (orthogonalized(stack, name) for name in ("standard", "symmetric"))
        found.append(
            [
                [shape, tile],
                _relative(gram.float(), exact),
                _relative(factor.float(), exact_factor),
                torch.equal(gram, gram.mT) and torch.equal(factor, factor.mT),
                relative_error(symmetric, standard),
            ]
        )
    return found


def _relative(found: Any, exact: Any) -> float:
    """Return the largest error of an element, over the largest element."""
    return float((found - exact).abs().max() / exact.abs().max())


@pytest.mark.slow
def test_interpreted_kernel_has_the_numbers_of_full_products():
    """The interpreted kernel has the numbers of full products up to rounding to bf16."""
    # A process of its own: Triton reads the variable when it is imported.
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "unit_tests")])
    run = run_command(sys.executable, __file__, env={"TRITON_INTERPRET": "1", "PYTHONPATH": paths})
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout.splitlines()[-1])
    assert len(rows) == len(SHAPES) * len(TILES)
    for where, gram, factor, is_symmetric, difference in rows:
        assert gram <= 2**-8 and factor <= 2**-8, (where, gram, factor)
        assert is_symmetric and difference < 0.01, (where, difference)


if __name__ == "__main__":
    print(json.dumps(_interpreted()))
