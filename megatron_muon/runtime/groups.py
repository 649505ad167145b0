# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Process groups by their ranks: those that exist are used, the others are made."""

import datetime
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch.distributed as dist


class Wanted(NamedTuple):
    """A group that is needed.

    Args:
        ranks: Its ranks, ascending.
        known: Groups that exist; the first one with these ranks is used.
    """

    ranks: tuple[int, ...]
    known: Sequence[dist.ProcessGroup | None] = ()


def find_groups(wanted: Sequence[Wanted]) -> list[dist.ProcessGroup | None]:
    """Return the group of each set of ranks; called by all ranks of the job together.

    Groups that exist are used again: a communicator of NCCL needs hundreds of megabytes of a GPU.

    Returns:
        The groups, in order; None for a rank alone.

    Communication: that of :func:`new_groups`.
    """
    found = [_known(each) for each in wanted]
    missing = {
        each.ranks
        for each, group in zip(wanted, found, strict=True)
        if group is None and len(each.ranks) > 1
    }
    made = new_groups(missing)
    return [
        made.get(each.ranks) if group is None else group
        for each, group in zip(wanted, found, strict=True)
    ]


def _known(wanted: Wanted) -> dist.ProcessGroup | None:
    for group in wanted.known if len(wanted.ranks) > 1 else ():
        # Ascending too: torch sorts the ranks of every group that it makes.
        if group is not None and tuple(dist.get_process_group_ranks(group)) == wanted.ranks:
            return group
    return None


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
