# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read the parameters of a model that Megatron-FSDP v2 shards.

Only placements and attributes are read. Upstream's wrapper decides what of them
there is: in Megatron-LM main of 2026-08-22 ZeRO-3 on one axis, with expert parallelism.
"""

from typing import Any

import torch

from megatron_muon.rows.megatron_fsdp import is_of_fsdp_v2, unsharded_of


def is_v2(model: torch.nn.Module) -> bool:
    """Return whether Megatron-FSDP v2 shards a model."""
    return any(map(is_of_fsdp_v2, model.parameters()))


def copy_attributes(param: Any) -> None:
    """Copy Megatron's attributes to a sharded parameter from the one that modules see.

    Optimizers read them there. One more marks the parameter, see :func:`mark`.
    """
    for name, value in vars(unsharded_of(param)).items():
        if not name.startswith("_"):
            setattr(param, name, value)
    mark(param)


def mark(param: Any) -> None:
    """Mark a parameter as Megatron-FSDP v1 does: its gradient is a shard, to be counted once."""
    param.__fsdp_param__ = True


def is_sharded_over_instances(model: torch.nn.Module, ddp_config: Any) -> bool:
    """Return whether all instances of the optimizer hold different shards.

    Their number does not tell: the wrapper may shard over all data-parallel ranks all the same.
    """
    return ddp_config.num_distributed_optimizer_instances > 1 and all(
        placement.is_shard()
        for param in model.parameters()
        for placement in param.placements  # type: ignore[attr-defined]
    )
