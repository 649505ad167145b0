# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Names and calls of torch that are relied on and not documented: checked, whatever its version."""

import pkgutil
from collections.abc import Callable

import torch

_DTENSOR = "torch.distributed.tensor"

# Name and what it is needed for. If one were gone, a step would end in an error that says neither
# who needs it nor what to install.
_SYMBOLS = {
    f"{_DTENSOR}:DTensor._local_tensor": "the rows of a rank, without a view",
    f"{_DTENSOR}:DTensor.__create_chunk_list__": "what checkpoints write of a rank",
    f"{_DTENSOR}.placement_types:Placement.is_shard": "which dimension an axis cuts",
    f"{_DTENSOR}.placement_types:_StridedShard": "FSDP2 beside tensor parallelism",
    "torch.distributed.device_mesh:DeviceMesh.get_coordinate": "the place of a rank in a mesh",
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


# Calls of the forms that a step uses, on numbers that are exact.
_CALLS: dict[str, Callable[[], bool]] = {
    "torch._foreach_copy_ from float32 to bfloat16": _copies_to_bf16,
    "torch._foreach_lerp and _foreach_lerp_ with one weight": _lerps,
    "torch._foreach_norm with dtype=torch.float64": _norms_in_float64,
    "torch._foreach_mul_ by tensors, torch._foreach_add_ with alpha": _scales_by_tensors,
}


def torch_problems() -> list[str]:
    """List what this torch lacks or computes differently, a sentence each.

    Memory: eight matrices of four elements on the CPU.
    """
    problems = [
        f"{symbol.replace(':', '.')}: expected it for {use}, got none in torch "
        f"{torch.__version__}. Install a release of docs/support.md"
        for symbol, use in _SYMBOLS.items()
        if not _exists(symbol)
    ]
    for call, is_right in _CALLS.items():
        try:
            found = "" if is_right() else "another result"
        except (AttributeError, RuntimeError, TypeError) as error:
            found = str(error).partition("\n")[0]
        if found:
            problems.append(
                f"{call}: expected it in torch {torch.__version__}, got {found}. Install a release "
                "of docs/support.md"
            )
    return problems


def _exists(symbol: str) -> bool:
    try:
        pkgutil.resolve_name(symbol)
    except (AttributeError, ImportError):
        return False
    return True
