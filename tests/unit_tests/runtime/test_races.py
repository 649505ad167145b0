# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Buffers that travel are left alone until they are waited for: no GPU is needed to see a race.

``helpers/collective_timing.py`` describes the changes of the buffers meanwhile.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.collective_timing import collectives_run, equal_bits
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, each_of, init_group

from megatron_muon.plan.staging import StagingLayout
from megatron_muon.runtime.arena import Arena

pytestmark = pytest.mark.ranks

NUM_STEPS = 2  # buffers are used again in the second one
GRIDS = ({}, {"num_replicas": 2}, {"num_tensor_ranks": 2})
COMM_DTYPES = ("bf16", "fp32")
# Matrices, rows and columns of each, buckets, cost model. There are no more buckets than a rank has
# matrices. These are split where there are fewer than ranks, products are slow, and messages are
# free.
KINDS = {
    "many buckets": (16, (20, 30), 4, ""),
    "stacks": (8, (1, 40), 1, "stack_tiles=4"),
    "split": (
        *(1, (40, 64), 1),
        "tflops=0.0001,gbps=1e6,gbps_between_nodes=1e6,all_reduce_us=0,kernel_us=0",
    ),
}


def _random_case(
    draw: random.Random, grid: dict[str, int], comm_dtype: str, kind: str
) -> dict[str, Any]:
    """Draw matrices, cut anywhere, on a grid of 4 ranks."""
    num_shards = 4 // (2 if grid else 1)

    # Empty ones included.
    def shards(num_rows: int) -> list[int]:
        cuts = sorted(draw.randint(0, num_rows) for _ in range(num_shards - 1))
        return [b - a for a, b in zip([0, *cuts], [*cuts, num_rows], strict=True)]

    num_matrices, sizes, num_buckets, cost_model = KINDS[kind]
    cases = [(draw.randint(*sizes), shards(draw.randint(*sizes))) for _ in range(num_matrices)]
    # Query, key and value.
    cases.append((draw.randint(1, 25), shards(32)))
    exchange = {"comm_dtype": comm_dtype, "cost_model": cost_model, "num_buckets": num_buckets}
    return {"num_shards": num_shards, "exchange": exchange, "cases": cases, **grid}


def _step(optimizers: Any, start: Any) -> list[Any]:
    """Step from a state, and return all tensors of the state it comes to."""
    optimizers.set_state(start)
    for step in range(NUM_STEPS):
        optimizers.set_gradients(step)
        optimizers.sharded.step()
    return [tensor for pair in optimizers.state() for tensor in pair]


def _compare(
    optimizers: Any, expected: list[Any] | None = None, forgotten: int | None = None
) -> dict[str, Any]:
    """Step with late and with early messages.

    Args:
        optimizers: Steps from the same state each time.
        expected: State that it should come to; None for the state after ordinary steps.
        forgotten: A collective that nobody waits for.
    """
    start = optimizers.state()
    expected = expected or _step(optimizers, start)
    found: dict[str, Any] = {}
    for when in ("at_wait", "at_launch"):
        with collectives_run(when, forgotten=forgotten) as timing:
            same = equal_bits(_step(optimizers, start), expected)
        found[when] = [same, timing.breaches]
        found["launched"] = timing.num_launched
    optimizers.set_state(start)
    return found


def _random_layouts(seed: int) -> dict[str, Any]:
    """Step random layouts of every kind; return what went wrong, and what there was."""
    init_group()
    draw = random.Random(seed)
    wrong, seen = [], []
    # Each kind and each grid meet both dtypes.
    for (grid, kind), comm_dtype in zip(
        itertools.product(GRIDS, KINDS), itertools.cycle(COMM_DTYPES)
    ):
        case = _random_case(draw, grid, comm_dtype, kind)
        optimizers = build_optimizers(**case)
        found = _compare(optimizers)
        if found["at_wait"] != [True, []] or found["at_launch"] != [True, []]:
            wrong.append(f"{kind}: {case}: {found}")
        plan = optimizers.sharded.engine.plans[0]
        seen.append([kind, found["launched"], max(map(len, plan.owners))])
    return {"wrong": wrong, "seen": seen}


