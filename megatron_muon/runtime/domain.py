# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which ranks of the job exchange matrices, and what each of them holds.

Vocabulary:

==============  ================================================================================
shard group     ranks that the rows of a matrix are cut over
tensor group    tensor-parallel ranks, where their mode asks for the whole matrix
replica group   ranks that hold copies of the same shards: ZeRO-0, outer ranks of HSDP
domain          all ranks that are linked by these groups: they exchange matrices
==============  ================================================================================
"""

import datetime
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_muon.runtime.agreement import raise_where_any_rank_fails


@dataclass(frozen=True)
class Domain:
    """The ranks that exchange matrices with this one.

    Args:
        ranks: Ranks of the job, ascending.
        holders: Ranks that hold a shard, as ``holders[tensor_rank][shard]``.
        tensor_rank: Position of this rank in the tensor group.
        busy: Seconds each rank spends on other matrices.
        group: Their process group; None where this rank is alone.
    """

    ranks: tuple[int, ...]
    holders: tuple[tuple[tuple[int, ...], ...], ...]
    tensor_rank: int
    busy: dict[int, float]
    group: dist.ProcessGroup | None


def find_domain(
    shard_group: dist.ProcessGroup | None,
    tensor_group: dist.ProcessGroup | None,
    replica_group: dist.ProcessGroup | None,
    *,
    busy_seconds: float,
    device: torch.device,
) -> Domain:
    """Learn who holds what from the groups of all ranks.

    Args:
        shard_group: Ranks that rows are cut over; None where every rank holds whole matrices.
        tensor_group: Tensor-parallel ranks to join; None where each orthogonalizes its own block.
        replica_group: Ranks that hold copies; None where there are none.
        busy_seconds: Seconds this rank spends on other matrices.
        device: Where small tensors are exchanged (the backend's device).

    Raises:
        RuntimeError: On all ranks, when the groups do not form a grid.

    Communication: one all-gather of 64 bytes a rank, a flag and a gather of objects over all ranks
        of the job, and a new process group where none of the three is the domain.
    """
    groups = (tensor_group, shard_group, replica_group)
    mine = [dist.get_rank()]
    for group in groups:
        mine.append(dist.get_process_group_ranks(group)[0] if group is not None else mine[0])
        mine.append(dist.get_rank(group) if group is not None else 0)
    table = torch.empty(dist.get_world_size(), 8, dtype=torch.int64, device=device)
    row = torch.tensor([*mine, round(busy_seconds * 1e9)], dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(table.view(-1), row)
    rows = table.tolist()

    roots = list(range(len(rows)))

    def root(rank: int) -> int:
        """Return the rank that stands for all that are linked to this one."""
        while roots[rank] != rank:
            roots[rank] = roots[roots[rank]]
            rank = roots[rank]
        return rank

    for rank, *entries, _ in rows:
        for first in entries[0::2]:
            roots[root(rank)] = root(first)
    ranks = tuple(rank for rank in range(len(rows)) if root(rank) == root(mine[0]))
    cells: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in ranks:
        cells[rows[rank][2], rows[rank][4]].append(rank)
    num_tensor_ranks = 1 + max(tensor_rank for tensor_rank, _ in cells)
    num_shards = 1 + max(shard for _, shard in cells)
    problems = []
    if len(cells) != num_tensor_ranks * num_shards or len({len(c) for c in cells.values()}) > 1:
        problems.append(
            f"ranks {ranks[0]} to {ranks[-1]}: expected {num_tensor_ranks} tensor-parallel ranks x "
            f"{num_shards} shards x the same number of replicas, got {len(ranks)} ranks"
        )
    raise_where_any_rank_fails(
        problems, None, device, "Pass the process groups that the model was built with."
    )
    return Domain(
        ranks,
        tuple(
            tuple(tuple(cells[tensor_rank, shard]) for shard in range(num_shards))
            for tensor_rank in range(num_tensor_ranks)
        ),
        mine[2],
        {rank: rows[rank][7] * 1e-9 for rank in ranks},
        _group_of(ranks, groups),
    )


def _group_of(
    ranks: tuple[int, ...], groups: tuple[dist.ProcessGroup | None, ...]
) -> dist.ProcessGroup | None:
    known = {
        tuple(dist.get_process_group_ranks(group)): group for group in groups if group is not None
    }
    new = new_groups([ranks] if len(ranks) > 1 and ranks not in known else [])
    return None if len(ranks) == 1 else {**known, **new}[ranks]


def new_groups(sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make process groups; called by all ranks of the job together, each with what it is part of.

    Every rank takes part in making every group. ``use_local_synchronization`` would spare that, but
    names a group by how many the rank is in already: ranks that differ there would never meet.
    They have the timeout of the job's group (``--distributed-timeout-minutes``).

    Args:
        sets: Ranks of each group, ascending, this one among them.

    Returns:
        The groups, by their ranks.

    Communication: one gather of objects over the job.
    """
    rank = dist.get_rank()
    wanted: list[list[tuple[int, ...]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(wanted, [ranks for ranks in sets if ranks[0] == rank])
    made = {}
    for ranks in sorted({ranks for each in wanted for ranks in each}):
        group = dist.new_group(list(ranks), timeout=_job_timeout())
        if rank in ranks:
            made[ranks] = group
    return made


def _job_timeout() -> datetime.timedelta:
    """Read the timeout of the job's process group; torch gives new groups half an hour on gloo."""
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(world._device_types[0]).options._timeout
