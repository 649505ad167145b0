# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plans of jobs that are not running: from a model's shape, or from a map of its shards."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_muon.plan.assignment import Assignment, assign
from megatron_muon.plan.cost import CostModel, WireBytes
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.layout import MatrixLayout, RowLayout, whole_matrix
from megatron_muon.plan.preview.fsdp_buffer import unit_layouts
from megatron_muon.plan.preview.model_shape import ModelShape, Parameter

SHARDINGS = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclass(frozen=True)
class Planning:
    """How owners are chosen and work is cut; see :class:`ExchangeSettings`.

    Args:
        cost: Rates of the machine.
        wire: Bytes an element takes.
        objective: ``joint`` or ``balance``.
        max_parts: Ranks one matrix may be cut over.
        bucket_elements: Elements of a bucket that a rank owns, at most.
    """

    cost: CostModel
    wire: WireBytes
    objective: str = "joint"
    max_parts: int = 8
    bucket_elements: int = 2**27

    def assign(self, matrices: Sequence[MatrixLayout], busy: Mapping[int, float]) -> Assignment:
        """Choose owners."""
        return assign(
            matrices,
            self.cost,
            self.wire,
            objective=self.objective,
            max_parts=self.max_parts,
            busy=busy,
        )

    def plan(self, matrices: Sequence[MatrixLayout], assignment: Assignment) -> ExchangePlan:
        """Order the work."""
        return ExchangePlan(
            matrices, assignment, self.cost, self.wire, bucket_elements=self.bucket_elements
        )


