# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Bits of Newton-Schulz: stacks against singles, neighbours, slots, NaN, alignment."""

from typing import Any

import torch

from gpu_checks import reference
from gpu_checks.report import Context, Report
from megatron_muon.newton_schulz.call import Call
from megatron_muon.newton_schulz.registry import BACKENDS

# Those of the presets of python -m megatron_muon.plan, and odd ones.
_SHAPES = {
    "cuda": [
        (128, 2048), (512, 2048), (768, 2048), (2048, 768), (1024, 4096), (1536, 2048),
        (8192, 1024), (4096, 4096), (7168, 2048), (4096, 7168), (4096, 14336), (28672, 4096),
        (130, 67), (1, 16), (16, 1),
    ],
    "cpu": [(48, 24), (24, 48), (32, 32), (32, 8), (130, 67), (1, 16), (16, 1)],
}  # fmt: skip
_BATCHES = {"cuda": (2, 4, 8, 16, 32), "cpu": (2, 8)}
_MAX_ELEMENTS = 2**30
# Of the Frobenius norm. Rounding to bf16 after each of 15 products, by kernels that add in another
# order; what is not orthogonalized at all is off by about 1.
_TOLERANCE = 0.05
# Elements of bf16 that the base of a stack is moved by: 2, 16 and 128 bytes.
_OFFSETS = (1, 8, 64)


def check(context: Context, report: Report) -> None:
    """Compare each shape, and list what differs."""
    torch.set_num_threads(1 if context.device == "cpu" else torch.get_num_threads())
    rows = []
    for index, shape in enumerate(_SHAPES[context.device]):
        rows.append(_check_shape(shape, index, context, report))
    report.data("shapes", rows)
    report.table(
        "Bits of Newton-Schulz in stacks",
        (
            "shape",
            "stack of one is upstream's",
            "fp32 is upstream's",
            "stacks with the bits of singles",
            "largest difference of a stack from singles",
            "slots and neighbours do not matter",
            "moved by 2, 16, 128 bytes",
        ),
        rows,
    )
    num_equal = sum(float(row[4]) == 0 for row in rows)
    report.figure(
        f"{len(rows)} shapes in stacks of up to {max(_BATCHES[context.device])}: for {num_equal} "
        "every stack has the bits of singles"
    )


def _check_shape(shape: tuple[int, int], seed: int, context: Context, report: Report) -> list[str]:
    device = torch.device(context.device)
    generator = torch.Generator(device=device).manual_seed(seed)
    num_fitting = max(2, _MAX_ELEMENTS // (shape[0] * shape[1]))
    batches = [batch for batch in _BATCHES[context.device] if batch <= num_fitting]
    drawn = [torch.randn(shape, generator=generator, device=device) for _ in range(max(batches))]
    wire = torch.stack([reference.normalized_bf16(matrix) for matrix in drawn])
    name = f"{shape[0]} x {shape[1]}"

    expected = reference.orthogonalized(drawn[0], "medium", has_float64_norm=True)
    single = _run(wire[:1], shape)[0]
    is_upstreams = _same(single.float(), expected)
    report.expect(is_upstreams, f"{name}: a stack of one differs from emerging-optimizers' bits")
    with reference.fp32_matmul_precision("highest"):
        call = Call(reference.settings(is_bf16=False), shape, is_normalized=False)
        fp32 = BACKENDS["standard"].run(drawn[0].unsqueeze(0), call)[0]
    is_fp32 = _same(fp32, reference.orthogonalized(drawn[0], "highest", has_float64_norm=False))
    report.expect(is_fp32, f"{name}: fp32 differs from emerging-optimizers' bits")
    del drawn, fp32, expected

    equal, largest, is_invariant = [], 0.0, True
    for batch in batches:
        stack = wire[:batch]
        found = _run(stack, shape)
        differences = [
            reference.relative_difference(found[i], _run(stack[i : i + 1], shape)[0])
            for i in range(min(batch, 4))
        ]
        equal += [str(batch)] if max(differences) == 0 else []
        largest = max(largest, *differences)
        is_invariant &= _is_invariant(stack, found, shape)
    report.expect(is_invariant, f"{name}: slots or neighbours change the bits of a matrix")
    report.expect(
        largest <= _TOLERANCE, f"{name}: a stack differs from singles by {largest:.1e} of the norm"
    )
    moved = [_same(_moved(wire[:1], shape, offset)[0], single) for offset in _OFFSETS]
    return [
        name,
        _yes(is_upstreams),
        _yes(is_fp32),
        ", ".join(equal) or "none",
        f"{largest:.1e}",
        _yes(is_invariant),
        ", ".join("same" if is_same else "other bits" for is_same in moved),
    ]


def _is_invariant(stack: torch.Tensor, found: torch.Tensor, shape: tuple[int, int]) -> bool:
    """Return whether each matrix has the same bits in another slot and beside anything."""
    is_same = _same(_run(stack.flip(0), shape).flip(0), found)
    for leftover in (0.0, torch.nan, 1e30):
        # Padding of a stack holds what was there before.
        padded = stack.clone()
        padded[1:] = leftover
        is_same &= _same(_run(padded, shape)[:1], found[:1])
    return is_same


def _moved(stack: torch.Tensor, shape: tuple[int, int], offset: int) -> torch.Tensor:
    """Run on a copy whose first element is not where an allocator puts it."""
    flat = stack.new_zeros(stack.numel() + offset)
    moved = flat[offset:].view(stack.shape)
    moved.copy_(stack)
    return _run(moved, shape)


def _run(stack: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    return BACKENDS["standard"].run(stack, Call(reference.settings(), shape, is_normalized=True))


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found, expected)


def _yes(value: Any) -> str:
    return "yes" if value else "NO"
