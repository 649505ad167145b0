# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plans of jobs that do not run, from the shape of a model.

A live run reads the buffers of the model itself (``rows/megatron_fsdp.py``). ``unit_buffer()``
follows ``_get_parameter_groups`` and ``build_data_parallel_buffer_index`` of megatron-core 0.19.2.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from megatron_muon.plan.exchange_plan import ExchangePlan, plan_matrices
from megatron_muon.plan.layout import (
    Box,
    MatrixLayout,
    OutputSlice,
    Ranks,
    Splits,
    holders_of_segments,
    rows_in_buffer,
    tile,
)
from megatron_muon.plan.settings import PlanSettings
from megatron_muon.tools.plan.model_shape import ModelShape, Parameter
from megatron_muon.tools.plan.sizes import fullest_bytes

type Shape = tuple[int, ...]
# Holders of the segments of a buffer, by tensor-parallel rank.
type Columns = Sequence[Sequence[Ranks]]
# Sets of ranks with equal shards.
type Replicas = tuple[Ranks, ...]

Sharding = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


@dataclass(frozen=True)
class Parallelism:
    """Parallelism of a job; ranks count tensor first, then expert, then data parallelism.

    Args:
        dp: Data-parallel ranks, context parallelism included.
        tp: Tensor-parallel ranks.
        ep: Expert-parallel ranks.
        etp: Tensor-parallel ranks of an expert; 0 for ``tp``.
        pp: Pipeline stages; the first is planned.
        hsdp: Optimizer instances.
        sharding: Data-parallel sharding strategy.
        hfsdp: Whether optimizer states are sharded over instances too.
        muon_tp_mode: In all modes but ``blockwise`` tensor-parallel ranks orthogonalize one joined
            matrix.

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
    hfsdp: bool = False
    muon_tp_mode: str = "blockwise"

    def __post_init__(self) -> None:
        """Check that sizes are positive and divide."""
        for name in ("dp", "tp", "ep", "pp", "hsdp"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}: expected a positive number, got {getattr(self, name)}. "
                    "Pass 1 or more."
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


def simulate(
    model: ModelShape,
    parallel: Parallelism,
    settings: PlanSettings,
    splits: Splits,
) -> list[ExchangePlan]:
    """Plan every domain of a job as a live run would.

    Small domains, such as experts, come first.

    Raises:
        ValueError: Experts or layers do not divide.
    """
    if model.num_experts % parallel.ep or (parallel.ep > 1 and not model.num_experts):
        raise ValueError(
            f"ep: expected a divisor of {model.num_experts} experts, got {parallel.ep}. "
            "Change --ep or --num-experts."
        )
    dense, experts = model.stage(parallel.pp, parallel.ep, splits)
    # As in a run: matrices of the same ranks and replicas share a plan.
    matrices: dict[Replicas, list[MatrixLayout]] = defaultdict(list)
    for parameters, is_expert in ((experts, True), (dense, False)):
        for rank_grid in _rank_grids(parallel, is_expert):
            for replicas, matrix in _matrices(parameters, rank_grid, parallel, is_expert=is_expert):
                matrices[replicas].append(matrix)
    return plan_all(matrices, settings)


def plan_all(
    matrices: Mapping[Replicas, Sequence[MatrixLayout]], settings: PlanSettings
) -> list[ExchangePlan]:
    """Plan all domains, in the order of the ranks of a run."""
    domains = sorted((tuple(sorted(itertools.chain(*replicas))), replicas) for replicas in matrices)
    max_num_plans = max(Counter(rank for ranks, _ in domains for rank in ranks).values(), default=1)
    settings = settings.staging_budget(max_num_plans)
    return [
        plan_matrices(matrices[replicas], settings, fullest_bytes)
        for _, replicas in sorted(domains, key=lambda domain: len(domain[0]))
    ]


def _rank_grids(parallel: Parallelism, is_expert: bool) -> list[list[list[int]]]:
    """List sets of ranks that share matrices, as ``ranks[tensor_rank][data_parallel_rank]``."""
    tp, ep = (parallel.expert_tp, parallel.ep) if is_expert else (parallel.tp, 1)
    dp = parallel.stage_size // (tp * ep)
    return [
        [[tensor + tp * (expert + ep * data) for data in range(dp)] for tensor in range(tp)]
        for expert in range(ep)
    ]


def _matrices(
    parameters_by_layer: Sequence[Sequence[Parameter]],
    rank_grid: Sequence[Sequence[int]],
    parallel: Parallelism,
    *,
    is_expert: bool,
) -> Iterator[tuple[Replicas, MatrixLayout]]:
    """Yield the matrices of a rank grid by layer, with the replicas of their shards."""
    axes = [0, 1] if parallel.hfsdp else [1]
    if parallel.sharding == "no_shard":
        axes = []
    sizes = parallel.hsdp, len(rank_grid[0]) // parallel.hsdp
    holders = [holders_of_segments(sizes, ranks, axes) for ranks in rank_grid]
    # Matrices are joined over tensor-parallel ranks, separate on all of them, or replicated.
    joined, separate = [holders], [[segments] for segments in holders]
    copies = [[[tuple(sorted(itertools.chain(*same))) for same in zip(*holders, strict=True)]]]
    for layer, parameters in enumerate(parameters_by_layer):
        shapes = tuple(_local_shape(parameter, len(rank_grid)) for parameter in parameters)
        size, begins = unit_buffer(shapes, len(holders[0]))
        for parameter, shape, begin in zip(parameters, shapes, begins, strict=True):
            if len(shape) != 2:
                continue
            layout: Sequence[Columns] = separate
            if parameter.partition_dim is None:
                layout = separate if is_expert else copies
            elif parallel.muon_tp_mode != "blockwise" and parameter.head_rows is None:
                layout = joined
            for columns in layout:
                boxes = _boxes(columns, size, begin, shape, parameter.partition_dim or 0)
                rows, cols = (max(box[dim][1] for box in boxes.values()) for dim in (0, 1))
                outputs = OutputSlice(range(rows), parameter.blocks(shape[0]))
                blocks, regions = tile((rows, cols), outputs, boxes)
                name = f"decoder.layers.{layer}.{parameter.name}"
                replicas = tuple(sorted(itertools.chain(*columns)))
                ranks = tuple(sorted(itertools.chain(*replicas)))
                yield replicas, MatrixLayout(name, blocks, regions, ranks)


def _boxes(columns: Columns, size: int, begin: int, shape: Shape, dim: int) -> dict[int, Box]:
    """Return the boxes of a matrix that tensor parallelism shards over ``dim``.

    Its shards have one shape, and begin at one offset of buffers of one size.
    """
    rows, cols = shape
    boxes: dict[int, Box] = {}
    for tensor_rank, holders in enumerate(columns):
        row, col = (tensor_rank * rows, 0) if dim == 0 else (0, tensor_rank * cols)
        for rank, (start, stop) in rows_in_buffer(holders, size, begin, rows, cols).items():
            boxes[rank] = ((row + start, row + stop), (col, col + cols))
    return boxes


def _local_shape(parameter: Parameter, num_tensor_ranks: int) -> Shape:
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
def unit_buffer(shapes: tuple[Shape, ...], num_shards: int) -> tuple[int, list[int]]:
    """Lay out the parameters of one module in the buffer of Megatron-FSDP.

    Parameters of one module, such as a layer, share a buffer; experts have another one. It is
    sharded at multiples of a unit, itself a multiple of the row of almost every parameter: shards
    are whole rows. Parameters begin on a unit, longest rows first. Parameters smaller than a unit
    follow; Megatron-FSDP puts them into gaps, which moves borders in layers with many small
    matrices (DeepSeek-V3), but no figure of a plan by more than 0.1 %.

    Args:
        shapes: Shapes of the tensor-parallel shards, in the order of ``named_parameters``.
        num_shards: Ranks that the buffer is sharded over.

    Returns:
        The size of the buffer and the first element of each parameter, for
        ``rows_in_buffer()``.
    """
    sizes, rows = [math.prod(shape) for shape in shapes], [math.prod(shape[1:]) for shape in shapes]
    unit_size = max(rows, default=1)
    for size, row in sorted(zip(sizes, rows, strict=True), key=lambda pair: -pair[1]):
        # A parameter smaller than a unit never crosses a shard border.
        if size >= unit_size and unit_size % row:
            unit_size = math.lcm(unit_size, row)
    order = sorted(range(len(shapes)), key=lambda i: (sizes[i] < unit_size, -rows[i]))
    begins, end = [0] * len(shapes), 0
    for i in order:
        begins[i] = end
        end += sizes[i] if sizes[i] < unit_size else _round_up(sizes[i], unit_size)
    # The buffer is padded: every rank has the same number of whole units.
    return _round_up(end, num_shards * unit_size), begins


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
