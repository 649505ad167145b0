# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which ranks of the job exchange matrices, and the rows that they hold.

Three groups link ranks: the shard group (a parameter's rows are sharded over it), the tensor group
(tensor-parallel ranks, where their mode asks for the whole matrix) and the replica group (ranks
that hold the same rows: ZeRO-0, outer ranks of HSDP). The ranks that are linked, over any number of
groups, are one domain. They form a grid: tensor ranks x shards x replicas.
"""

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_muon.runtime.agreement import raise_where_any_rank_fails
from megatron_muon.runtime.groups import Wanted, find_groups

type Holders = tuple[tuple[tuple[int, ...], ...], ...]


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


@dataclass(frozen=True)
class Grid(Domain):
    """A domain whose ranks form a grid.

    Args:
        ranks: See :class:`Domain`.
        group: See there.
        ranks_per_node: See there.
        holders: Ranks that hold a shard, as ``holders[tensor_rank][shard]``.
        tensor_rank: Position of this rank in the tensor group.
    """

    holders: Holders
    tensor_rank: int


class _Row(NamedTuple):
    """What a rank sends to the others, as int64 numbers in one all-gather.

    A group is named by its first rank; beside it stands this rank's position in the group.
    """

    rank: int
    first_of_tensor_group: int
    tensor_rank: int
    first_of_shard_group: int
    shard: int
    first_of_replica_group: int
    replica: int
    num_ranks_on_node: int  # 0 where the launcher did not say


def find_grid(
    shard_group: dist.ProcessGroup | None,
    tensor_group: dist.ProcessGroup | None,
    replica_group: dist.ProcessGroup | None,
    holder_group: dist.ProcessGroup | None = None,
    *,
    device: torch.device,
) -> Grid:
    """Derive the holders of all shards from the groups of all ranks.

    Args:
        shard_group: Ranks that rows are sharded over; None where every rank holds all rows.
        tensor_group: Tensor-parallel ranks to join; None if they have separate matrices.
        replica_group: Ranks that hold the same rows; None where there are none.
        holder_group: Shards x replicas, where the model has a group of them.
        device: Where small tensors are exchanged (the backend's device).

    Raises:
        RuntimeError: On all ranks, when the groups do not form a grid.

    Communication: one all-gather of 64 bytes a rank, a flag and a gather of objects over all ranks
        of the job, and a new process group where no group that exists is the domain.
    """
    groups = (tensor_group, shard_group, replica_group)
    mine = [dist.get_rank()]
    for group in groups:
        mine.append(dist.get_process_group_ranks(group)[0] if group is not None else mine[0])
        mine.append(dist.get_rank(group) if group is not None else 0)
    mine.append(num_ranks_on_node())
    own_row = torch.tensor(mine, dtype=torch.int64, device=device)
    table = own_row.new_empty(dist.get_world_size(), len(_Row._fields))
    dist.all_gather_into_tensor(table.view(-1), own_row)
    rows = [_Row(*row) for row in table.tolist()]

    ranks = _linked_ranks(rows, dist.get_rank())
    holders: Holders = ()
    problems = []
    try:
        holders = _grid(rows, ranks)
        _check_replica_group(holders, replica_group)
    except ValueError as error:
        problems.append(str(error))
    # Ranks of other domains may be fine: all of them stop together.
    raise_where_any_rank_fails(
        problems, None, device, "Pass the process groups that the model was built with."
    )
    return Grid(
        ranks=ranks,
        holders=holders,
        tensor_rank=rows[dist.get_rank()].tensor_rank,
        # The first one with these ranks: groups of the model are in use, and so connected.
        group=find_groups([Wanted(ranks, (*groups, dist.group.WORLD, holder_group))])[0],
        ranks_per_node=ranks_per_node([row.num_ranks_on_node for row in rows]),
    )


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


def _linked_ranks(rows: Sequence[_Row], rank: int) -> tuple[int, ...]:
    """Return the ranks that are linked to a rank over any number of groups, ascending.

    A union-find: every rank points towards the one that represents all it is linked to.
    """
    parents = list(range(len(rows)))

    def root(member: int) -> int:
        """Return the rank that represents all that are linked to this one."""
        while parents[member] != member:
            # Halving the path on the way keeps it short.
            parents[member] = parents[parents[member]]
            member = parents[member]
        return member

    for row in rows:
        for first in (
            row.first_of_tensor_group,
            row.first_of_shard_group,
            row.first_of_replica_group,
        ):
            parents[root(row.rank)] = root(first)
    return tuple(member for member in range(len(rows)) if root(member) == root(rank))


def _grid(rows: Sequence[_Row], ranks: Sequence[int]) -> Holders:
    """Sort linked ranks into ``holders[tensor_rank][shard]``.

    Raises:
        ValueError: They form no grid.
    """
    cells: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank in ranks:
        cells[rows[rank].tensor_rank, rows[rank].shard].append(rank)
    num_tensor_ranks = 1 + max(tensor_rank for tensor_rank, _ in cells)
    num_shards = 1 + max(shard for _, shard in cells)
    # Every cell must be there, with the same number of replicas.
    if len(cells) != num_tensor_ranks * num_shards or len(set(map(len, cells.values()))) > 1:
        raise ValueError(
            f"ranks {ranks[0]} to {ranks[-1]}: expected {num_tensor_ranks} tensor-parallel ranks x "
            f"{num_shards} shards x the same number of replicas, got {len(ranks)} ranks"
        )
    return tuple(
        tuple(tuple(cells[tensor_rank, shard]) for shard in range(num_shards))
        for tensor_rank in range(num_tensor_ranks)
    )


def _check_replica_group(holders: Holders, replica_group: dist.ProcessGroup | None) -> None:
    """Check that this rank's replica group has the ranks that hold its rows."""
    rank = dist.get_rank()
    (replicas,) = (cell for shards in holders for cell in shards if rank in cell)
    found = tuple(dist.get_process_group_ranks(replica_group)) if replica_group else (rank,)
    if found != replicas:
        raise ValueError(
            f"rank {rank}: expected the replica group to be the ranks with its shard, {replicas}, "
            f"got {found}"
        )