@pytest.mark.slow
def test_results_do_not_depend_on_the_timing_of_messages():
    """Messages that are late or at once give the same bits, and nobody touches their buffers."""
    for result in run_ranks(4, _random_layouts, 1).check().results:
        assert result["wrong"] == []
        for kind, num_launched, num_owners in result["seen"]:
            # A gather and a scatter of three buckets at least.
            least = 2 * NUM_STEPS * (3 if kind == "many buckets" else 1)
            assert num_launched >= least, (kind, num_launched)
            assert (num_owners > 1) == (kind == "split"), (kind, num_owners)


def _scatters_without_results_for_a_shard() -> list[Any]:
    """Step where shard 1 holds no row of most matrices; its ranks own some all the same."""
    init_group()
    cases = [*[(24, [40 + i, 0]) for i in range(12)], (12, [7, 25])]
    grid = {"num_shards": 2, "num_replicas": 2}
    # More buckets than are in flight: their messages share memory.
    exchange = {"comm_dtype": "bf16", "num_buckets": 6}
    optimizers = build_optimizers(**grid, cases=cases, exchange=exchange)
    (built,) = optimizers.sharded.engine.runners
    sends = [
        bucket.scatter.sends.numel() > 0 for bucket in built.buckets[: len(built.plan.buckets)]
    ]
    gets = [bucket.sections.all.numel() > 0 for bucket in built.buckets[: len(built.plan.buckets)]]
    return [_compare(optimizers), sends, gets]


@pytest.mark.megatron
def test_replica_that_passes_nothing_on_waits_for_what_it_sends():
    """A replica that passes nothing on waits before the memory of its results is used again."""
    results = run_ranks(4, _scatters_without_results_for_a_shard).check().results
    for found, _, _ in results:
        assert found["at_wait"] == found["at_launch"] == [True, []]
    # There are such scatters.
    assert any(
        is_sent and not is_got
        for _, sends, gets in results
        for is_sent, is_got in zip(sends, gets, strict=True)
    )


# Three buckets and more, in which each rank sends to the other one.
BUCKETS = {
    "num_shards": 2,
    "exchange": {"comm_dtype": "bf16", "num_buckets": 3},
    "cases": [*[(12, [15 + i, 17 - i]) for i in range(11)], (12, [7, 25])],
}


