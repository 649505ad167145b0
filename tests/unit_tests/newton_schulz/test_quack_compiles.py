# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""quack's own kernels, compiled for the calls of ``gram_symmetric``; no GPU needed, none launched.

    pip install quack-kernels==0.5.0
    bash scripts/test.sh tests/unit_tests/newton_schulz/test_quack_compiles.py

Without the package these tests are skipped. quack compiles for the GPU that ``QUACK_ARCH`` names,
and takes tensors of shapes without memory (quack/cache/compile_only.py).
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

# A process of its own: quack reads the variables once, and other tests put a fake in its place.
_PROGRAM = """
import torch
from quack import gemm_symmetric
from quack.cache import compile_only_mode

from megatron_muon.newton_schulz.backend import NewtonSchulzArgs
from megatron_muon.newton_schulz.kernels import GramSymmetric
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings

kernels = set()
compile_kernel = gemm_symmetric._compile_gemm_symmetric

def seen(*key):
    assert callable(compile_kernel(*key))
    kernels.add(key)

gemm_symmetric._compile_gemm_symmetric = seen
settings = NewtonSchulzSettings(5, "quintic", True, lambda rows, cols: (1.0, 1.0))
with compile_only_mode():
    for shape in ((512, 2048), (2048, 512), (256, 256)):
        for num_matrices in (1, 3):
            stack = torch.empty(num_matrices, *shape, dtype=torch.bfloat16, device="cuda")
            args = NewtonSchulzArgs(settings, shape, is_normalized=True)
            result = GramSymmetric().run(stack, args)
            assert result.shape == stack.shape and result.dtype == stack.dtype
print(len(kernels), "kernels,", *{dtype.__name__ for key in kernels for dtype in key[:3]})
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("quack") is None, reason="needs quack-kernels")
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_kernels_compile_for_the_calls_of_gram_symmetric(architecture):
    """Quack's kernels compile for the arguments, dtypes and strides of all calls."""
    names = {"QUACK_ARCH": architecture, "CUTE_DSL_ARCH": architecture}
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env=os.environ | names,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.splitlines()[-1] == "4 kernels, Float16"
