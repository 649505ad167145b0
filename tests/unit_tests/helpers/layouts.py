# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Random layouts and orders of a step for property tests."""

from itertools import accumulate

from hypothesis import strategies as st

from megatron_muon.plan.layout import MatrixLayout, RowLayout, whole_matrix
from megatron_muon.plan.schedule import Depth, PlanOrder


@st.composite
def matrix_lists(
    draw: st.DrawFn, max_matrices: int = 8, max_replicas: int = 3
) -> list[MatrixLayout]:
    """Matrices of one domain: every rank is named in all of them, and may hold nothing.

    With shards, replicas, tensor-parallel blocks and QKV splits.
    """
    return draw(domains(max_matrices, max_replicas))[0]


@st.composite
def domains(
    draw: st.DrawFn, max_matrices: int = 8, max_replicas: int = 3
) -> tuple[list[MatrixLayout], list[tuple[int, ...]]]:
    """The same, and the ranks that hold the same rows."""
    num_tensor_ranks = draw(st.sampled_from([1, 1, 2]))
    num_shards = draw(st.integers(1, 5))
    num_replicas = draw(st.sampled_from([1, 1, *range(2, max_replicas + 1)]))
    ranks = draw(st.permutations(range(num_tensor_ranks * num_shards * num_replicas)))
    starts = range(0, len(ranks), num_replicas)
    cells = [tuple(sorted(ranks[i : i + num_replicas])) for i in starts]
    holders = [cells[i * num_shards : (i + 1) * num_shards] for i in range(num_tensor_ranks)]
    matrices = [
        draw(_matrices(f"layer.{index}.weight", holders))
        for index in range(draw(st.integers(1, max_matrices)))
    ]
    return matrices, cells


@st.composite
def _matrices(draw: st.DrawFn, fqn: str, holders: list) -> MatrixLayout:
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
        fqn,
        layout,
        holders,
        partition_dim=draw(st.sampled_from([0, 1])) if len(holders) > 1 else None,
        split_shapes=split_shapes,
        has_copies=len(holders) == 1 and draw(st.sampled_from([False, False, True])),
    )


def rows_cut_at(num_rows: int, num_cols: int, rows: list[int]) -> RowLayout:
    """Cut a matrix into shards of so many rows, by rank."""
    stops = list(accumulate(rows))
    return RowLayout(num_rows, num_cols, tuple(zip([0, *stops], stops, strict=False)))


@st.composite
def plan_orders(draw: st.DrawFn) -> PlanOrder:
    """Orders of up to six buckets."""
    has_replicas, is_portioned = draw(st.booleans()), draw(st.booleans())
    return PlanOrder(
        num_buckets=draw(st.integers(0, 6)),
        # All results of a bucket come back in one scatter elsewhere.
        num_scatters=draw(st.integers(1, 4)) if has_replicas or is_portioned else 1,
        depth=Depth(draw(st.integers(1, 5)), draw(st.integers(1, 5))),
        has_replicas=has_replicas,
        is_portioned=is_portioned,
    )
