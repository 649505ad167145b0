# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""All backends by name, and which of them a job can use."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from megatron_muon.newton_schulz.backend import Backend, Standard
from megatron_muon.newton_schulz.gram import Gram
from megatron_muon.newton_schulz.kernels import GramSymmetric, Symmetric
from megatron_muon.newton_schulz.settings import Call, NewtonSchulzSettings
from megatron_muon.newton_schulz.transformer_engine import TransformerEngine

if TYPE_CHECKING:
    import torch

BackendChoice = Literal[
    "standard", "symmetric", "gram", "gram_symmetric", "transformer_engine", "auto"
]

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (Standard(), Symmetric(), Gram(), GramSymmetric(), TransformerEngine())
}

# Relative to the norm. On random matrices the error of bf16 steps is about 0.005
# (docs/newton_schulz.md), and kernels sum in another order. The error of a wrong kernel is about 1.
_MAX_DIFFERENCE = 0.05


def requested_backends(choice: BackendChoice) -> tuple[str, ...]:
    """Return the backends of a choice; matrices use the cheapest, ties go to the first.

    Every choice has a backend for all shapes, also those that kernels do not support.
    """
    names: dict[BackendChoice, tuple[str, ...]] = {
        "standard": (Standard.name,),
        "symmetric": (Standard.name, Symmetric.name),
        "gram": (Gram.name,),
        "gram_symmetric": (Gram.name, GramSymmetric.name),
        "transformer_engine": (TransformerEngine.name, Standard.name),
        # Not symmetric, whose tiles are chosen by timing: bits could change with every restart. Nor
        # transformer_engine: the cost of its calls is unknown.
        "auto": (Standard.name, Gram.name, GramSymmetric.name),
    }
    return names[choice]


def usable_backends(
    choice: BackendChoice, settings: NewtonSchulzSettings, device: "torch.device"
) -> tuple[tuple[str, ...], list[str]]:
    """Return the requested backends that a job can use, and why it cannot use the others.

    Args:
        choice: The user's choice.
        settings: Steps, coefficients and precision.
        device: Device of the matrices.
    """
    usable, reasons = [], []
    for name in requested_backends(choice):
        problems = BACKENDS[name].problems(settings, device)
        reasons += [f"Newton-Schulz {name}: {problem}" for problem in problems]
        if not problems:
            usable.append(name)
    return tuple(usable), reasons


def candidates(backends: Sequence[str], n: int, m: int, num_parts: int = 1) -> list[str]:
    """Return the backends that can run on a shape.

    Args:
        backends: Names, in order of preference; one of them can run on all shapes.
        n: Shorter side.
        m: Longer side.
        num_parts: Number of owners per matrix.
    """
    return [name for name in backends if BACKENDS[name].takes(n, m, num_parts)]


def check_against_reference(backend: Backend, stack: "torch.Tensor", call: Call) -> None:
    """Run a backend on random matrices, and compare it with its reference.

    Args:
        backend: A backend with a reference.
        stack: Has the shape, dtype and device to run on; its values are not read.
        call: How to orthogonalize it.

    Raises:
        RuntimeError: The results differ by more than rounding.

    Communication: that of both backends.
    """
    import torch
    import torch.distributed as dist

    assert backend.reference is not None
    # Its own generator: Megatron's must be in the same state on tensor-parallel ranks.
    seed = 0 if call.parts_group is None else dist.get_rank(call.parts_group)
    generator = torch.Generator(stack.device).manual_seed(seed)
    std = math.prod(call.whole_shape) ** -0.5
    drawn = torch.empty_like(stack).normal_(std=std, generator=generator)
    found = backend.run(drawn, call).float()
    expected = BACKENDS[backend.reference].run(drawn, call).float()
    difference = float((found - expected).norm() / expected.norm())
    # Also true if a result is NaN.
    if not difference <= _MAX_DIFFERENCE:
        raise RuntimeError(
            f"Newton-Schulz {backend.name}: expected results within {_MAX_DIFFERENCE} of those of "
            f"{backend.reference} for {stack.shape[1]} x {stack.shape[2]} matrices, got "
            f"{difference:.2g} of their norm. Use exchange.newton_schulz {backend.reference}, "
            "and report it with the versions of the kernels."
        )
