# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks agree on errors, and on the process groups of the exchange."""

import datetime
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.device import device, init_group, kind
from helpers.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from megatron_muon.rows.parameters import PlannedParameter, as_dtensor
from megatron_muon.runtime.agreement import (
    new_groups,
    raise_where_any_rank_fails,
    raise_where_ranks_differ,
)
from megatron_muon.step.plan_inputs import find_plan_inputs

pytestmark = pytest.mark.ranks


def _error_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


def _agree() -> dict[str, str]:
    """Agree on several things in turn; ranks that one of them kept apart would hang."""
    init_group()
    rank, cpu, world = dist.get_rank(), device(), dist.group.WORLD

    def fails(problems: list[str], group: Any = None, **options: Any) -> str:
        return _error_of(
            lambda: raise_where_any_rank_fails(problems, group, cpu, "Stop.", **options)
        )

    def differs(entries: list[str]) -> str:
        return _error_of(lambda: raise_where_ranks_differ(entries, world, cpu, "lists", "Stop."))

    found = torch.tensor(int(rank == 1), dtype=torch.int32, device=cpu)
    pair = [dist.new_group([0, 1]), dist.new_group([2])][rank == 2]
    return {
        "sound": fails([]),
        "one": fails(["broken"] if rank == 1 else []),
        "shared": fails(["broken"] if rank else ["other"]),
        "many": fails([f"problem {number}" for number in range(25)]),
        "suspect": fails(
            [], num_device_problems=found, describe=lambda: ["NaN"] if rank == 1 else []
        ),
        "group": fails(["broken"] if rank == 2 else [], pair),
        "same": differs(["a", "b"]),
        "other": differs(["a", "c" if rank == 2 else "b"]),
        "longer": differs(["a", "b"][: 2 if rank == 1 else 1]),
        "after": fails([]),
    }


@functools.cache
def verdicts() -> list[dict[str, str]]:
    return run_ranks(3, _agree).check().results


def test_ranks_without_problems_go_on():
    """Ranks without problems go on, also after they failed together."""
    for found in verdicts():
        assert (found["sound"], found["same"], found["after"]) == ("no error",) * 3


SAME = "lists: expected the same on all ranks"


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("one", ["rank 1: broken"]),
        # A thousand ranks with the same problem make one line.
        ("shared", ["ranks 1, 2: broken", "rank 0: other"]),
        # The count comes from a tensor of the device, the sentence from the rank that counted.
        ("suspect", ["rank 1: NaN"]),
        ("other", [SAME, "rank 2 has 'c' where rank 0 has 'b'"]),
        ("longer", [SAME, "rank 1 has 'b' where rank 0 has 'nothing'"]),
    ],
)
def test_problems_are_raised_on_all_ranks(case, texts):
    """The error on all ranks names the ranks, their problems, and the remedy."""
    for found in verdicts():
        assert all(text in found[case] for text in texts)
        assert found[case].endswith("Stop.")


def test_long_lists_of_problems_are_cut():
    """An error lists twenty problems, and says how many more there are."""
    for found in verdicts():
        assert found["many"].count("problem ") == 20 and "... and 5 more" in found["many"]


def test_other_groups_are_left_alone():
    """Ranks outside of the group neither take part nor fail."""
    assert [found["group"][:8] for found in verdicts()] == ["no error", "no error", "Stopping"]
    assert "rank 2: broken" in verdicts()[2]["group"]


TIMEOUT_S = 77.0


def _parameter(mesh: Any, placements: list[Any]) -> Any:
    view = as_dtensor(torch.empty(4, 4), mesh, placements, (8, 4))
    return PlannedParameter("w", view, view)


def _make_groups() -> dict[str, Any]:
    """Let ranks be in different numbers of groups, which they make and use."""
    of_rank = {0: [(0, 1, 2)], 1: [(1, 2), (0, 1, 2)], 2: [(1, 2), (0, 1, 2)]}
    first = new_groups([(0,)] if dist.get_rank() == 0 else [])
    second = new_groups(of_rank.get(dist.get_rank(), []))
    for ranks in sorted(second):
        dist.all_reduce(torch.ones(1, device=device()), group=second[ranks])
    backends = [each._get_backend(device()) for each in [*first.values(), *second.values()]]
    return {
        "made": [len(first), len(second)],
        "timeouts": [each.options._timeout.total_seconds() for each in backends],
    }


def _find_domains() -> dict[str, Any]:
    """Find the group of two shards x two replicas, with and without one that the model has."""
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
    of_all = _parameter(init_device_mesh(kind(), (dist.get_world_size(),)), [Shard(0)])
    everyone = find_plan_inputs([of_all], device()).inputs
    one = torch.ones(1, device=device())
    if second:
        dist.all_reduce(one, group=second[0].domain.group)
    return {
        "domains": [
            [
                list(found.domain.ranks),
                [list(region.holders) for region in found.matrices[0].regions],
                dist.get_process_group_ranks(found.replica_group),
            ]
            for found in [*first, *second]
        ],
        "is_used_again": [
            not first or first[0].domain.group is holders,
            not second or second[0].domain.group is not holders,
            int(one) == (4 if rank < 4 else 1),
            everyone[0].domain.group is dist.group.WORLD,
        ],
    }


def _find_crooked_domains() -> str:
    """Let ranks 0 to 2 hold a third each, and rank 3 think that it has a copy of the last."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1, 2], [2, 3])]
    parameters = []
    if dist.get_rank() < 4:
        mesh = DeviceMesh.from_group(groups[dist.get_rank() == 3], kind())
        parameters = [_parameter(mesh, [Shard(0)])]
    try:
        find_plan_inputs(parameters, device())
    except RuntimeError as error:
        return str(error)
    return "no error"


def _on_five_ranks() -> dict[str, Any]:
    init_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    found = {**_make_groups(), **_find_domains(), "error": _find_crooked_domains()}
    dist.barrier()
    return found


@functools.cache
def of_ranks() -> list[dict[str, Any]]:
    return run_ranks(5, _on_five_ranks).check().results


def test_ranks_in_different_numbers_of_groups_make_them():
    """Ranks in different numbers of groups make them without a hang."""
    made = [found["made"] for found in of_ranks()]
    assert made == [[1, 1], [0, 2], [0, 2], [0, 0], [0, 0]]


def test_new_groups_have_the_timeout_of_the_job():
    """New groups have the timeout of the job, not torch's half an hour."""
    for found in of_ranks():
        assert found["timeouts"] == [TIMEOUT_S] * sum(found["made"])


def test_groups_that_exist_are_used_again():
    """Groups that exist are used again, as a communicator takes memory of a GPU."""
    assert [found["is_used_again"] for found in of_ranks()] == [[True] * 4] * 5


def test_domain_is_shards_and_replicas():
    """Two replicas of two shards are one domain."""
    for rank, found in enumerate(of_ranks()[:4]):
        replicas = [rank % 2, rank % 2 + 2]
        assert found["domains"] == [[[0, 1, 2, 3], [[0, 2], [1, 3]], replicas]] * 2


def test_rank_whose_group_others_lack_is_an_error():
    """A rank in a group that the others lack is an error on all ranks."""
    for found in of_ranks():
        assert (
            "a parameter of its mesh and placements on all 2 ranks of its mesh, 2 to 3"
            in found["error"]
        )
