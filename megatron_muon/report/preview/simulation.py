# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plans of jobs that are not running: from a model's shape."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.exchange_plan import (
    ExchangePlan,
    plan_matrices,
    staging_problem,
    staging_share,
)
from megatron_muon.plan.layout import (
    Box,
    MatrixLayout,
    OutputSlice,
    RowRange,
    holders_of_segments,
    rows_in_buffer,
    tile,
)
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.plan.splits import Splits
from megatron_muon.plan.wire import Wire
from megatron_muon.report.preview.fsdp_buffer import unit_buffer
from megatron_muon.report.preview.model_shape import ModelShape, Parameter
from megatron_muon.report.rank_report import Report, build_report

Sharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True)
class Machine:
    """What a live run would learn from its flags and its device.

    Args:
        cost: Rates of the machine.
        wire: Dtypes of rows and results.
    """

    cost: CostModel = field(default_factory=CostModel)
    wire: Wire = field(default_factory=lambda: Wire("bfloat16", "bfloat16"))


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
        shards_outer: Whether optimizer states are sharded over instances too (HFSDP).
        joins_tensor_ranks: Whether tensor-parallel ranks orthogonalize one joined matrix.

    Raises:
        ValueError: Sizes that do not divide.
    """

    dp: int
    tp: int = 1
    ep: int = 1
    etp: int = 0
    pp: int = 1
    hsdp: int = 1
    sharding: Sharding = "optim_grads_params"
    shards_outer: bool = False
    joins_tensor_ranks: bool = False

    def __post_init__(self) -> None:
        """Check that sizes are positive and divide."""
        sizes = {"dp": self.dp, "tp": self.tp, "ep": self.ep, "pp": self.pp, "hsdp": self.hsdp}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(
                    f"{name}: expected a positive number, got {value}. Pass 1 or more."
                )
        if self.dp % self.hsdp:
            raise ValueError(
                f"hsdp: expected dp to be a multiple of {self.hsdp} instances, got dp {self.dp}. "
                "Choose sizes that divide."
            )
        expert_ranks = self.expert_tp * self.ep * self.hsdp
        if self.stage_size % expert_ranks:
            raise ValueError(
                f"ep: expected dp x tp to be a multiple of {expert_ranks} (etp x ep x hsdp), got "
                f"{self.stage_size}. Choose sizes that divide."
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

    def holders(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Group data-parallel ranks by the shard they hold.

        Args:
            ranks: Ranks of the job, by data-parallel rank.
        """
        axes = [0, 1] if self.shards_outer else [1]
        if self.sharding == "no_shard":
            axes = []
        return holders_of_segments((self.hsdp, len(ranks) // self.hsdp), ranks, axes)


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
    model: ModelShape,
    parallel: Parallelism,
    machine: Machine,
    settings: ExchangeSettings,
    *,
    splits: Splits | None = None,
) -> Simulation:
    """Plan a model as a live run would: small domains, such as experts', come first.

    Args:
        model: Its matrices.
        parallel: How the job is laid out.
        machine: Rates and wire.
        settings: Staging memory and maximum number of owners; the rest is the machine's.
        splits: What is orthogonalized separately; None for query, key and value.

    Raises:
        ValueError: Experts or layers do not divide.
    """
    if model.num_experts % parallel.ep or (parallel.ep > 1 and not model.num_experts):
        raise ValueError(
            f"ep: expected a divisor of {model.num_experts} experts, got {parallel.ep}. "
            "Change --ep or --num-experts."
        )
    # As in a run: matrices of the same ranks and replicas share a plan.
    matrices: dict[_Key, list[MatrixLayout]] = {}
    for is_expert in (True, False):
        units = _units(model, parallel, splits or Splits(), is_expert=is_expert)
        for rank_grid in _rank_grids(parallel, is_expert) if any(units) else ():
            for key, matrix in _matrices(units, rank_grid, parallel, is_expert=is_expert):
                matrices.setdefault(key, []).append(matrix)
    plans = _plan_all(parallel.stage_size, matrices, machine, settings)
    return Simulation(parallel.stage_size, tuple(plans))


class _Key(NamedTuple):
    """Number of ranks, ranks, and sets of replicas, by which plans are ordered."""

    num_ranks: int
    ranks: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]


def _plan_all(
    world_size: int,
    matrices: Mapping[_Key, Sequence[MatrixLayout]],
    machine: Machine,
    settings: ExchangeSettings,
) -> list[ExchangePlan]:
    """Plan small domains first, and others on top of them, as the ranks of a run do."""
    plans: list[ExchangePlan] = []
    load_ns = dict.fromkeys(range(world_size), 0)
    staged = dict.fromkeys(range(world_size), 0)
    position = dict.fromkeys(range(world_size), 0)
    most_plans = max(Counter(rank for key in matrices for rank in key.ranks).values(), default=0)
    for key in sorted(matrices):
        plan = plan_matrices(
            matrices[key],
            machine.cost,
            settings,
            machine.wire,
            load_ns=load_ns,
            staging_bytes=staging_share(
                settings,
                max(staged[rank] for rank in key.ranks),
                most_plans - max(position[rank] for rank in key.ranks),
            ),
        )
        load_ns.update(plan.assignment.load_ns)
        for rank in key.ranks:
            staged[rank] += plan.staging_bytes
            position[rank] += 1
        plans.append(plan)
    return plans


