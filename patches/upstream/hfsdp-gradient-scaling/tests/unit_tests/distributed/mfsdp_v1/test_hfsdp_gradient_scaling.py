# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.src.megatron_fsdp.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import (
    DataParallelBuffer,
    _create_hfsdp_helper_buffer,
)


@pytest.fixture
def process_group():
    initialized = dist.is_initialized()
    if not initialized:
        dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if not initialized:
        dist.destroy_process_group()


def test_hfsdp_helper_buffer_scales_gradients(process_group):
    """The buffer through which HFSDP reduces gradients scales them, as the buffer it helps does."""
    buffer = DataParallelBuffer(
        DistributedDataParallelConfig(),
        [torch.nn.Parameter(torch.randn(8, 4))],
        is_data_distributed=True,
        bucket_id=0,
        data_parallel_group=process_group,
        gradient_scaling_factor=0.25,
    )

    helper = _create_hfsdp_helper_buffer(buffer, process_group, is_data_distributed=True)

    assert helper.gradient_scaling_factor == 0.25
