# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Process groups of the exchange, and the grid of ranks that they form."""

import functools
from typing import Any

import pytest
from helpers.device import device, init_group
from helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks


def _timeouts() -> list[float]:
    import datetime

    import torch.distributed as dist

    from megatron_muon.runtime.groups import new_groups

    init_group(timeout=datetime.timedelta(seconds=77))
    groups = new_groups([(0, 1), (dist.get_rank(),)])
    return [
        group._get_backend(device()).options._timeout.total_seconds() for group in groups.values()
    ]


def test_new_groups_have_the_timeout_of_the_job():
    """They once waited for half an hour, torch's default, whatever the job had asked for."""
    assert run_ranks(2, _timeouts).check().results == [[77.0, 77.0]] * 2


def _domains() -> list[Any]:
    """Find the domain of a grid, of lone ranks, and of groups that form no grid."""
    import torch.distributed as dist

    from megatron_muon.runtime.domain import find_grid

    init_group()
    rank, cpu = dist.get_rank(), device()

    def my_group(*sets: tuple[int, ...]) -> Any:
        made = {ranks: dist.new_group(list(ranks)) for ranks in sets}
        return next((group for ranks, group in made.items() if rank in ranks), None)

    shards, replicas = my_group((0, 1), (2, 3)), my_group((0, 2), (1, 3))
    grid = find_grid(shards, None, replicas, device=cpu)
    alone = find_grid(None, None, None, device=cpu)
    # Ranks 0 to 2 hold a shard each, and rank 3 a copy of the last.
    crooked = my_group((0, 1, 2)), None, my_group((2, 3))
    try:
        find_grid(*crooked, device=cpu)
        error = "no error"
    except RuntimeError as problem:
        error = str(problem)
    dist.barrier()
    return [grid.ranks, grid.holders, alone.ranks, error]


@functools.cache
def domains() -> list[Any]:
    """Return what four ranks found."""
    return run_ranks(4, _domains).check().results


def test_domain_joins_what_groups_link():
    """Two replicas of two shards are one domain; a rank without groups is one by itself."""
    for rank, (ranks, holders, alone, _) in enumerate(domains()):
        assert ranks == [0, 1, 2, 3]
        assert holders == [[[0, 2], [1, 3]]]
        assert alone == [rank]


def test_groups_that_form_no_grid_are_refused_on_all_ranks():
    """Three shards of which one alone has a copy: each rank gets the same error."""
    for *_, error in domains():
        assert "ranks 0 to 3: expected 1 tensor-parallel ranks x 3 shards x the same" in error
        assert "Pass the process groups that the model was built with." in error


def _groups_of_domains() -> list[bool]:
    """Find the group of two shards x two replicas, with and without one that the model has."""
    import torch
    import torch.distributed as dist

    from megatron_muon.runtime.domain import find_grid

    init_group()
    rank, cpu = dist.get_rank(), device()
    made = {ranks: dist.new_group(list(ranks)) for ranks in [(0, 1), (2, 3), (0, 2), (1, 3)]}
    shards, replicas = (made[pair] for pair in made if rank in pair) if rank < 4 else (None, None)
    holders = dist.new_group([0, 1, 2, 3])
    holders = holders if rank < 4 else None
    known = find_grid(shards, None, replicas, holders, device=cpu)
    new = find_grid(shards, None, replicas, device=cpu)
    everyone = dist.new_group(list(range(dist.get_world_size())))
    world = find_grid(everyone, None, None, device=cpu)
    pairs = find_grid(made[0, 1] if rank < 2 else None, None, None, device=cpu)
    one = torch.ones(1, device=cpu)
    if new.group is not None:
        dist.all_reduce(one, group=new.group)
    dist.barrier()
    return [
        known.group is holders,
        (new.group is not holders or rank == 4) and int(one) == (4 if rank < 4 else 1),
        world.group is everyone,
        pairs.group is (made[0, 1] if rank < 2 else None),
    ]


def test_groups_that_exist_are_used_again():
    """A new communicator takes memory of a GPU; one is made only where there is none."""
    assert run_ranks(5, _groups_of_domains).check().results == [[True] * 4] * 5


def _group_of_all_ranks() -> bool:
    import torch.distributed as dist

    from megatron_muon.runtime.domain import find_grid

    init_group()
    rank = dist.get_rank()
    rows, columns = ([dist.new_group([0, 1]), dist.new_group([2, 3])],
                     [dist.new_group([0, 2]), dist.new_group([1, 3])])  # fmt: skip
    found = find_grid(rows[rank // 2], columns[rank % 2], None, device=device())
    return found.group is dist.group.WORLD


def test_domain_of_all_ranks_uses_the_group_of_the_job():
    """Tensor parallelism joined over the whole job, as it is for dense matrices."""
    assert run_ranks(4, _group_of_all_ranks).check().results == [True] * 4
