# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters by plan: those of one domain with the same replicas share one."""

import functools
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.distributed.tensor.placement_types import Placement

from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.rows.matrices import RowIndex, matrices_of
from megatron_muon.rows.parameters import PlannedParameter, replicas_of
from megatron_muon.rows.placements import cutting_axes
from megatron_muon.runtime.agreement import own_rank, raise_where_any_rank_fails
from megatron_muon.runtime.engine_builder import PlanInput
from megatron_muon.runtime.groups import (
    Domain,
    new_groups,
    num_ranks_on_node,
    ranks_of,
    ranks_per_node,
)

_ADVICE = (
    "Build the optimizer with the same parameters on all ranks of a mesh. No optimizer was built."
)


class _Key(NamedTuple):
    """What parameters of one plan have in common; plans are ordered by it.

    Every rank sorts its plans by it: ranks that share several make their collectives in the same
    order. Small domains come first. Matrices of large ones fill the ranks that these leave idle.
    """

    num_ranks: int
    ranks: tuple[int, ...]
    # Sets of ranks that hold the same rows, and all-gather results: the same for all matrices of a
    # plan.
    replicas: tuple[tuple[int, ...], ...]


class _Facts(NamedTuple):
    """What a rank sends to all others at construction.

    Args:
        num_ranks_on_node: Ranks that the launcher started beside it.
        keys: Checksums of the keys of its plans.
        groups: Names of the process groups that it knows, by a checksum of their ranks.
        steps_with: A checksum of the ranks that it steps together with; None for all of them.
        has_any: Whether it has parameters, planned or not.
    """

    num_ranks_on_node: int
    keys: tuple[int, ...]
    groups: Mapping[int, Sequence[str]]
    steps_with: int | None
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
    group: dist.ProcessGroup | None,
    device: torch.device,
    *,
    has_others: bool = False,
    known_groups: Sequence[dist.ProcessGroup] = (),
) -> PlanInputs:
    """Sort parameters by plan, and make their process groups; called by all ranks together.

    Args:
        parameters: Of this rank, checked; it may have none.
        group: Ranks that step together; None for all that have parameters.
        device: Where a flag is reduced.
        has_others: Whether this rank steps parameters that are not planned.
        known_groups: Groups of the model beside those of its meshes.

    Raises:
        RuntimeError: On all ranks, when ranks of a domain have other plans or do not step together,
            or boxes do not tile a parameter.

    Communication: two gathers of objects over the job, two flags, and a new process group for each
        domain, each set of replicas, and the ranks with parameters, where they have none yet.
    """
    keys = [_key(parameter.view) for parameter in parameters]
    known = _known_groups(parameters, known_groups)
    facts = _gather_facts(keys, known, group, has_others)
    # Before any collective of a plan: a rank that lacks it would never join.
    problems = _missing_parameters(parameters, keys, facts)
    problems += _not_together(parameters, keys, group, facts)
    raise_where_any_rank_fails(problems, None, device, _ADVICE)
    by_key: dict[_Key, list[PlannedParameter]] = defaultdict(list)
    for key, parameter in zip(keys, parameters, strict=True):
        by_key[key].append(parameter)
    # Ranks without parameters have nothing to step, and nothing to agree on.
    with_parameters = tuple(rank for rank, each in enumerate(facts) if each.has_any)
    groups = _groups(by_key, with_parameters if group is None else (), known, facts)
    nodes = ranks_per_node([each.num_ranks_on_node for each in facts])
    inputs, problems = [], []
    if group is None and len(with_parameters) < len(facts):
        group = groups.get(with_parameters)
    # Sorted by what all ranks of a domain know: ranks that share several plans make their
    # collectives in the same order.
    for key in sorted(by_key):
        try:
            inputs.append(_plan_input(key, by_key[key], groups, nodes))
        # Boxes that do not tile a matrix. Raised here, other ranks would wait.
        except ValueError as error:
            problems.append(str(error))
    raise_where_any_rank_fails(problems, None, device, _ADVICE)
    of_plans = [by_key[key] for key in sorted(by_key)]
    return PlanInputs(inputs, of_plans, max(len(each.keys) for each in facts), group)


def _gather_facts(
    keys: Sequence[_Key],
    known: Mapping[tuple[int, ...], Sequence[dist.ProcessGroup]],
    group: dist.ProcessGroup | None,
    has_others: bool,
) -> list[_Facts]:
    """Gather what all ranks know, by rank."""
    mine = _Facts(
        num_ranks_on_node(),
        tuple(_checksum(key) for key in dict.fromkeys(keys)),
        {
            _checksum(ranks): [str(each.group_name) for each in groups]
            for ranks, groups in known.items()
        },
        None if group is None else _checksum(ranks_of(group)),
        has_others or bool(keys),
    )
    if not dist.is_initialized():
        return [mine]
    facts = [mine] * dist.get_world_size()
    dist.all_gather_object(facts, mine)
    return facts


@functools.lru_cache(maxsize=256)
def _checksum(key: tuple[Any, ...]) -> int:
    # Keys may name thousands of ranks: ranks exchange checksums of them.
    return zlib.crc32(repr(tuple(key)).encode())


def _missing_parameters(
    parameters: Sequence[PlannedParameter], keys: Sequence[_Key], facts: Sequence[_Facts]
) -> list[str]:
    """List the plans whose parameters other ranks lack, as sentences."""
    problems = []
    for key in dict.fromkeys(keys):
        checksum = _checksum(key)
        lacking = [rank for rank in key.ranks if checksum not in facts[rank].keys]
        if lacking:
            name = parameters[keys.index(key)].name
            problems.append(
                f"{name}: expected a parameter of its mesh and placements on all of ranks "
                f"{key.ranks[0]} to {key.ranks[-1]}, got none on ranks {lacking[:8]}"
            )
    return problems


