# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace
from unittest import mock

import pytest

from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter

TP, DP, EP = 2, 4, 2


class Group(SimpleNamespace):
    """The ranks of a process group."""

    def size(self):
        return len(self.ranks)


def on_rank(rank, function, *args, **kwargs):
    with mock.patch.object(adapter, 'dist') as dist:
        dist.get_rank.return_value = rank
        dist.get_world_size = lambda group=None: 16 if group is None else group.size()
        dist.get_process_group_ranks = lambda group: group.ranks
        return function(*args, **kwargs).tolist()


@pytest.mark.parametrize("first", [0, 8])
def test_meshes_have_the_ranks_of_one_pipeline_stage(first):
    """With two stages of 8 ranks, the ranks of a mesh are those of its own stage."""
    stage = [[first + dp * TP + tp for tp in range(TP)] for dp in range(DP)]
    tp, dp = Group(ranks=stage[0]), Group(ranks=[row[0] for row in stage])
    assert on_rank(first, adapter._get_dp_tp_mesh, dp, tp) == stage

    expt_dp = Group(ranks=dp.ranks[::EP])
    assert on_rank(first, adapter._get_dp_tp_mesh, expt_dp, tp, ep_size=EP) == stage[::EP]

    outer, inner = Group(ranks=dp.ranks[::2]), Group(ranks=dp.ranks[:2])
    mesh = on_rank(first, adapter._get_hsdp_tp_mesh, outer, inner, tp)
    assert mesh == [stage[:2], stage[2:]]
