# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How results come back: each element once to every holder, evenly, and from near owners."""

from collections import Counter
from typing import Any

from helpers.layouts import elements_of, matrix_lists, plan_of, rows_cut_at, whole_matrix
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.plan import RankPlan
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.routes import scatter_to

_COST = CostModel(ranks_per_node=4, stack_tiles=1)


@settings(max_examples=50)
@given(matrix_lists(max_matrices=4), st.sampled_from([1, 2]), st.sampled_from([1, 2**31]))
def test_every_holder_gets_the_result_of_every_element_once(matrices, num_buckets, staging_bytes):
    """Every holder gets the result of each of its elements exactly once."""
    _deliver(matrices, num_buckets, staging_bytes)


def test_owners_know_messages_to_other_tensor_ranks():
    """Owners count the messages that they send to ranks of other tensor ranks."""
    cells = [[(0, 4), (2, 6)], [(1, 5), (3, 7)]]  # by tensor rank and shard
    layout = rows_cut_at(12, 8, [7, 5])
    joined = [whole_matrix(f"joined.{i}", layout, cells, partition_dim=0) for i in range(6)]
    alone = [whole_matrix(f"alone.{i}", layout, [cells[i % 2]]) for i in range(6)]
    _deliver([*joined, *alone], num_buckets=2, staging_bytes=2**31)


def _deliver(matrices: list[MatrixLayout], num_buckets: int, staging_bytes: int) -> None:
    """Plan, and carry out all scatters with the names of elements in place of results."""
    plan = plan_of(matrices, _COST, staging_bytes=staging_bytes, num_buckets=num_buckets)
    ranks = matrices[0].ranks
    rank_plans = {rank: RankPlan.build(plan, rank) for rank in ranks}
    found: dict[int, Counter[Any]] = {rank: Counter() for rank in ranks}
    for rank, rank_plan in rank_plans.items():
        for owned in [*rank_plan.local, *(bucket.owned for bucket in rank_plan.buckets)]:
            found[rank].update(each for route in owned.staying for each in elements_of(route))
    for number in range(len(plan.buckets)):
        buckets = {rank: rank_plans[rank].buckets[number] for rank in ranks}
        scatters = {rank: bucket.scatter for rank, bucket in buckets.items()}
        sections: dict[int, list[Any]] = {}
        for rank, scatter in scatters.items():
            received = [
                element
                for sender in ranks
                for route in scatters[sender].sends.get(rank, ())
                for element in elements_of(route)
            ]
            assert len(received) == sum(scatter.receives.values())
            section = scatter.shard.section_size if scatter.shard else 0
            sections[rank] = received + [None] * (section - len(received))
            assert len(sections[rank]) == section
        for rank, scatter in scatters.items():
            holders = scatter.shard.holders if scatter.shard else ()
            memory = [element for holder in holders for element in sections[holder]]
            assert len(memory) == buckets[rank].num_elements.scatter_receive
            for route, offset in scatter.arrivals:
                elements = elements_of(route)
                assert memory[offset : offset + len(elements)] == elements
                found[rank].update(elements)
    for rank in ranks:
        assert found[rank] == Counter(_held(matrices, rank))


def _held(matrices: list[MatrixLayout], rank: int) -> list[tuple[int, int, int, int]]:
    return [
        (index, region.block, region.local_row + row, col)
        for index, matrix in enumerate(matrices)
        for region in matrix.regions
        if rank in region.holders
        for row in range(region.num_rows)
        for col in range(region.num_cols)
    ]


@given(
    st.integers(1, 12),
    st.dictionaries(st.integers(0, 30), st.integers(1, 500), min_size=1),
)
def test_replicas_have_equal_sections(num_replicas, elements):
    """Sections of replicas are equal multiples of eight elements, and hold every result once."""
    holders = tuple(range(0, 3 * num_replicas, 3))
    sent: Counter[int] = Counter()
    filled: Counter[int] = Counter()
    shard = scatter_to(holders, elements, _COST)
    for share in shard.shares:
        filled[share.holder] += share.num_elements
        sent[share.owner] += share.num_elements
        first = holders.index(share.holder) * shard.section_size
        assert first <= share.offset <= first + shard.section_size - share.num_elements
    assert max(filled.values()) <= shard.section_size
    if num_replicas > 1:
        assert shard.section_size % 8 == 0
        assert shard.num_elements < sum(filled.values()) + 8 * num_replicas
    assert sent == elements


def test_owners_send_to_the_replica_of_their_node():
    """Owners send to the replica of their node as far as it fits."""
    # Four ranks a node; replicas on both.
    shard = scatter_to((1, 5), {0: 24, 3: 16, 6: 40}, _COST)
    assert shard.section_size == 40
    assert [(each.owner, each.holder, each.num_elements) for each in shard.shares] == [
        (0, 1, 24),
        (3, 1, 16),
        (6, 5, 40),
    ]
    # What is left goes to others of the node first: rank 5 is full with 16.
    shard = scatter_to((0, 1, 4, 5), {5: 40}, _COST)
    assert [(each.holder, each.num_elements) for each in shard.shares] == [(0, 8), (4, 16), (5, 16)]
    shard = scatter_to((1, 5), {0: 24, 6: 56}, _COST)
    # Owner, holder, first and last element, and where they lie.
    assert shard.shares == ((0, 1, 0, 24, 0), (6, 1, 40, 56, 24), (6, 5, 0, 40, 40))
