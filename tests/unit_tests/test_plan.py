# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The exchange plan: every element travels once there and once to each holder, in known order."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import matrix_lists

from megatron_muon.assignment import assign
from megatron_muon.cost import CostModel, WireBytes
from megatron_muon.layout import MatrixLayout
from megatron_muon.plan import ExchangePlan, Piece
from megatron_muon.plan.pieces import parts_of
from megatron_muon.plan.report import build_report

WIRE = WireBytes(2, 2, 8)
# Newton-Schulz so slow that matrices are cut and owners spread.
SLOW = CostModel(tflops=1e-7, all_reduce_us=0, stack_elements=600)


def _plan(matrices: list[MatrixLayout], bucket_elements: int = 500) -> ExchangePlan:
    assignment = assign(matrices, SLOW, WIRE)
    return ExchangePlan(matrices, assignment, SLOW, bucket_elements=bucket_elements)


def _shards(plan: ExchangePlan, index: int) -> dict[int, np.ndarray]:
    """Give every rank its shard of a matrix of distinct numbers."""
    matrix = plan.matrices[index]
    first, blocks = 0, []
    for rows, cols in matrix.blocks:
        blocks.append(first + np.arange(rows * cols).reshape(rows, cols))
        first += rows * cols
    shapes: dict[int, tuple[int, int]] = {}
    for f in matrix.fragments:
        for rank in f.holders:
            rows, _ = shapes.get(rank, (0, 0))
            shapes[rank] = (max(rows, f.local_row + f.num_rows), f.num_cols)
    shards = {rank: np.full(shape, -1) for rank, shape in shapes.items()}
    for f in matrix.fragments:
        for rank in f.holders:
            shards[rank][f.local_row : f.local_row + f.num_rows] = blocks[f.block][
                f.row : f.row + f.num_rows, f.col : f.col + f.num_cols
            ]
    return shards


def _local(shard: np.ndarray, piece: Piece) -> np.ndarray:
    return shard[
        piece.local_row : piece.local_row + piece.num_rows,
        piece.local_col : piece.local_col + piece.num_cols,
    ]


@settings(deadline=None)
@given(matrix_lists(), st.sampled_from([1, 500, 10**6]))
def test_every_element_reaches_its_owner_once_and_returns_to_where_it_was(matrices, bucket):
    """Gather fills each part exactly; scatter restores every shard of every holder."""
    plan = _plan(matrices, bucket)
    for index, (matrix, owners) in enumerate(zip(plan.matrices, plan.owners, strict=True)):
        shards = _shards(plan, index)
        assert all((shard >= 0).all() for shard in shards.values())
        parts = {
            (block, part.owner): np.full((part.num_rows, part.num_cols), -1)
            for block, shape in enumerate(matrix.blocks)
            for part in parts_of(shape, owners)
        }
        back = {rank: np.full(shard.shape, -1) for rank, shard in shards.items()}
        pieces = list(plan.pieces(index))
        for piece in pieces:
            part = parts[piece.block, piece.owner]
            place = np.s_[
                piece.row : piece.row + piece.num_rows, piece.col : piece.col + piece.num_cols
            ]
            assert (part[place] == -1).all()
            part[place] = _local(shards[piece.source], piece)
        assert all((part >= 0).all() for part in parts.values())
        for piece in pieces:
            part = parts[piece.block, piece.owner]
            for holder in piece.holders:
                target = _local(back[holder], piece)
                assert (target == -1).all()
                target[:] = part[
                    piece.row : piece.row + piece.num_rows, piece.col : piece.col + piece.num_cols
                ]
        for rank, shard in shards.items():
            assert (back[rank] == shard).all()
        largest = Counter()
        for part in parts.values():
            largest.update(part.ravel().tolist())
        assert set(largest.values()) == {1} and len(largest) == matrix.num_elements


