# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Random layouts, plans and orders of a step for property tests."""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from hypothesis import strategies as st

from megatron_muon.plan import CommDtypes, ExchangePlan, Route
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.exchange_plan import plan_matrices
from megatron_muon.plan.layout import MatrixLayout, OutputSlice, tile
from megatron_muon.plan.rank_plan import RankSchedule
from megatron_muon.plan.settings import PlanSettings

# One core a rank, gloo over the loopback. Stacks pay for the host's time of a call: 2 to 16 times
# up to 64 rows of bf16, half at 128, a tenth at 256, nothing above.
CPU_RANKS = CostModel(
    tflops=0.4,
    half_rate_side=0.0,
    gbps=2.0,
    gbps_between_nodes=2.0,
    kernel_us=20.0,
    all_reduce_us=500.0,
    stack_tiles=32,
)
BF16 = CommDtypes("bfloat16", "bfloat16")
# Weights and gradients travel.
TWO_INPUTS = CommDtypes("float32", "float32", num_inputs=2)
# Newton-Schulz is so slow that matrices are split, and stacks hold a few small matrices.
SLOW = CostModel(tflops=1e-7, all_reduce_us=0, ranks_per_node=2, stack_tiles=4)


@st.composite
def matrix_lists(
    draw: st.DrawFn, max_matrices: int = 8, max_replicas: int = 3
) -> list[MatrixLayout]:
    """Matrices of one domain: every rank is named in all of them, and may hold nothing.

    With shards, replicas, tensor-parallel blocks and QKV splits.
    """
    num_tensor_ranks = draw(st.sampled_from([1, 1, 2]))
    num_shards = draw(st.integers(1, 5))
    num_replicas = draw(st.sampled_from([1, 1, *range(2, max_replicas + 1)]))
    ranks = draw(st.permutations(range(num_tensor_ranks * num_shards * num_replicas)))
    starts = range(0, len(ranks), num_replicas)
    cells = [tuple(sorted(ranks[i : i + num_replicas])) for i in starts]
    holders = [cells[i * num_shards : (i + 1) * num_shards] for i in range(num_tensor_ranks)]
    # Matrices of all layers share their layout, and what is computed from it.
    kinds = [draw(_matrices("", holders)) for _ in range(draw(st.integers(1, 4)))]
    return [
        dataclasses.replace(draw(st.sampled_from(kinds)), name=f"layer.{index}.weight")
        for index in range(draw(st.integers(1, max_matrices)))
    ]


@st.composite
def _matrices(draw: st.DrawFn, name: str, holders: list) -> MatrixLayout:
    num_shards = len(holders[0])
    split_shapes = draw(st.sampled_from([None, None, (2, 1, 1), (3, 2, 2)]))
    multiple = sum(split_shapes) if split_shapes else 1
    num_rows = multiple * draw(st.integers(1, 40 // multiple))
    cuts = sorted(draw(st.lists(st.integers(0, num_rows), min_size=num_shards - 1,
                                max_size=num_shards - 1)))  # fmt: skip
    bounds = [0, *cuts, num_rows]
    # Shards need not ascend with the rank: HFSDP's do not.
    order = draw(st.permutations(range(num_shards)))
    shards = [(bounds[i], bounds[i + 1]) for i in order]
    layout = RowLayout(num_rows, draw(st.integers(1, 30)), tuple(shards))
    return whole_matrix(
        name,
        layout,
        holders,
        partition_dim=draw(st.sampled_from([0, 1])) if len(holders) > 1 else None,
        split_shapes=split_shapes,
    )


class RowLayout(NamedTuple):
    """Rows ``(start, stop)`` of a matrix by shard."""

    num_rows: int
    num_cols: int
    shards: tuple[tuple[int, int], ...]


def whole_matrix(
    name: str,
    layout: RowLayout,
    ranks: Sequence[Sequence[Sequence[int]]],
    *,
    partition_dim: int | None = None,
    split_shapes: Sequence[int] | None = None,
) -> MatrixLayout:
    """Join shards that ranks hold, as ``ranks[tensor_rank][shard]``."""
    rows, cols = layout.num_rows, layout.num_cols
    boxes = {}
    for i, shards in enumerate(ranks):
        down, right = (i * rows, 0) if partition_dim == 0 else (0, i * cols)
        for (start, stop), cell in zip(layout.shards, shards, strict=True):
            boxes |= dict.fromkeys(cell, ((down + start, down + stop), (right, right + cols)))
    num_rows, num_cols = (max(box[dim][1] for box in boxes.values()) for dim in (0, 1))
    outputs = OutputSlice(range(num_rows), split_shapes and tuple(split_shapes))
    found = tile((num_rows, num_cols), outputs, boxes)
    return MatrixLayout(name, *found, tuple(sorted(boxes)))


def rows_cut_at(num_rows: int, num_cols: int, rows: list[int]) -> RowLayout:
    """Cut a matrix into shards of so many rows, by rank."""
    stops = list(accumulate(rows))
    return RowLayout(num_rows, num_cols, tuple(zip([0, *stops], stops, strict=False)))


def one_matrix(
    rows: Sequence[int],
    num_cols: int = 64,
    name: str = "weight",
    split_shapes: Sequence[int] | None = None,
) -> MatrixLayout:
    """Return a matrix of which rank i holds ``rows[i]`` rows."""
    layout = rows_cut_at(sum(rows), num_cols, list(rows))
    ranks = [[(rank,) for rank in range(len(rows))]]
    return whole_matrix(name, layout, ranks, split_shapes=split_shapes)


def plan_of(
    matrices: Sequence[MatrixLayout],
    cost: CostModel = SLOW,
    dtypes: CommDtypes = BF16,
    **settings: Any,
) -> ExchangePlan:
    """Plan some matrices; ``settings`` are other fields of ``PlanSettings``."""
    planned = PlanSettings(cost, dtypes, **settings)
    return plan_matrices(matrices, planned, _fullest_bytes)


def _fullest_bytes(plan: ExchangePlan) -> int:
    """Return the maximum of all ranks, as a run does."""
    return max(RankSchedule.build([plan], rank).staging_bytes for rank in plan.ranks)


@st.composite
def plans(
    draw: st.DrawFn,
    max_matrices: int = 8,
    max_replicas: int = 3,
    dtypes: Sequence[CommDtypes] = (BF16, CommDtypes("float32", "bfloat16")),
) -> ExchangePlan:
    """Plans with and without replicas, split matrices, and stacks."""
    return plan_of(
        draw(matrix_lists(max_matrices, max_replicas)),
        dtypes=draw(st.sampled_from(dtypes)),
        # Most of the time of a draw is the search for buckets that fit.
        staging_bytes=draw(st.sampled_from([2**31, 2**31, 3000, 1])),
        max_owners=draw(st.sampled_from([1, 8])),
        num_buckets=draw(st.sampled_from([None, 1, 3])),
    )


def elements_of(route: Route) -> list[tuple[int, int, int, int]]:
    """Name the elements of a route, in the order in which they travel."""
    return [
        (route.matrix, route.block, route.local_row + row, route.local_col + col)
        for row in range(route.num_rows)
        for col in range(route.num_cols)
    ]