def _not_together(
    parameters: Sequence[PlannedParameter],
    keys: Sequence[_Key],
    group: dist.ProcessGroup | None,
    facts: Sequence[_Facts],
) -> list[str]:
    """List the plans whose ranks do not step together, as sentences."""
    own = facts[own_rank()].steps_with
    members = None if group is None else set(ranks_of(group))
    problems = []
    for key in dict.fromkeys(keys):
        # A rank alone would raise while others wait for it in the exchange.
        is_together = members is None or members.issuperset(key.ranks)
        if not is_together or any(facts[rank].steps_with != own for rank in key.ranks):
            problems.append(
                f"{parameters[keys.index(key)].name}: expected ranks {key.ranks[0]} to "
                f"{key.ranks[-1]}, which exchange it, in one group of ranks that step together, "
                "got others. Pass a group of all of them, or none"
            )
    return problems


def _key(param: torch.Tensor) -> _Key:
    if isinstance(param, DTensor):
        return _key_of(param.device_mesh, param.placements, tuple(param.shape))
    return _Key(1, (own_rank(),), ((own_rank(),),))


# Many layers have few keys, and a key may name thousands of ranks.
@functools.lru_cache(maxsize=256)
def _key_of(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> _Key:
    ranks = _domain(mesh, placements, shape)
    members = set(ranks)
    replicas = [each for each in replicas_of(mesh, placements) if not members.isdisjoint(each)]
    return _Key(len(ranks), ranks, tuple(sorted(replicas)))


def _domain(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the ranks that exchange matrices of a parameter, ascending.

    An axis of the mesh that shards whole matrices of a batch evenly needs no exchange: its ranks
    plan separately. That keeps plans small if there are many experts.
    """
    # Of a mesh of thousands of ranks only the slice through this rank is looked at.
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # a rank outside of the mesh has no such parameter
    index: list[slice | int] = [slice(None)] * mesh.ndim
    num_matrices = shape[0]
    for axis in cutting_axes(placements, 0) if len(shape) == 3 else ():
        # Uneven, one rank would have a matrix more than another; sharing them evens that out. What
        # the axes behind it cut is uneven too.
        if num_matrices % mesh.size(axis):
            break
        num_matrices //= mesh.size(axis)
        index[axis] = coordinate[axis]
    return tuple(sorted(mesh.mesh[tuple(index)].flatten().tolist()))


def _known_groups(
    parameters: Sequence[PlannedParameter], known_groups: Sequence[dist.ProcessGroup]
) -> dict[tuple[int, ...], list[dist.ProcessGroup]]:
    """Return the groups of the job and of all axes of meshes, by their ranks, ascending.

    A communicator of NCCL takes hundreds of megabytes of a GPU: those that exist are used again.
    """
    if not dist.is_initialized():
        return {}
    world = dist.group.WORLD
    assert world is not None
    known = {tuple(range(dist.get_world_size())): [world]}
    meshes = {p.view.device_mesh: None for p in parameters if isinstance(p.view, DTensor)}
    of_meshes = [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim)]
    for each in dict.fromkeys([*known_groups, *of_meshes]):
        known.setdefault(ranks_of(each), []).append(each)
    return known


def _groups(
    keys: Mapping[_Key, object],
    stepping: tuple[int, ...],
    known: Mapping[tuple[int, ...], Sequence[dist.ProcessGroup]],
    facts: Sequence[_Facts],
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Choose a group for each domain and each set of replicas, and make those that are missing.

    Args:
        keys: Of the plans of this rank.
        stepping: Ranks that step together, if they need a group of their own.
        known: Groups that this rank knows, by their ranks.
        facts: Of all ranks.
    """
    # new_groups() is a collective of the job: called once per plan it would hang if ranks have
    # different numbers of plans.
    wanted = {key.ranks for key in keys} | {_own_replicas(key) for key in keys}
    wanted.add(stepping)
    chosen: dict[tuple[int, ...], dist.ProcessGroup] = {}
    missing = set()
    for ranks in wanted:
        # A rank alone exchanges nothing. Flags need a group all the same: None is all ranks.
        if own_rank() not in ranks or (len(ranks) == 1 and ranks != stepping):
            continue
        # Two meshes may have a group each of the same ranks, and a rank may know one of them alone:
        # all take the first by name of those that all know.
        shared = set.intersection(*(set(facts[r].groups.get(_checksum(ranks), ())) for r in ranks))
        by_name = {str(each.group_name): each for each in known.get(ranks, ())}
        if shared:
            chosen[ranks] = by_name[min(shared)]
        else:
            missing.add(ranks)
    return {**chosen, **new_groups(missing)}


def _own_replicas(key: _Key) -> tuple[int, ...]:
    (replicas,) = (ranks for ranks in key.replicas if own_rank() in ranks)
    return replicas


def _plan_input(
    key: _Key,
    parameters: Sequence[PlannedParameter],
    groups: Mapping[tuple[int, ...], dist.ProcessGroup],
    nodes: int | None,
) -> PlanInput:
    matrices: list[MatrixLayout] = []
    handles: dict[int, RowIndex] = {}
    params: list[torch.Tensor] = []
    for parameter in parameters:
        for matrix, rows in matrices_of(parameter, key.ranks, own_rank()):
            # By position in the list, which is the same on all ranks of the domain.
            if rows is not None:
                handles[len(matrices)] = rows
            matrices.append(matrix)
            params.append(parameter.param)
    replicas = _own_replicas(key)
    return PlanInput(
        Domain(key.ranks, None if key.num_ranks == 1 else groups[key.ranks], nodes),
        matrices,
        handles,
        groups[replicas] if len(replicas) > 1 else None,
        params,
    )