@dataclass(frozen=True)
class Parallelism:
    """How a job is laid out; ranks count tensor first, then expert, then data parallelism.

    Args:
        dp: Data-parallel ranks, context parallelism included.
        tp: Tensor-parallel ranks.
        ep: Expert-parallel ranks.
        etp: Tensor-parallel ranks of an expert; 0 for ``tp``.
        pp: Pipeline stages; the first is planned.
        hsdp: Optimizer instances.
        sharding: Data-parallel sharding strategy.
        shards_outer: Whether optimizer shards are cut over instances too (HFSDP).
        joins_tensor_ranks: Whether blocks of tensor-parallel ranks are one matrix.

    Raises:
        ValueError: Sizes that do not divide.
    """

    dp: int
    tp: int = 1
    ep: int = 1
    etp: int = 0
    pp: int = 1
    hsdp: int = 1
    sharding: str = "optim_grads_params"
    shards_outer: bool = False
    joins_tensor_ranks: bool = False

    def __post_init__(self) -> None:
        """Check that sizes are positive and divide."""
        sizes = {"dp": self.dp, "tp": self.tp, "ep": self.ep, "pp": self.pp, "hsdp": self.hsdp}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name}: expected a positive number, got {value}.")
        for name, size, ways in (
            ("hsdp", self.dp, self.hsdp),
            ("ep", self.stage_size, self.expert_tp * self.ep * self.hsdp),
        ):
            if size % ways:
                raise ValueError(
                    f"{name}: expected {size} ranks to be a multiple of {ways}, which they are "
                    "not. Choose sizes that divide."
                )

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.dp * self.tp

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks of an expert."""
        return self.etp or self.tp

    @property
    def expert_dp(self) -> int:
        """Data-parallel ranks of an expert."""
        return self.stage_size // (self.expert_tp * self.ep)

    def num_shards(self, num_ranks: int) -> int:
        """Return over how many of so many data-parallel ranks a buffer is cut."""
        if self.sharding == "no_shard":
            return 1
        return num_ranks if self.shards_outer else num_ranks // self.hsdp

    def holders(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Group data-parallel ranks by the shard they hold.

        Args:
            ranks: Ranks of the job, by data-parallel rank.
        """
        if self.sharding == "no_shard":
            return [tuple(ranks)]
        inner = len(ranks) // self.hsdp
        if self.shards_outer:
            # Inner ranks first: shard i lies on inner rank i // outer of outer rank i % outer.
            return [(ranks[i % self.hsdp * inner + i // self.hsdp],) for i in range(len(ranks))]
        return [tuple(ranks[i::inner]) for i in range(inner)]


@dataclass(frozen=True)
class Simulation:
    """Plans of all domains of a job.

    Args:
        world_size: Ranks of the job, or of one pipeline stage.
        plans: One for each set of ranks that exchange matrices.
    """

    world_size: int
    plans: tuple[ExchangePlan, ...]


def simulate(
    model: ModelShape, parallel: Parallelism, planning: Planning, *, splits_qkv: bool = True
) -> Simulation:
    """Plan a model as a live run would: experts first, dense matrices fill what they leave.

    Args:
        model: Its matrices.
        parallel: How the job is laid out.
        planning: How owners are chosen.
        splits_qkv: Whether query, key and value are orthogonalized apart.

    Raises:
        ValueError: Experts or layers do not divide.
    """
    if model.num_experts % parallel.ep or (parallel.ep > 1 and not model.num_experts):
        raise ValueError(
            f"ep: expected a divisor of {model.num_experts} experts, got {parallel.ep}."
        )
    layers = range(-(-model.num_layers // parallel.pp))
    plans: list[ExchangePlan] = []
    busy = dict.fromkeys(range(parallel.stage_size), 0.0)
    for is_expert in (True, False):
        units = [
            model.expert_parameters(layer, model.num_experts // parallel.ep)
            if is_expert
            else model.dense_parameters(layer, splits_qkv=splits_qkv)
            for layer in layers
        ]
        # Domains of one kind that lie alike over nodes get alike assignments: one is worked out.
        known: dict[Any, tuple[list[int], Assignment]] = {}
        for grid in _grids(parallel, is_expert) if any(units) else ():
            matrices = _matrices(units, grid, parallel)
            ranks = sorted(rank for row in grid for rank in row)
            nodes = [planning.cost.node(rank) for rank in ranks]
            key = tuple((nodes.index(n), busy[r]) for n, r in zip(nodes, ranks, strict=True))
            if key not in known:
                known[key] = (ranks, planning.assign(matrices, busy))
            plans.append(planning.plan(matrices, _moved(*known[key], ranks)))
        for plan in plans:
            busy.update(plan.assignment.load)
    return Simulation(parallel.stage_size, tuple(plans))


def _moved(ranks: Sequence[int], assignment: Assignment, targets: Sequence[int]) -> Assignment:
    """Rename the ranks of an assignment."""
    target_of = dict(zip(ranks, targets, strict=True))
    return Assignment(
        tuple(tuple(target_of[rank] for rank in owners) for owners in assignment.owners),
        {target_of[rank]: load for rank, load in assignment.load.items()},
        assignment.ideal,
    )


def _grids(parallel: Parallelism, is_expert: bool) -> list[list[list[int]]]:
    """List the domains, each as ``ranks[tensor_rank][data_parallel_rank]``."""
    if not is_expert:
        grid = [
            [tensor + parallel.tp * data for data in range(parallel.dp)]
            for tensor in range(parallel.tp)
        ]
        return [grid] if parallel.joins_tensor_ranks else [[row] for row in grid]
    grids = []
    for expert in range(parallel.ep):
        grid = [
            [
                tensor + parallel.expert_tp * (expert + parallel.ep * data)
                for data in range(parallel.expert_dp)
            ]
            for tensor in range(parallel.expert_tp)
        ]
        grids += [grid] if parallel.joins_tensor_ranks else [[row] for row in grid]
    return grids


def _matrices(
    units: Sequence[Sequence[Parameter]], grid: Sequence[Sequence[int]], parallel: Parallelism
) -> list[MatrixLayout]:
    matrices = []
    num_tensor_ranks = parallel.expert_tp if ".experts." in _first_name(units) else parallel.tp
    holders = [parallel.holders(ranks) for ranks in grid]
    domain = tuple(sorted(rank for ranks in grid for rank in ranks))
    for layer, parameters in enumerate(units):
        shapes = tuple(_local_shape(each, num_tensor_ranks) for each in parameters)
        layouts = _cached_layouts(shapes, parallel.num_shards(len(grid[0])))
        for parameter, layout in zip(parameters, layouts, strict=True):
            if layout is None:
                continue
            is_joined = len(grid) > 1 and parameter.partition_dim is not None
            for ranks in [holders] if is_joined else [[each] for each in holders]:
                matrices.append(
                    whole_matrix(
                        f"decoder.layers.{layer}.{parameter.name}",
                        layout,
                        ranks,
                        partition_dim=parameter.partition_dim if is_joined else None,
                        split_shapes=parameter.split_shapes,
                        domain=domain if is_joined or len(grid) == 1 else None,
                    )
                )
    return matrices


def _first_name(units: Sequence[Sequence[Parameter]]) -> str:
    return next((each.name for unit in units for each in unit), "")


def _local_shape(parameter: Parameter, num_tensor_ranks: int) -> tuple[int, ...]:
    shape = list(parameter.shape)
    if parameter.partition_dim is not None:
        size = shape[parameter.partition_dim]
        if size % num_tensor_ranks:
            raise ValueError(
                f"{parameter.name}: expected {size} rows or columns to be a multiple of "
                f"{num_tensor_ranks} tensor-parallel ranks. Choose another --tp."
            )
        shape[parameter.partition_dim] = size // num_tensor_ranks
    return tuple(shape)


@lru_cache(maxsize=64)
def _cached_layouts(shapes: tuple[tuple[int, ...], ...], num_shards: int) -> list[RowLayout | None]:
    return unit_layouts(shapes, num_shards) if shapes else []


def read_shard_map(path: Path) -> tuple[int, list[MatrixLayout]]:
    """Read which rank holds how many rows of each matrix from a JSON file.

    The file holds ``{"world_size": W, "matrices": [{"group": [ranks in shard order], "cols": C,
    "rows": {rank: local rows}, ...}]}``; ranks that hold nothing may be left out of ``rows``, and
    ``"fqn"`` or ``"param"`` names the matrix.

    Returns:
        The number of ranks, and the layouts in the file's order.

    Raises:
        ValueError: The file is not such a map, or a rank is out of range.
    """
    try:
        data = json.loads(path.read_text())
        world_size = int(data["world_size"])
        matrices = [
            _read_matrix(index, entry, world_size) for index, entry in enumerate(data["matrices"])
        ]
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f'{path}: expected {{"world_size": W, "matrices": [{{"group", "cols", "rows"}}]}}, '
            f"got something else ({type(error).__name__}: {error}). See python -m "
            "megatron_muon.plan --help."
        ) from error
    if not matrices:
        raise ValueError(f"{path}: expected at least one matrix, got none.")
    return world_size, matrices


def _read_matrix(index: int, entry: Mapping[str, Any], world_size: int) -> MatrixLayout:
    name = str(entry.get("fqn", f"matrix {index} (param {entry.get('param', index)})"))
    group, cols = [int(rank) for rank in entry["group"]], int(entry["cols"])
    rows = {int(rank): int(count) for rank, count in entry["rows"].items()}
    strangers = sorted(rank for rank in rows if rank not in group)
    strangers += [rank for rank in group if not 0 <= rank < world_size]
    if strangers or cols < 1 or sum(rows.values()) < 1 or min(rows.values()) < 0:
        raise ValueError(
            f"{name}: expected rows on ranks of its group, below {world_size}, got {strangers}, "
            f"row counts {sorted(rows.values())[:4]} or {cols} columns. Correct the shard map."
        )
    shards, start = [], 0
    for rank in group:
        shards.append((start, start + rows.get(rank, 0)))
        start += rows.get(rank, 0)
    layout = RowLayout(start, cols, tuple(shards))
    return whole_matrix(name, layout, [[(rank,) for rank in group]])


def simulate_shard_map(path: Path, planning: Planning) -> Simulation:
    """Plan the job that a shard map describes, all its domains at once."""
    world_size, matrices = read_shard_map(path)
    busy = dict.fromkeys(range(world_size), 0.0)
    plan = planning.plan(matrices, planning.assign(matrices, busy))
    return Simulation(world_size, (plan,))
