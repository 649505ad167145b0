# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters by plan: one plan per domain and set of replicas."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor

from megatron_muon.plan.layout import MatrixLayout, Ranks
from megatron_muon.rows.matrices import RowIndex, matrices_of
from megatron_muon.rows.parameters import Placements, PlannedParameter, cutting_axes, replicas_of
from megatron_muon.runtime.agreement import (
    Domain,
    gather_objects,
    new_groups,
    num_ranks_on_node,
    own_rank,
    raise_where_any_rank_fails,
    ranks_of,
    ranks_per_node,
)
from megatron_muon.runtime.plan_runner import PlanInput

type Groups = dict[Ranks, dist.ProcessGroup]

_ADVICE = (
    "Build the optimizer with the same parameters on all ranks of a mesh. No optimizer was built."
)


class _Key(NamedTuple):
    """Ranks and replicas that all parameters of one plan share.

    Args:
        ranks: Ranks that exchange matrices, ascending.
        replicas: Sets of ranks that hold the same rows, and all-gather results.
    """

    ranks: Ranks
    replicas: tuple[Ranks, ...]


class _PlanFacts(NamedTuple):
    """Facts that a rank sends to all others at construction; hashes are of integers alone.

    Args:
        num_ranks_on_node: Ranks that the launcher started on its node.
        keys: Hashes of the keys of its plans; a key may name thousands of ranks.
        groups: Known process groups: the hash of their ranks, and their name.
        has_any: Whether it has parameters, planned or not.
    """

    num_ranks_on_node: int
    keys: set[int]
    groups: set[tuple[int, str]]
    has_any: bool


class PlanInputs(NamedTuple):
    """The plan inputs of this rank, in the order that all ranks share.

    Args:
        inputs: One per plan.
        parameters: By plan, its parameters in the order of their matrices.
        max_num_plans: Maximum number of plans of any rank.
        group: Ranks that step together; None for all ranks of the job.
    """

    inputs: list[PlanInput]
    parameters: list[list[PlannedParameter]]
    max_num_plans: int
    group: dist.ProcessGroup | None


def find_plan_inputs(
    parameters: Sequence[PlannedParameter],
    device: torch.device,
    *,
    has_others: bool = False,
    known_groups: Sequence[dist.ProcessGroup] = (),
) -> PlanInputs:
    """Sort parameters by plan, and make their process groups; called by all ranks together.

    Args:
        parameters: Checked parameters of this rank, maybe none.
        device: Where a flag is reduced.
        has_others: Whether this rank steps parameters that are not planned.
        known_groups: Process groups of the model beside its meshes'.

    Raises:
        RuntimeError: On all ranks, when ranks of a domain have other plans, or boxes do not tile a
            parameter.

    Communication: two gathers of objects over the job, two flags, and a new process group per
        domain, per set of replicas, and for the ranks with parameters, unless one exists.
    """
    by_key: dict[_Key, list[PlannedParameter]] = defaultdict(list)
    for parameter in parameters:
        by_key[_key(parameter.view)].append(parameter)
    known = _known_groups(parameters, known_groups)
    mine = _PlanFacts(
        num_ranks_on_node(),
        {hash(key) for key in by_key},
        {(hash(ranks_of(g)), str(g.group_name)) for g in known},
        has_others or bool(parameters),
    )
    facts = gather_objects(mine)
    # Before any collective of a plan: a rank that lacks it would never join.
    errors = []
    for key, planned in by_key.items():
        # Once: a key may name thousands of ranks.
        own_hash = hash(key)
        if lacking := [rank for rank in key.ranks if own_hash not in facts[rank].keys]:
            errors.append(
                f"{planned[0].name}: expected a parameter of its mesh and placements on all "
                f"{len(key.ranks)} ranks of its mesh, {key.ranks[0]} to {key.ranks[-1]}, got none "
                f"on ranks {lacking[:8]}"
            )
    raise_where_any_rank_fails(errors, None, device, _ADVICE)
    # Ranks without parameters have nothing to step, and nothing to agree on.
    stepping = tuple(rank for rank, fact in enumerate(facts) if fact.has_any)
    groups = _groups(by_key, stepping, known, facts)
    group = groups.get(stepping) if len(stepping) < len(facts) else None
    nodes = ranks_per_node([fact.num_ranks_on_node for fact in facts])
    # Ranks that share several plans make their collectives in this order.
    plans = sorted(by_key.items(), key=lambda item: (len(item[0].ranks), item[0]))
    inputs = []
    for key, planned in plans:
        try:
            inputs.append(_plan_input(key, planned, groups, nodes))
        # Wrong split sizes or boxes. If this rank raised here, others would wait.
        except ValueError as error:
            errors.append(str(error))
    raise_where_any_rank_fails(errors, None, device, "No optimizer was built.")
    max_num_plans = max(len(fact.keys) for fact in facts)
    return PlanInputs(inputs, [planned for _, planned in plans], max_num_plans, group)