@settings(deadline=None)
@given(matrix_lists())
def test_messages_of_two_ranks_match(matrices):
    """What a rank sends to another is what that one expects, piece by piece, in each bucket."""
    plan = _plan(matrices)
    ranks = matrices[0].ranks
    rank_plans = {rank: plan.for_rank(rank) for rank in ranks}
    seen: Counter[int] = Counter(plan.local)
    for number, bucket in enumerate(plan.buckets):
        seen.update(bucket)
        for sender in ranks:
            mine = rank_plans[sender].buckets[number]
            for receiver in ranks:
                theirs = rank_plans[receiver].buckets[number]
                assert mine.gather_sends.get(receiver, []) == theirs.gather_receives.get(sender, [])
                assert mine.scatter_sends.get(receiver, []) == theirs.scatter_receives.get(
                    sender, []
                )
            assert sender not in mine.gather_sends and sender not in mine.scatter_sends
            if not mine.has_gather:
                assert not mine.gather_sends and not mine.gather_receives
    assert seen == Counter(range(len(matrices)))


@settings(deadline=None)
@given(matrix_lists())
def test_without_replicas_the_way_back_is_the_way_there(matrices):
    """Each scatter message is the gather message between the same two ranks, reversed."""
    plan = _plan(matrices)
    for rank in matrices[0].ranks:
        for bucket in plan.for_rank(rank).buckets:
            if all(len(piece.holders) == 1 for index in range(len(matrices))
                   for piece in plan.pieces(index)):  # fmt: skip
                assert bucket.scatter_sends == bucket.gather_receives
                assert bucket.scatter_receives == bucket.gather_sends


@settings(deadline=None)
@given(matrix_lists(max_matrices=12), st.sampled_from([200, 500, 5000]))
def test_bucket_size_bounds_what_a_rank_owns_at_once(matrices, bucket_elements):
    """A rank's share of a bucket is at most the knob, or a single matrix."""
    plan = _plan(matrices, bucket_elements)
    for rank in matrices[0].ranks:
        rank_plan = plan.for_rank(rank)
        for bucket in (*rank_plan.local, *rank_plan.buckets):
            slots = [slot for stack in bucket.stacks for slot in stack]
            elements = sum(slot.part.num_rows * slot.part.num_cols for slot in slots)
            assert elements <= bucket_elements or len({slot.matrix for slot in slots}) == 1


@settings(deadline=None)
@given(matrix_lists())
def test_report_counts_what_messages_hold(matrices):
    """Elements in the report are those of the messages, rank by rank."""
    plan = _plan(matrices)
    world_size = 1 + max(matrices[0].ranks)
    report = build_report(range(world_size), [plan], WIRE)
    for rank in matrices[0].ranks:
        sent = received = 0
        for bucket in plan.for_rank(rank).buckets:
            for sends in (bucket.gather_sends, bucket.scatter_sends):
                sent += sum(p.num_elements for pieces in sends.values() for p in pieces)
            for receives in (bucket.gather_receives, bucket.scatter_receives):
                received += sum(p.num_elements for pieces in receives.values() for p in pieces)
        assert report.ranks[rank].elements_sent == sent
        assert report.ranks[rank].bytes_received == 2 * received
    if all("owner" in matrix for matrix in report.matrices):
        assert sum(rank.bytes_sent for rank in report.ranks) >= report.lower_bound_bytes


def test_plans_that_differ_have_different_entries():
    """An owner, a layout or a bucket that differs shows in the line of its matrix."""
    from layouts import rows_cut_at

    from megatron_muon.layout import whole_matrix

    def entries(rows: list[int]) -> list[str]:
        layout = rows_cut_at(8, 4, rows)
        return _plan([whole_matrix("a.weight", layout, [[(0,), (1,)]])]).entries()

    assert entries([5, 3]) == entries([5, 3])
    assert entries([5, 3]) != entries([6, 2])
    assert entries([5, 3])[0].startswith("a.weight ((8, 4),) owners (")
