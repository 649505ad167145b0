# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Names of torch and emerging-optimizers that the step relies on, and the environment of torch.

``python -m megatron_muon.check`` compares steps with emerging-optimizers'.
"""

import importlib.metadata
import os
import pkgutil
import sys

import torch

from megatron_muon import __version__

# Names that are not documented. Without this table a missing one would end an import or a step with
# an error that says neither which package it belongs to nor what to install.
_NAMES = """
torch.distributed.tensor:DTensor._local_tensor
torch.distributed.tensor:DTensor.__create_chunk_list__
torch.distributed.tensor.placement_types:Placement.is_shard
torch.distributed.tensor.placement_types:_StridedShard
torch.distributed.device_mesh:DeviceMesh.get_coordinate
emerging_optimizers.utils:FP32MatmulPrecT
emerging_optimizers.utils:fp32_matmul_precision
emerging_optimizers.orthogonalized_optimizers:Muon._init_group
emerging_optimizers.orthogonalized_optimizers.muon:MuonScaleT
emerging_optimizers.orthogonalized_optimizers.muon:get_muon_scale_factor
emerging_optimizers.orthogonalized_optimizers.muon_utils:_COEFFICIENT_SETS
emerging_optimizers.orthogonalized_optimizers.muon_utils:get_coefficient_iterator
emerging_optimizers.orthogonalized_optimizers.muon_utils:newton_schulz
emerging_optimizers.orthogonalized_optimizers.muon_utils:newton_schulz_step
emerging_optimizers.orthogonalized_optimizers.muon_utils:batched_newton_schulz_step
""".split()


def releases() -> str:
    """Describe what a step is computed by, which is the same on all ranks of a job."""
    emerging_optimizers = _release_of("emerging_optimizers")
    return f"megatron-muon {__version__}, torch {torch.__version__}, {emerging_optimizers}"


def environment_problems() -> list[str]:
    """Return an error message if copies of a matrix may differ in this environment."""
    if os.environ.get("PYTORCH_TUNABLEOP_ENABLED") != "1":
        return []
    return [
        "PYTORCH_TUNABLEOP_ENABLED: expected 0, with which copies of a matrix stay equal, got 1, "
        "with which every rank chooses kernels by timing. Unset it"
    ]


def missing_names() -> list[str]:
    """Return an error message for each name that torch or emerging-optimizers lacks.

    A package whose own import fails has one message, with that error.
    """
    errors: dict[str, None] = {}
    for name in _NAMES:
        module = name.partition(":")[0]
        try:
            pkgutil.resolve_name(name)
        except Exception as error:
            text = (
                f"{name.replace(':', '.')}: expected it, got none in {_release_of(module)}. "
                "Install a release of docs/support.md"
            )
            if module not in sys.modules:
                text = (
                    f"{_release_of(module)}: expected its import to work, got {error!r}. Install "
                    "what it needs, as absl-py (pip install absl-py), and run Python without -OO"
                )
            errors[text] = None
    return list(errors)


def _release_of(module: str) -> str:
    """Return the package of a module with its version."""
    if module.startswith("torch"):
        return f"torch {torch.__version__}"
    try:
        return f"emerging-optimizers {importlib.metadata.version('emerging-optimizers')}"
    except importlib.metadata.PackageNotFoundError:
        return "emerging-optimizers, which is not installed"
