# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The kernel that moves rows, compiled for GPUs that are not there: registers and widths.

Triton compiles for any architecture, and its wheel says what a program uses; nothing is launched.
"""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_ARGUMENTS = {
    "moves": "*i64",
    "tiles": "*i32",
    "tensors": "*i64",
    "divisors": "*fp32",
    "factors": "*fp32",
}
# Whether the source and the target are bf16, whether the norm divides.
_MOVES = {
    "fp32 to bf16, divided": (False, True, True),
    "fp32 to fp32, divided": (False, False, True),
    "bf16 to fp32, by factors": (True, False, False),
    "bf16 to bf16, by factors": (True, True, False),
    "fp32 to fp32, by factors": (False, False, False),
}


@pytest.mark.slow
@pytest.mark.skipif(not _CUOBJDUMP.exists(), reason="needs Triton's NVIDIA backend")
@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_row_kernel_has_few_registers_and_wide_accesses(architecture, tmp_path, monkeypatch):
    """The kernel has at most 80 registers, no spill, and accesses of 16 bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron_muon.runtime import row_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for name, (source_is_bf16, target_is_bf16, divides) in _MOVES.items():
        constants = {
            "SOURCE_IS_BF16": source_is_bf16,
            "TARGET_IS_BF16": target_is_bf16,
            "DIVIDES": divides,
            "WIDTH": row_kernel.WIDTH,
            "TILE": row_kernel.TILE,
            "PIECE": row_kernel.PIECE,
        }
        source = ASTSource(
            fn=row_kernel._move,
            signature=_ARGUMENTS | dict.fromkeys(constants, "constexpr"),
            constexprs=constants,
            # torch aligns allocations, and the launcher specializes for multiples of 16.
            attrs={(i,): [["tt.divisibility", 16]] for i in range(len(_ARGUMENTS))},
        )
        target = GPUTarget("cuda", architecture, 32)
        options = {"num_warps": row_kernel.NUM_WARPS}
        compiled = triton.compile(source, target=target, options=options).asm
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(compiled["cubin"])
        command = [str(_CUOBJDUMP), "-res-usage", str(cubin)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        usage = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", found)
        assert usage is not None, name
        registers, stack, local = map(int, usage.groups())
        assert registers <= 80, name
        assert (stack, local) == (0, 0), name
        # Two pieces of 16 bytes a thread, or four where an element has 4 bytes.
        for instruction, is_bf16 in (("ld", source_is_bf16), ("st", target_is_bf16)):
            accesses = re.findall(rf"\b{instruction}\.global\.v4\.b32\b", compiled["ptx"])
            assert len(accesses) == (2 if is_bf16 else 4), (name, instruction)
