# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Process groups by their ranks, and the ranks that exchange matrices."""

import datetime
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the ranks of the job in a group, ascending."""
    return tuple(sorted(dist.get_process_group_ranks(group)))


def new_groups(sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make process groups; called by all ranks of the job together.

    Every rank takes part in making every group. ``use_local_synchronization`` would avoid that, but
    names a group by the number of groups that the rank is in already: ranks with different numbers
    would hang. New groups have the timeout of the job's group (``--distributed-timeout-minutes``).

    Args:
        sets: Ranks of the groups, ascending, this one among them.

    Returns:
        The groups, by their ranks.

    Communication: one gather of objects over the job.
    """
    if not dist.is_initialized():
        return {}
    rank = dist.get_rank()
    wanted: list[list[tuple[int, ...]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(wanted, [ranks for ranks in sets if ranks[0] == rank])
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in sorted({ranks for sets_of_rank in wanted for ranks in sets_of_rank}):
        group = dist.new_group(list(ranks), timeout=_job_timeout())
        if rank in ranks:
            made[ranks] = cast(dist.ProcessGroup, group)
    return made


def _job_timeout() -> datetime.timedelta:
    """Read the timeout of the job's process group; torch gives new groups half an hour on gloo."""
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(world._device_types[0]).options._timeout


@dataclass(frozen=True)
class Domain:
    """The ranks that exchange matrices with this one.

    Args:
        ranks: Ranks of the job, ascending.
        group: Their process group; None where this rank is alone.
        ranks_per_node: Ranks that the launcher started per node; None if it did not say so on every
            rank.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    ranks_per_node: int | None


def num_ranks_on_node() -> int:
    """Return how many ranks the launcher started on this node; 0 where it did not say."""
    # torchrun sets it, and counts the ranks of a node in a row.
    on_node = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(on_node) if on_node.isdecimal() else 0


def ranks_per_node(sizes: Sequence[int]) -> int | None:
    """Return one number for all nodes; None where the launcher did not say on all of them.

    If nodes have different numbers of ranks, it is their greatest common divisor: ranks that then
    count as on one node are, and some that are do not.
    """
    return math.gcd(*sizes) if min(sizes) > 0 else None
