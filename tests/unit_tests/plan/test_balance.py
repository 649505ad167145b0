# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Placing matrices on ranks up to a capacity: loads, ties, moves and exchanges."""

from collections.abc import Mapping, Sequence
from unittest import mock

import pytest
from helpers.layouts import matrix_lists, rows_cut_at
from hypothesis import given
from hypothesis import strategies as st
from megatron_muon.plan.balance import LoadBalancer, Task

from megatron_muon.plan import balance
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.layout import MatrixLayout, whole_matrix
from megatron_muon.plan.routes import transfers_of
from megatron_muon.plan.wire import Wire

WIRE = Wire("bfloat16", "bfloat16")
# Links so slow that the traffic of a few rows counts beside seconds of work.
COST = CostModel(gbps=1e-3, gbps_between_nodes=1e-3)
RANKS = (0, 1, 2, 3)


def _matrix(rows: Sequence[int]) -> MatrixLayout:
    """Shard a matrix of 8 columns over the ranks."""
    ranks = [[(rank,) for rank in range(len(rows))]]
    return whole_matrix("weight", rows_cut_at(sum(rows), 8, list(rows)), ranks)


def _place(
    matrices: Sequence[MatrixLayout],
    seconds: Sequence[float],
    busy: Mapping[int, float] | None = None,
    ranks: tuple[int, ...] = RANKS,
    parts: int = 1,
) -> LoadBalancer:
    tasks = [
        Task(matrix, ranks, parts, time, COST, WIRE)
        for matrix, time in zip(matrices, seconds, strict=True)
    ]
    return LoadBalancer(tasks, busy or dict.fromkeys(ranks, 0.0))


def _loads(placed: LoadBalancer, seconds: Sequence[float], busy: Mapping[int, float]) -> dict:
    found = dict(busy)
    for owners, time in zip(placed.owners, seconds, strict=True):
        for owner in owners:
            found[owner] += time
    return found


@given(matrix_lists(max_matrices=12), st.floats(0, 3), st.data())
def test_loads_are_those_of_the_owners_after_every_phase(matrices, capacity, data):
    """Filling, relieving and saving traffic move matrices, and lose or repeat none."""
    ranks = matrices[0].ranks
    times = st.sampled_from([0.0, 0.25, 1.0, 1.0, 2.0])
    seconds = data.draw(st.lists(times, min_size=len(matrices), max_size=len(matrices)))
    busy = {rank: data.draw(times) for rank in ranks}
    placed = _place(matrices, seconds, busy, ranks)
    placed.fill(capacity)
    assert placed.load_s == pytest.approx(_loads(placed, seconds, busy))
    filled = placed.busiest_load_s
    placed.relieve(capacity)
    assert placed.load_s == pytest.approx(_loads(placed, seconds, busy))
    assert placed.busiest_load_s <= filled * (1 + 1e-9)
    limit = max(capacity, placed.busiest_load_s)
    placed.save_traffic(capacity)
    assert placed.load_s == pytest.approx(_loads(placed, seconds, busy))
    assert placed.busiest_load_s <= limit * (1 + 1e-9)
    busiest_s, busiest_link_s = placed.busiest_load_s, max(placed._link_s.values())
    placed.relieve_links(capacity)
    assert placed.load_s == pytest.approx(_loads(placed, seconds, busy))
    assert placed.busiest_load_s <= max(capacity, busiest_s) * (1 + 1e-9)
    assert max(placed._link_s.values()) <= busiest_link_s * (1 + 1e-9)
    assert all(set(owners) <= set(ranks) and len(owners) == 1 for owners in placed.owners)


def test_matrices_stay_with_their_largest_holder_while_there_is_room():
    """Traffic decides below the capacity."""
    matrices = [_matrix([6, 2, 0, 0]), _matrix([0, 0, 1, 7])]
    placed = _place(matrices, [1.0, 1.0])
    placed.fill(capacity_s=1.0)
    assert placed.owners == [(0,), (3,)] and placed.is_cheapest


def test_matrix_goes_to_the_next_holder_and_then_to_whoever_is_idle():
    """Holders beyond the capacity are left out; where all are, load decides."""
    matrices = [_matrix([6, 2, 0, 0])] * 3
    placed = _place(matrices, [1.0] * 3)
    placed.fill(capacity_s=1.0)
    assert sorted(placed.owners) == [(0,), (1,), (2,)]
    assert not placed.is_cheapest and placed.busiest_load_s == 1.0


def test_longest_matrices_are_placed_first_and_equal_ones_by_their_index():
    """Every rank of a job finds the same owners."""
    matrices = [_matrix([4, 4, 0, 0])] * 4
    placed = _place(matrices, [1.0, 3.0, 1.0, 1.0], ranks=(0, 1))
    placed.fill(capacity_s=3.0)
    assert placed.owners == [(1,), (0,), (1,), (1,)]


def test_matrix_that_lies_whole_on_a_rank_is_placed_before_longer_ones():
    """It would have to travel anywhere else."""
    placed = _place([_matrix([4, 4, 0, 0]), _matrix([8, 0, 0, 0])], [2.0, 1.0])
    placed.fill(capacity_s=2.0)
    assert placed.owners == [(1,), (0,)]