def _forget_each_wait(grid: dict[str, int]) -> list[list[Any]]:
    # A step frees its memory at its end; what arrives afterwards would be written to nowhere.
    Arena.free = lambda self: None
    init_group()
    optimizers = build_optimizers(**BUCKETS, **grid)
    start = optimizers.state()
    expected = _step(optimizers, start)
    optimizers.set_state(start)
    whole = _compare(optimizers, expected)
    # Of the first step: the second one does the same.
    numbers = range(whole["launched"] // NUM_STEPS)
    found = [_compare(optimizers, expected, forgotten) for forgotten in numbers]
    # What a step leaves behind does not reach the next one.
    found.append(_compare(optimizers, expected))
    return [[each["at_wait"][0], each["at_launch"][0]] for each in [whole, *found]]


@pytest.mark.megatron
@pytest.mark.parametrize(
    "grid",
    [
        pytest.param({}, id="one copy"),
        pytest.param({"num_replicas": 2}, id="replicas", marks=pytest.mark.slow),
    ],
)
def test_every_wait_that_is_left_out_is_seen(grid):
    """Without any of the waits, some rank has other results."""
    run = run_ranks(4 if grid else 2, _forget_each_wait, grid).check()
    # By rank, collective and mode: whether the results are right.
    right = list(zip(*run.results, strict=True))
    assert all(is_right == [True, True] for ranks in (right[0], right[-1]) for is_right in ranks)
    forgotten = right[1:-1]
    # Gathers and scatters of three buckets; with replicas each scatter is passed on.
    assert len(forgotten) == 3 + (2 * 3 if grid else 3)
    for number, ranks in enumerate(forgotten):
        for when in (0, 1):
            assert not all(is_right[when] for is_right in ranks), f"collective {number} is not seen"


@contextmanager
def _one_place_for_all_buckets(buffers: Sequence[str]) -> Iterator[None]:
    """Let some messages of all buckets lie in one place."""
    build = StagingLayout.build

    def built(plans: Any) -> StagingLayout:
        """Lay out with one place more, as large as the largest bucket needs."""
        layout = build(plans)
        place = -(-layout.num_bytes // 256) * 256
        (plan,), (places,) = plans, layout.plans
        moved = tuple(bucket._replace(**dict.fromkeys(buffers, place)) for bucket in places)
        sizes = [getattr(bucket, name) for bucket in plan.buckets for name in buffers]
        return StagingLayout((moved,), layout.local, place + max(sizes))

    with mock.patch.object(StagingLayout, "build", built):
        yield


def _share_a_place(*buffers: str) -> dict[str, Any]:
    with _one_place_for_all_buckets(buffers):
        optimizers = build_optimizers(**BUCKETS)
    return _compare(optimizers, _step(build_optimizers(**BUCKETS), optimizers.state()))


@pytest.mark.megatron
def test_memory_that_is_used_again_too_early_is_seen():
    """Memory that two messages use at once gives other results, or is found as a breach.

    In one place, one spoils the other. A message that was read at once has left when its place is
    written again, so its results are right; the breach is found all the same. Two messages into one
    place spoil results always.
    """
    places = [("gather_send", "scatter_send"), ("gather_receive",)]
    for sends, receives in run_ranks(2, each_of, _share_a_place, places).check().results:
        for found, is_right_if_read_at_once in ((sends, True), (receives, False)):
            assert not found["at_wait"][0]
            assert found["at_launch"][0] == is_right_if_read_at_once
        for when in ("at_wait", "at_launch"):
            assert any("its send buffer was written before wait()" in x for x in sends[when][1])


def _each_collective(when: str) -> list[str]:
    """Launch each collective, and use its buffers too early in three ways."""
    rank = dist.get_rank()
    pair = torch.tensor([1.0 + rank, 10.0 + rank])
    calls = {
        "all_to_all_single": lambda out, sent: dist.all_to_all_single(out, sent, async_op=True),
        "all_gather_into_tensor": lambda out, sent: dist.all_gather_into_tensor(
            out, sent[:1], async_op=True
        ),
    }
    expected = {
        "all_to_all_single": [[1.0, 2.0], [10.0, 11.0]][rank],
        "all_gather_into_tensor": [1.0, 2.0],
    }
    wrong = []
    for name, call in calls.items():
        sent, out, late = pair.clone(), torch.zeros(2), torch.zeros(2)
        with collectives_run(when) as timing:
            work = call(out, sent)
            is_early = not out.isnan().all()
            work.wait()
            touched = call(late, sent)
            late[0] = sent[0] = 5.0
            # A synchronous one in between: what was launched before runs first, on all ranks.
            dist.all_reduce(torch.ones(1))
            touched.wait()
            call(torch.zeros(2), sent)
        breaches = [
            f"{name} 1: its {each} buffer was written before wait()" for each in ("send", "receive")
        ]
        if is_early or out.tolist() != expected[name]:
            wrong.append(f"{name}: {out.tolist()}")
        if timing.breaches != [*breaches, f"{name} 2: nobody waited for it"]:
            wrong.append(f"{name}: {timing.breaches}")
    return wrong


def test_delayed_collectives_name_breaches():
    """The stand-in collectives have the right results and name each breach."""
    modes = [["at_wait"], ["at_launch"]]
    assert run_ranks(2, each_of, _each_collective, modes).check().results == [[[], []]] * 2
