# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tensor import DTensor, Shard
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
    preprocess_state_dict_for_uneven_dtensor,
)


@pytest.fixture
def mesh():
    """Rank 3 of 4: the last one of both dimensions."""
    dist.init_process_group('fake', rank=3, world_size=4, store=FakeStore())
    yield init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))
    dist.destroy_process_group()


def shard(mesh, *placements):
    return DTensor.from_local(torch.zeros(3, 2), mesh, placements, shape=(6, 4), stride=(4, 1))


def test_shapes_are_gathered_once_per_process_group(mesh):
    """Saving a state dict does not cost a collective for every tensor and mesh dimension."""
    names = [f'{i}.{name}' for i in range(10) for name in ('exp_avg', 'exp_avg_sq')]
    state = {name: shard(mesh, Shard(0), Shard(1)) for name in names}

    def gather(objects, own, group=None):
        objects[:] = [own] * len(objects)

    with mock.patch.object(dist, 'all_gather_object', side_effect=gather) as gathers:
        preprocess_state_dict_for_uneven_dtensor({'optimizer': state})

    assert gathers.call_count == 2
    for tensor in state.values():
        (chunk,) = tensor._local_tensor.__create_chunk_list__()
        assert (chunk.offsets, chunk.sizes) == ((3, 2), (3, 2))