def _key(param: torch.Tensor) -> _Key:
    if isinstance(param, DTensor):
        return _key_of(param.device_mesh, param.placements, tuple(param.shape))
    return _Key((own_rank(),), ((own_rank(),),))


# Many layers have few keys, and a key may name thousands of ranks.
@functools.lru_cache(maxsize=256)
def _key_of(mesh: DeviceMesh, placements: Placements, shape: tuple[int, ...]) -> _Key:
    """Return the ranks that exchange matrices of a parameter, and their replicas.

    An axis of the mesh that shards whole matrices of a batch evenly needs no exchange: its ranks
    plan separately. That keeps plans small if there are many experts.
    """
    # Only the slice through this rank: a mesh may have thousands of ranks.
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # a rank outside of the mesh has no such parameter
    index: list[slice | int] = [slice(None)] * mesh.ndim
    num_matrices = shape[0]
    for axis in cutting_axes(placements, 0) if len(shape) == 3 else ():
        # If they do not divide, one rank would have a matrix more than another, unless the ranks
        # plan together. Shards of later axes are uneven too.
        if num_matrices % mesh.size(axis):
            break
        num_matrices //= mesh.size(axis)
        index[axis] = coordinate[axis]
    ranks = set(mesh.mesh[tuple(index)].flatten().tolist())
    replicas = [r for r in replicas_of(mesh, placements) if not ranks.isdisjoint(r)]
    return _Key(tuple(sorted(ranks)), tuple(sorted(replicas)))


def _known_groups(
    parameters: Sequence[PlannedParameter], known_groups: Sequence[dist.ProcessGroup]
) -> list[dist.ProcessGroup]:
    """Return the process groups of the job, of the model, and of all axes of meshes.

    A communicator of NCCL takes hundreds of megabytes of a GPU: existing ones are used again.
    """
    if not dist.is_initialized():
        return []
    meshes = {p.view.device_mesh: None for p in parameters if isinstance(p.view, DTensor)}
    mesh_groups = itertools.chain(*(mesh.get_all_groups() for mesh in meshes))
    return [dist.group.WORLD, *known_groups, *mesh_groups]  # type: ignore[list-item]


def _groups(
    keys: Iterable[_Key],
    stepping: Ranks,
    known: Sequence[dist.ProcessGroup],
    facts: Sequence[_PlanFacts],
) -> Groups:
    """Choose a process group per domain and per set of replicas, and make the missing ones.

    Args:
        keys: Keys of the plans of this rank.
        stepping: Ranks that step together.
        known: Process groups that this rank knows.
        facts: Facts of all ranks.
    """
    needed = {ranks for key in keys for ranks in (key.ranks, _own_replicas(key)) if len(ranks) > 1}
    # A group of one rank exchanges nothing, but reduces flags: None is all ranks.
    if own_rank() in stepping:
        needed.add(stepping)
    chosen: Groups = {}
    for ranks in needed:
        # Several meshes may have a group of the same ranks, and a rank may know one of them alone:
        # all take the first, by name, that all know.
        shared = set.intersection(*(facts[rank].groups for rank in ranks))
        if names := [name for hashed, name in shared if hashed == hash(ranks)]:
            chosen[ranks] = next(g for g in known if g.group_name == min(names))
    # One collective of the job for all plans: ranks may have different numbers of plans, and a call
    # per plan would hang.
    return {**chosen, **new_groups(needed - chosen.keys())}


def _own_replicas(key: _Key) -> Ranks:
    (replicas,) = (ranks for ranks in key.replicas if own_rank() in ranks)
    return replicas


def _plan_input(
    key: _Key,
    parameters: Sequence[PlannedParameter],
    groups: Groups,
    nodes: int | None,
) -> PlanInput:
    matrices: list[MatrixLayout] = []
    handles: dict[int, RowIndex] = {}
    params: list[torch.Tensor] = []
    for parameter in parameters:
        for matrix, rows in matrices_of(parameter, key.ranks, own_rank()):
            # Keys are positions in the list, the same on all ranks of the domain.
            if rows is not None:
                handles[len(matrices)] = rows
            matrices.append(matrix)
            params.append(parameter.param)
    replicas = _own_replicas(key)
    return PlanInput(
        Domain(key.ranks, groups[key.ranks] if len(key.ranks) > 1 else None, nodes),
        matrices,
        handles,
        groups[replicas] if len(replicas) > 1 else None,
        params,
    )
