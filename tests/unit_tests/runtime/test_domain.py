# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Process groups of the exchange: which exist, which are used again, what is refused."""

from typing import Any

import pytest
from helpers.device import device, init_group, kind
from helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks


def _timeouts() -> list[float]:
    import datetime

    import torch.distributed as dist

    from megatron_muon.runtime.agreement import new_groups

    init_group(timeout=datetime.timedelta(seconds=77))
    groups = new_groups([(0, 1), (dist.get_rank(),)])
    return [
        group._get_backend(device()).options._timeout.total_seconds() for group in groups.values()
    ]


def test_new_groups_have_the_timeout_of_the_job():
    """They once waited for half an hour, torch's default, whatever the job had asked for."""
    assert run_ranks(2, _timeouts).check().results == [[77.0, 77.0]] * 2


def _parameter(mesh: Any, placements: list[Any]) -> Any:
    import torch

    from megatron_muon.rows.parameters import PlannedParameter, as_dtensor

    view = as_dtensor(torch.empty(4, 4), mesh, placements, (8, 4))
    return PlannedParameter("w", view, view)


def _domains() -> list[Any]:
    """Find the domain of shards with replicas, and of what only some ranks know as theirs."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    from megatron_muon.step.plan_inputs import find_plan_inputs

    init_group()
    mesh = init_device_mesh(kind(), (2, 2), mesh_dim_names=("replica", "shard"))
    parameter = _parameter(mesh, [Replicate(), Shard(0)])
    found = find_plan_inputs([parameter], device()).inputs[0]
    (matrix,) = found.matrices
    # Ranks 0 to 2 think that they hold a third each, and rank 3 that it has a copy of the last.
    crooked = [dist.new_group(ranks) for ranks in ([0, 1, 2], [2, 3])]
    mine = crooked[0] if dist.get_rank() < 3 else crooked[1]
    wrong = _parameter(DeviceMesh.from_group(mine, kind()), [Shard(0)])
    try:
        find_plan_inputs([wrong], device())
        error = "no error"
    except RuntimeError as problem:
        error = str(problem)
    dist.barrier()
    assert found.replica_group is not None
    return [
        list(found.domain.ranks),
        [list(region.holders) for region in matrix.regions],
        dist.get_process_group_ranks(found.replica_group),
        error,
    ]


def test_domain_is_shards_and_replicas_of_consistent_groups():
    """Two replicas of two shards are one domain; a rank whose group others lack is an error."""
    for rank, (ranks, holders, replicas, error) in enumerate(
        run_ranks(4, _domains).check().results
    ):
        assert ranks == [0, 1, 2, 3]
        assert holders == [[0, 2], [1, 3]]
        assert replicas == [rank % 2, rank % 2 + 2]
        assert (
            "expected a parameter of its mesh and placements on all 2 ranks of its mesh, 2 to 3"
            in error
        )
        assert "No optimizer was built." in error


def _groups_of_domains() -> list[bool]:
    """Find the group of two shards x two replicas, with and without one that the model has."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard

    from megatron_muon.step.plan_inputs import find_plan_inputs

    init_group()
    rank = dist.get_rank()
    made = {ranks: dist.new_group(list(ranks)) for ranks in [(0, 1), (2, 3), (0, 2), (1, 3)]}
    holders = dist.new_group([0, 1, 2, 3])
    parameters, known = [], []
    # The fifth rank has nothing, and takes part in making groups.
    if rank < 4:
        own = [made[pair] for pair in made if rank in pair]
        mesh = DeviceMesh.from_group(
            [own[1], own[0]],
            kind(),
            mesh=torch.arange(4).view(2, 2),
            mesh_dim_names=("replica", "shard"),
        )
        parameters, known = [_parameter(mesh, [Replicate(), Shard(0)])], [holders]
    first = find_plan_inputs(parameters, device(), known_groups=known).inputs
    second = find_plan_inputs(parameters, device()).inputs
    everyone = find_plan_inputs([_parameter_of_all()], device()).inputs
    one = torch.ones(1, device=device())
    if second:
        dist.all_reduce(one, group=second[0].domain.group)
    dist.barrier()
    return [
        not first or first[0].domain.group is holders,
        not second or second[0].domain.group is not holders,
        int(one) == (4 if rank < 4 else 1),
        everyone[0].domain.group is dist.group.WORLD,
    ]


def _parameter_of_all() -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    return _parameter(init_device_mesh(kind(), (dist.get_world_size(),)), [Shard(0)])


def test_groups_that_exist_are_used_again():
    """A new communicator takes memory of a GPU; one is made only where there is none."""
    assert run_ranks(5, _groups_of_domains).check().results == [[True] * 4] * 5
