# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What is relied on in torch and emerging-optimizers, checked whatever their versions.

Names that are not documented, calls and steps with known results, and how torch is set up.
"""

import importlib.metadata
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from itertools import starmap

import torch

_DTENSOR = "torch.distributed.tensor"
_EMERGING = "emerging_optimizers.orthogonalized_optimizers"

# Name and what it is needed for. If one were gone, an import or a step would end in an error that
# says neither who needs it nor what to install.
_SYMBOLS = {
    f"{_DTENSOR}:DTensor._local_tensor": "the rows of a rank, without a view",
    f"{_DTENSOR}:DTensor.__create_chunk_list__": "what checkpoints write of a rank",
    f"{_DTENSOR}.placement_types:Placement.is_shard": "which dimension an axis cuts",
    f"{_DTENSOR}.placement_types:_StridedShard": "FSDP2 beside tensor parallelism",
    "torch.distributed.device_mesh:DeviceMesh.get_coordinate": "the place of a rank in a mesh",
    "emerging_optimizers.mixin:WeightDecayT": "the type of an argument",
    "emerging_optimizers.utils:FP32MatmulPrecT": "the precisions of Newton-Schulz",
    "emerging_optimizers.utils:fp32_matmul_precision": "the precision of Newton-Schulz",
    f"{_EMERGING}:Muon._init_group": "momentum from the start",
    f"{_EMERGING}:Muon._apply_weight_decay_inplace": "the method that replaces it",
    f"{_EMERGING}:Muon.orthogonalize": "the method that replaces it",
    f"{_EMERGING}:Muon.pre_weight_update_fn_inplace": "subclasses that change updates",
    f"{_EMERGING}:Muon.post_weight_update_fn_inplace": "subclasses that change updates",
    f"{_EMERGING}.muon:MuonScaleT": "the ways to scale results",
    f"{_EMERGING}.muon:get_muon_scale_factor": "the scale of results",
    f"{_EMERGING}.muon_utils:_COEFFICIENT_SETS": "the coefficients",
    f"{_EMERGING}.muon_utils:newton_schulz": "Newton-Schulz of fp32 matrices",
    f"{_EMERGING}.muon_utils:newton_schulz_step": "Newton-Schulz of bf16 matrices",
    f"{_EMERGING}.muon_utils:batched_newton_schulz_step": "Newton-Schulz of bf16 matrices",
}


def _matrices() -> list[torch.Tensor]:
    # Whatever the default device and dtype are.
    return [torch.full((2, 2), x, dtype=torch.float32, device="cpu") for x in (1.0, 3.0)]


def _copies_to_bf16() -> bool:
    copies = [torch.zeros_like(each, dtype=torch.bfloat16) for each in _matrices()]
    torch._foreach_copy_(copies, _matrices())
    return [float(each[0, 0]) for each in copies] == [1.0, 3.0]


def _lerps() -> bool:
    zeros = [torch.zeros_like(each) for each in _matrices()]
    found = torch._foreach_lerp(_matrices(), zeros, 0.5)
    torch._foreach_lerp_(found, _matrices(), 0.5)
    return [float(each[0, 0]) for each in found] == [0.75, 2.25]


def _norms_in_float64() -> bool:
    found = torch._foreach_norm(_matrices(), 2, dtype=torch.float64)
    return [(each.dtype, each.item()) for each in found] == [
        (torch.float64, 2.0),
        (torch.float64, 6.0),
    ]


def _scales_by_tensors() -> bool:
    found = _matrices()
    torch._foreach_mul_(found, [torch.tensor(x, device="cpu") for x in (2.0, 0.5)])
    torch._foreach_add_(found, _matrices(), alpha=-1.0)
    return [float(each[0, 0]) for each in found] == [1.0, -1.5]


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

    from megatron_muon.runtime.momentum import advance_momentum
    from megatron_muon.runtime.weight_decay import WEIGHT_DECAY_METHODS

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
            muon.step()
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


def _steps_like_muon() -> bool:
    # The operations are the same ones, so bits differ only where torch has another kernel for
    # lists. Weights are about 4, and updates of the size of lr, 0.5.
    with torch.no_grad():
        return all(torch.allclose(found, own, atol=1e-4, rtol=0) for found, own in _steps_of_muon())


# Calls as a step makes them.
_CALLS: dict[str, Callable[[], bool]] = {
    "torch._foreach_copy_ from float32 to bfloat16": _copies_to_bf16,
    "torch._foreach_lerp and _foreach_lerp_ with one weight": _lerps,
    "torch._foreach_norm with dtype=torch.float64": _norms_in_float64,
    "torch._foreach_mul_ by tensors, torch._foreach_add_ with alpha": _scales_by_tensors,
    "emerging_optimizers' Muon.step": _steps_like_muon,
}


def dependency_problems() -> list[str]:
    """List what torch and emerging-optimizers lack or compute differently, a sentence each.

    Memory: some matrices of six elements on the CPU.
    """
    return missing_symbols() or _other_results()


def environment_problems() -> list[str]:
    """List environment variables with which copies of a matrix may differ, a sentence each."""
    if os.environ.get("PYTORCH_TUNABLEOP_ENABLED") != "1":
        return []
    return [
        "PYTORCH_TUNABLEOP_ENABLED: expected 0, with which copies of a matrix stay equal, got 1, "
        "with which every rank chooses kernels by timing. Unset it"
    ]


def missing_symbols() -> list[str]:
    """List the names that torch and emerging-optimizers lack, a sentence each.

    A package whose own import fails has one sentence, with that error.
    """
    return list(dict.fromkeys(filter(None, starmap(_problem_of, _SYMBOLS.items()))))


_ADVICE = "Install a release of docs/support.md"


def _problem_of(symbol: str, use: str) -> str:
    try:
        pkgutil.resolve_name(symbol)
    except Exception as error:
        release = _release_of(symbol)
        if symbol.partition(":")[0] in sys.modules:
            name = symbol.replace(":", ".")
            return f"{name}: expected it for {use}, got none in {release}. {_ADVICE}"
        return (
            f"{release}: expected its import to work, got {error!r}. Install what it needs, as "
            "absl-py (pip install absl-py), and run Python without -OO"
        )
    return ""


def _other_results() -> list[str]:
    problems = []
    for call, is_right in _CALLS.items():
        try:
            found = "" if is_right() else "another result"
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            found = str(error).partition("\n")[0]
        if found:
            problems.append(
                f"{call}: expected it as in the tested releases, got {found} in "
                f"{_release_of(call)}. {_ADVICE}"
            )
    return problems


def _release_of(symbol: str) -> str:
    """Return the package of a symbol with its version."""
    if symbol.startswith("torch"):
        return f"torch {torch.__version__}"
    try:
        return f"emerging-optimizers {importlib.metadata.version('emerging-optimizers')}"
    except importlib.metadata.PackageNotFoundError:
        return "emerging-optimizers, which is not installed"
