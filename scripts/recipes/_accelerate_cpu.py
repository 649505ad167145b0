# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""FSDP2 of accelerate on ranks without a GPU, where Accelerator does not choose it by itself."""

from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType


def shard_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Set what Accelerator sets on GPUs; nothing on GPUs or without ``torchrun``."""
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