def report_of(simulation: Simulation, settings: ExchangeSettings) -> Report:
    """Return the report of a simulated job.

    Raises:
        ValueError: The plans of a rank exceed a limit of staging memory.
    """
    report = build_report(range(simulation.world_size), simulation.plans)
    fullest = max(report.ranks, key=lambda rank: rank.staging_bytes)
    own = [plan for plan in simulation.plans if fullest.rank in plan.ranks]
    problem = staging_problem(own, fullest.staging_bytes, settings.staging_bytes)
    if problem is not None:
        raise ValueError(problem)
    return report


def _units(
    model: ModelShape, parallel: Parallelism, splits: Splits, *, is_expert: bool
) -> list[list[Parameter]]:
    """List the parameters of each layer of the first pipeline stage, experts or all others."""
    # The first stage has the most layers where they do not divide.
    layers = range(-(-model.num_layers // parallel.pp))
    if is_expert:
        num_local_experts = model.num_experts // parallel.ep
        return [model.expert_parameters(layer, num_local_experts, splits) for layer in layers]
    return [model.dense_parameters(layer, splits) for layer in layers]


def _rank_grids(parallel: Parallelism, is_expert: bool) -> list[list[list[int]]]:
    """List the ranks that share matrices, each as ``ranks[tensor_rank][data_parallel_rank]``."""
    tp = parallel.expert_tp if is_expert else parallel.tp
    ep = parallel.ep if is_expert else 1
    dp = parallel.expert_dp if is_expert else parallel.dp
    return [
        [[tensor + tp * (expert + ep * data) for data in range(dp)] for tensor in range(tp)]
        for expert in range(ep)
    ]


def _matrices(
    units: Sequence[Sequence[Parameter]],
    rank_grid: Sequence[Sequence[int]],
    parallel: Parallelism,
    *,
    is_expert: bool,
) -> Iterator[tuple[_Key, MatrixLayout]]:
    """Yield the matrices of some ranks, layer by layer, and what they share with others."""
    holders = [parallel.holders(ranks) for ranks in rank_grid]
    # What tensor parallelism joins, a part of each tensor rank, and copies, which are replicas.
    joined, parts = [_keyed(holders)], [_keyed([of_rank]) for of_rank in holders]
    copies = [
        _keyed([[tuple(sorted(itertools.chain(*same))) for same in zip(*holders, strict=True)]])
    ]
    for layer, parameters in enumerate(units):
        shapes = tuple(_local_shape(parameter, len(rank_grid)) for parameter in parameters)
        size, begins = _unit_buffer(shapes, len(holders[0])) if shapes else (0, [])
        for parameter, shape, begin in zip(parameters, shapes, begins, strict=True):
            if len(shape) != 2:
                continue
            layout = parts
            if parameter.partition_dim is None:
                layout = parts if is_expert else copies
            elif parallel.joins_tensor_ranks and not parameter.is_split_by_head:
                layout = joined
            split = parameter.split
            for key, columns in layout:
                boxes = _boxes(columns, size, begin, shape, parameter.partition_dim or 0)
                rows, cols = (max(box[dim][1] for box in boxes.values()) for dim in (0, 1))
                outputs = OutputSlice(RowRange(0, rows), None if split is None else split(shape[0]))
                blocks, regions = tile((rows, cols), outputs, boxes)
                name = f"decoder.layers.{layer}.{parameter.name}"
                yield key, MatrixLayout(name, blocks, regions, key.ranks)


def _keyed(
    columns: Sequence[Sequence[tuple[int, ...]]],
) -> tuple[_Key, Sequence[Sequence[tuple[int, ...]]]]:
    replicas = tuple(sorted(itertools.chain(*columns)))
    ranks = tuple(sorted(itertools.chain(*replicas)))
    return _Key(len(ranks), ranks, replicas), columns


def _boxes(
    columns: Sequence[Sequence[tuple[int, ...]]],
    size: int,
    begin: int,
    shape: Sequence[int],
    dim: int,
) -> dict[int, Box]:
    """Return what ranks hold of a matrix of which tensor ranks have parts of one shape.

    Args:
        columns: By tensor rank, the ranks that hold each segment of the buffer.
        size: Of the buffer.
        begin: Of the parameter in it.
        shape: Of a part.
        dim: Dimension in which the parts follow one another.
    """
    rows, cols = shape
    boxes: dict[int, Box] = {}
    for number, holders in enumerate(columns):
        down, right = (number * rows, 0) if dim == 0 else (0, number * cols)
        for rank, (start, stop) in rows_in_buffer(holders, size, begin, rows, cols).items():
            boxes[rank] = ((down + start, down + stop), (right, right + cols))
    return boxes


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


# All layers of a kind have the same shapes; a model has a few kinds.
_unit_buffer = lru_cache(maxsize=64)(unit_buffer)
