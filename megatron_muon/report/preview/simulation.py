# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plans of jobs that are not running: from a model's shape."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.exchange_plan import (
    ExchangePlan,
    plan_matrices,
    staging_problem,
    staging_share,
)
from megatron_muon.plan.layout import (
    MatrixLayout,
    RowLayout,
    hfsdp_shard_of_rank,
    whole_matrix,
)
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.plan.splits import Splits
from megatron_muon.plan.wire import Wire
from megatron_muon.report.preview.fsdp_buffer import unit_layouts
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

    def num_shards(self, num_ranks: int) -> int:
        """Return over how many of so many data-parallel ranks a buffer is sharded."""
        if self.sharding == "no_shard":
            return 1
        return num_ranks if self.shards_outer else num_ranks // self.hsdp

    def holders(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Group data-parallel ranks by the shard they hold.

        Args:
            ranks: Ranks of the job, by data-parallel rank.
        """
        # Without sharding every rank is a replica of the one shard.
        if self.sharding == "no_shard":
            return [tuple(ranks)]
        inner = len(ranks) // self.hsdp
        if self.shards_outer:
            shards = [hfsdp_shard_of_rank(i, inner, self.hsdp) for i in range(len(ranks))]
            return [(rank,) for _, rank in sorted(zip(shards, ranks, strict=True))]
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
    model: ModelShape,
    parallel: Parallelism,
    machine: Machine,
    settings: ExchangeSettings,
    *,
    splits: Splits | None = None,
) -> Simulation:
    """Plan a model as a live run would: experts first, dense matrices fill what they leave.

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
    units = {
        is_expert: _units(model, parallel, splits or Splits(), is_expert=is_expert)
        for is_expert in (True, False)
    }
    units = {is_expert: layers for is_expert, layers in units.items() if any(layers)}
    domains = [
        [
            _matrices(layers, rank_grid, parallel, is_expert=is_expert)
            for rank_grid in _rank_grids(parallel, is_expert)
        ]
        for is_expert, layers in units.items()
    ]
    plans = _plan_all(parallel.stage_size, domains, machine, settings)
    return Simulation(parallel.stage_size, tuple(plans))


def _plan_all(
    world_size: int,
    domains: Sequence[Sequence[Sequence[MatrixLayout]]],
    machine: Machine,
    settings: ExchangeSettings,
) -> list[ExchangePlan]:
    """Plan the domains of experts, then those of dense matrices, as the ranks of a run do."""
    plans: list[ExchangePlan] = []
    load_ns = dict.fromkeys(range(world_size), 0)
    staged = dict.fromkeys(range(world_size), 0)
    for number, of_kind in enumerate(domains):
        new = []
        for matrices in of_kind:
            ranks = sorted(set().union(*(matrix.ranks for matrix in matrices)))
            plan = plan_matrices(
                matrices,
                machine.cost,
                settings,
                machine.wire,
                load_ns=load_ns,
                staging_bytes=staging_share(
                    settings, max(staged[rank] for rank in ranks), len(domains) - number
                ),
            )
            new.append(plan)
        for plan in new:
            load_ns.update(plan.assignment.load_ns)
            for rank in plan.ranks:
                staged[rank] += plan.staging_bytes
        plans += new
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
    """List the domains, each as ``ranks[tensor_rank][data_parallel_rank]``."""
    tp = parallel.expert_tp if is_expert else parallel.tp
    ep = parallel.ep if is_expert else 1
    dp = parallel.expert_dp if is_expert else parallel.dp
    domains = []
    for expert in range(ep):
        rank_grid = [
            [tensor + tp * (expert + ep * data) for data in range(dp)] for tensor in range(tp)
        ]
        # Blockwise, each tensor rank orthogonalizes what it has, with its own data-parallel ranks.
        domains += [rank_grid] if parallel.joins_tensor_ranks else [[row] for row in rank_grid]
    return domains


def _matrices(
    units: Sequence[Sequence[Parameter]],
    rank_grid: Sequence[Sequence[int]],
    parallel: Parallelism,
    *,
    is_expert: bool,
) -> list[MatrixLayout]:
    """Lay out the matrices of one domain, layer by layer."""
    matrices = []
    num_tensor_ranks = parallel.expert_tp if is_expert else parallel.tp
    holders = [parallel.holders(ranks) for ranks in rank_grid]
    domain = tuple(sorted(rank for ranks in rank_grid for rank in ranks))
    for layer, parameters in enumerate(units):
        shapes = tuple(_local_shape(parameter, num_tensor_ranks) for parameter in parameters)
        layouts = _cached_layouts(shapes, parallel.num_shards(len(rank_grid[0])))
        for parameter, layout in zip(parameters, layouts, strict=True):
            if layout is None:
                continue
            # What tensor parallelism replicates, such as a router, is a matrix on each rank; and
            # so are heads that are apart.
            is_sharded = parameter.partition_dim is not None
            is_joined = len(rank_grid) > 1 and is_sharded and not parameter.is_split_by_head
            split = parameter.split
            for ranks in [holders] if is_joined else [[row] for row in holders]:
                matrices.append(
                    whole_matrix(
                        f"decoder.layers.{layer}.{parameter.name}",
                        layout,
                        ranks,
                        partition_dim=parameter.partition_dim if is_joined else None,
                        split_shapes=None if split is None else split(layout.num_rows),
                        domain=domain if is_joined or len(rank_grid) == 1 else None,
                        has_copies=num_tensor_ranks > 1
                        and parameter.partition_dim is None
                        and not is_expert,
                    )
                )
    return matrices


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
@lru_cache(maxsize=64)
def _cached_layouts(shapes: tuple[tuple[int, ...], ...], num_shards: int) -> list[RowLayout | None]:
    return unit_layouts(shapes, num_shards) if shapes else []
