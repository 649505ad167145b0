# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Check torch and emerging-optimizers independently of their versions.

The checks cover names that are not documented, two steps of Muon, and the environment of torch.
"""

import functools
import importlib.metadata
import os
import pkgutil
import sys
from collections.abc import Iterator

import torch

# Use by name. Without this table a missing name would end an import or a step with an error that
# says neither which package it belongs to nor what to install.
_SYMBOLS = {
    "torch.distributed.tensor": {
        "DTensor._local_tensor": "the rows of a rank, without a view",
        "DTensor.__create_chunk_list__": "the shards that checkpoints write",
    },
    "torch.distributed.tensor.placement_types": {
        "Placement.is_shard": "which dimension an axis cuts",
        "_StridedShard": "FSDP2 beside tensor parallelism",
    },
    "torch.distributed.device_mesh": {
        "DeviceMesh.get_coordinate": "the place of a rank in a mesh",
    },
    "emerging_optimizers.mixin": {
        "WeightDecayT": "the type of an argument",
    },
    "emerging_optimizers.utils": {
        "FP32MatmulPrecT": "the precisions of Newton-Schulz",
        "fp32_matmul_precision": "the precision of Newton-Schulz",
    },
    "emerging_optimizers.orthogonalized_optimizers": {
        "Muon._init_group": "momentum from the start",
        "Muon._apply_weight_decay_inplace": "the method that replaces it",
        "Muon.orthogonalize": "the method that replaces it",
        "Muon.pre_weight_update_fn_inplace": "subclasses that change updates",
        "Muon.post_weight_update_fn_inplace": "subclasses that change updates",
    },
    "emerging_optimizers.orthogonalized_optimizers.muon": {
        "MuonScaleT": "the ways to scale results",
        "get_muon_scale_factor": "the scale of results",
    },
    "emerging_optimizers.orthogonalized_optimizers.muon_utils": {
        "_COEFFICIENT_SETS": "the coefficients",
        "get_coefficient_iterator": "their order",
        "newton_schulz": "Newton-Schulz of fp32 matrices",
        "newton_schulz_step": "Newton-Schulz of bf16 matrices",
        "batched_newton_schulz_step": "Newton-Schulz of bf16 matrices",
    },
}


def _steps_of_muon() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a parameter after two steps of emerging-optimizers' Muon, and after two steps here.

    Momentum and weight decay are this package's, Newton-Schulz and scale are emerging-optimizers'.
    There is one pair for each method of weight decay. The precision is "highest", as CPUs may
    multiply in bfloat16 otherwise.
    """
    from emerging_optimizers.orthogonalized_optimizers import (
        Muon,
        get_muon_scale_factor,
        muon_utils,
    )
    from emerging_optimizers.utils import fp32_matmul_precision

    from megatron_muon.step.elementwise import (
        WEIGHT_DECAY_METHODS,
        advance_momentum,
        step_without_hooks,
    )

    start = torch.tensor([[3.0, 1.0, -2.0], [0.5, 4.0, 1.0]], dtype=torch.float32, device="cpu")
    group = {"lr": 0.5, "momentum": 0.75, "weight_decay": 0.25}
    scale = get_muon_scale_factor(2, 3, mode="spectral")
    for method in WEIGHT_DECAY_METHODS:
        param = torch.nn.Parameter(start.clone())
        muon = Muon(
            [param],
            **group,
            nesterov=True,
            weight_decay_method=method,
            fp32_matmul_prec="highest",
            coefficient_type="quintic",
            num_ns_steps=5,
            scale_mode="spectral",
            extra_scale_factor=1.0,
        )
        own, momentum = start.clone(), torch.zeros_like(start)
        for grad in (start.square(), start.flip(0)):
            param.grad = grad.clone()
            step_without_hooks(muon)
            (update,) = advance_momentum(
                group,
                [own],
                [grad],
                [momentum],
                weight_decay_method=method,
                nesterov=True,
                updates=[torch.empty_like(grad)],
            )
            with fp32_matmul_precision("highest"):
                result = muon_utils.newton_schulz(update, 5, "quintic")
            own.add_(result * scale, alpha=-group["lr"])
        yield param.detach(), own


def dependency_problems() -> list[str]:
    """Return an error message for each API that is missing, or for a Muon that steps differently.

    Memory: some matrices of six elements on the CPU.
    """
    return missing_symbols() or [*_muon_problems()]


def environment_problems() -> list[str]:
    """Return an error message if copies of a matrix may differ in this environment."""
    if os.environ.get("PYTORCH_TUNABLEOP_ENABLED") != "1":
        return []
    return [
        "PYTORCH_TUNABLEOP_ENABLED: expected 0, with which copies of a matrix stay equal, got 1, "
        "with which every rank chooses kernels by timing. Unset it"
    ]


def missing_symbols() -> list[str]:
    """Return an error message for each API that torch or emerging-optimizers lacks.

    A package whose own import fails has one message, with that error.
    """
    problems = [
        _problem_of(module, name, use)
        for module, uses in _SYMBOLS.items()
        for name, use in uses.items()
    ]
    return list(dict.fromkeys(filter(None, problems)))


_ADVICE = "Install a release of docs/support.md"


def _problem_of(module: str, name: str, use: str) -> str:
    try:
        pkgutil.resolve_name(f"{module}:{name}")
    except Exception as error:
        release = _release_of(module)
        if module in sys.modules:
            return f"{module}.{name}: expected it for {use}, got none in {release}. {_ADVICE}"
        return (
            f"{release}: expected its import to work, got {error!r}. Install what it needs, as "
            "absl-py (pip install absl-py), and run Python without -OO"
        )
    return ""


# Constant per process, and every model's optimizer asks.
@functools.cache
def _muon_problems() -> tuple[str, ...]:
    try:
        # The operations are the same ones, so bits differ only where torch has another kernel for
        # lists. Weights are about 4, and updates of the size of lr, 0.5.
        with torch.no_grad():
            pairs = _steps_of_muon()
            if all(torch.allclose(upstream, own, atol=1e-4, rtol=0) for upstream, own in pairs):
                return ()
        actual = "another result"
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        actual = str(error).partition("\n")[0]
    release = _release_of("emerging_optimizers")
    return (
        "emerging_optimizers' Muon.step: expected it as in the tested releases, got "
        f"{actual} in {release}. {_ADVICE}",
    )


def _release_of(module: str) -> str:
    """Return the package of a module with its version."""
    if module.startswith("torch"):
        return f"torch {torch.__version__}"
    try:
        return f"emerging-optimizers {importlib.metadata.version('emerging-optimizers')}"
    except importlib.metadata.PackageNotFoundError:
        return "emerging-optimizers, which is not installed"