def test_relieve_moves_from_the_busiest_rank_until_the_capacity():
    """What is idle gets what the busiest has most of."""
    placed = _place([_matrix([4, 4, 0, 0])] * 4, [1.0] * 4)
    for index in range(4):
        placed.place(index, (0,))
    placed.relieve(capacity_s=1.0)
    assert sorted(placed.owners) == [(0,), (1,), (2,), (3,)]
    assert placed.busiest_load_s == 1.0


def test_relieve_exchanges_where_no_move_helps():
    """3 + 3 and 2 + 2 on two ranks become 3 + 2 each: moving any one makes it worse."""
    placed = _place([_matrix([4, 4])] * 4, [3.0, 3.0, 2.0, 2.0], ranks=(0, 1))
    for index, owner in enumerate([0, 0, 1, 1]):
        placed.place(index, (owner,))
    placed.relieve(capacity_s=5.0)
    assert placed.load_s == {0: 5.0, 1: 5.0}


def test_relieve_leaves_what_is_within_the_capacity():
    """Balance beyond the capacity is worth no traffic."""
    placed = _place([_matrix([4, 4, 0, 0])] * 2, [1.0, 1.0])
    placed.place(0, (0,))
    placed.place(1, (0,))
    placed.relieve(capacity_s=2.0)
    assert placed.owners == [(0,), (0,)]


def test_save_traffic_brings_matrices_home_within_the_capacity():
    """Alone where there is room, in exchange where there is none."""
    matrices = [_matrix([7, 1, 0, 0]), _matrix([1, 7, 0, 0])]
    for capacity in (2.0, 1.0):
        placed = _place(matrices, [1.0, 1.0], ranks=(0, 1))
        placed.place(0, (1,))
        placed.place(1, (0,))
        before = sum(placed.load_s.values())
        placed.save_traffic(capacity)
        assert placed.owners == [(0,), (1,)] and placed.is_cheapest
        assert sum(placed.load_s.values()) == before


def test_relieve_links_shares_traffic_out_among_ranks_with_room():
    """Two ranks hold all rows. For others a matrix is twice the traffic, so each takes one."""

    def relieved(
        busy: Mapping[int, float], fair_link_s: float | None = None, hidden: float = 0.0
    ) -> dict[int, float]:
        """Return the loads beside those that ranks had, at a capacity of 6."""
        placed = _place([_matrix([5, 5, 0, 0])] * 8, [1.0] * 8, busy)
        for index in range(8):
            placed.place(index, (index % 2,))
        if fair_link_s is not None:
            placed._fair_link_s = fair_link_s * placed._link_s[0]
        # Beside seconds of work all of this traffic would be hidden.
        with mock.patch.object(balance, "_HIDDEN_LINK", hidden):
            placed.relieve_links(capacity_s=6.0)
        return {rank: load - busy[rank] for rank, load in placed.load_s.items()}

    both = {0: 0.0, 1: 0.0, 2: 5.0, 3: 5.0}
    assert relieved(both) == {0: 3.0, 1: 3.0, 2: 1.0, 3: 1.0}
    assert relieved({**both, 3: 5.5}) == {0: 3.0, 1: 4.0, 2: 1.0, 3: 0.0}
    # What is fair stays, and what is hidden.
    for kept in (relieved(both, fair_link_s=1.0), relieved(both, hidden=0.1)):
        assert kept == {0: 4.0, 1: 4.0, 2: 0.0, 3: 0.0}


def test_split_matrices_go_to_aligned_sets_of_ranks():
    """Four parts of eight ranks: the first four or the last, whichever has less to do."""
    ranks = tuple(range(8))
    busy = dict.fromkeys(ranks, 0.0) | {1: 5.0}
    placed = _place([_matrix([4] * 8)], [1.0], busy, ranks, parts=4)
    placed.fill(capacity_s=1.0)
    assert placed.owners == [(4, 5, 6, 7)]


@given(matrix_lists(max_matrices=8, max_replicas=1))
def test_busiest_link_is_that_of_an_owner_or_of_a_holder(matrices):
    """Both ways; a holder that owns nothing counts, since its owners wait for it."""
    placed = _place(matrices, [1.0] * len(matrices), ranks=matrices[0].ranks)
    placed.fill(2.0)
    sent_s, received_s = (dict.fromkeys(matrices[0].ranks, 0.0) for _ in range(2))
    for index, (matrix, owners) in enumerate(zip(matrices, placed.owners, strict=True)):
        for moved in transfers_of(index, matrix, owners, COST):
            if moved.source != moved.owner:
                seconds = 4 * moved.num_elements
                seconds *= COST.seconds_per_byte(moved.source, moved.owner)
                sent_s[moved.source] += seconds
                received_s[moved.owner] += seconds
    busiest_s = max([*sent_s.values(), *received_s.values()])
    assert placed.busiest_link_s == pytest.approx(busiest_s)


def test_busiest_link_of_nothing_is_idle():
    """A kind may have no matrices."""
    assert _place([], []).busiest_link_s == 0.0


def test_place_in_turn_gives_every_rank_its_turn():
    """The simple way, to compare with."""
    placed = _place([_matrix([2, 2, 2, 2])] * 6, [1.0] * 6)
    placed.place_in_turn()
    assert placed.owners == [(0,), (1,), (2,), (3,), (0,), (1,)]
