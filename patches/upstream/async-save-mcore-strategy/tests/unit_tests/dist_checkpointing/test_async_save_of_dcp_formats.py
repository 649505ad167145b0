# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner

from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy
from megatron.training.async_utils import get_save_and_finalize_callbacks


@pytest.fixture
def process_group():
    initialized = dist.is_initialized()
    if not initialized:
        dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    if not initialized:
        dist.destroy_process_group()


def test_async_save_with_the_mcore_strategy(tmp_path, monkeypatch, process_group):
    """torch_dcp and fsdp_dtensor are saved by --async-strategy mcore, as by nvrx."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
        monkeypatch.setattr(torch.cuda, 'current_device', lambda: 'cpu')
    path = tmp_path / f'rank_{dist.get_rank()}'
    _, modules = get_async_strategy('mcore')
    writer = modules['FileSystemWriterAsync'](path)

    # The calls of save_checkpoint().
    plan = modules['save_state_dict_async_plan'](
        {'weight': torch.arange(6.0)},
        writer,
        None,
        0,
        planner=DefaultSavePlanner(),
        enable_cache=False,
    )
    request = get_save_and_finalize_callbacks(writer, plan, 'mcore')
    request.execute_sync()

    loaded = {'weight': torch.zeros(6)}
    dist.checkpoint.load(loaded, checkpoint_id=path)
    assert torch.equal(loaded['weight'], torch.arange(6.0))
