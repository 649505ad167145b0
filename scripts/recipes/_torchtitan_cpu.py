# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""torchtitan on ranks without a GPU, which it does not expect; import it before torchtitan.

It reads the device from torch, measures the memory of a GPU, attends with FlexAttention, which has
no backward pass on CPUs, and has gradients scaled while they are reduced, which gloo cannot do.
"""

import dataclasses
import types
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

IS_GPU = torch.cuda.is_available()
if not IS_GPU:
    utils.device_type, utils.device_module = "cpu", torch.cpu

from torchtitan.components import metrics  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models.common.attention import (  # noqa: E402
    FlexAttention,
    ScaledDotProductAttention,
)
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402


def _no_memory_monitor() -> types.SimpleNamespace:
    """Return a monitor that measures nothing."""
    nothing = metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)
    return types.SimpleNamespace(
        device_name="cpu", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None
    )


def for_cpu(spec: ModelSpec) -> ModelSpec:
    """Return a model with torch's attention, whose gradients gloo can sum; as it is on GPUs."""
    if IS_GPU:
        return spec
    for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())

    def parallelize(model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        model = spec.parallelize_fn(model, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return dataclasses.replace(spec, parallelize_fn=parallelize)


if not IS_GPU:
    metrics.build_device_memory_monitor = _no_memory_monitor
    # It waits on a device with a number.
    distributed.set_pg_timeouts = lambda **_: None
