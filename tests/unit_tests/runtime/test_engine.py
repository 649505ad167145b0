# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The engine on several ranks: bytes of messages, memory, split matrices, faults."""

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.collective_timing import collectives_run
from helpers.device import kind
from helpers.ranks import cached_cases, run_ranks
from helpers.sharded_muon import build_optimizers, each_of, split_always, step_both

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]


def _count_bytes(comm_dtype: str, grid: dict[str, int]) -> dict[str, Any]:
    """Step once, counting what is handed to torch.distributed for other ranks."""
    from megatron_muon.tools.plan.rank_report import build_report

    num_shards = 2 if grid else 4
    exchange = {"comm_dtype": comm_dtype, "num_buckets": 3}
    optimizers = build_optimizers(num_shards, {}, exchange, **grid)
    counted: Counter[str] = Counter()
    # The runtime's threads start spreads while this thread counts other collectives.
    counting = threading.Lock()

    def all_to_all_single(output, data, out_sizes, in_sizes, group, **_):
        assert data.numel() == sum(in_sizes) and output.numel() == sum(out_sizes)
        # What a rank sends to itself, as a replica or for a matrix in place, does not leave it.
        to_itself = in_sizes[dist.get_rank(group)]
        counted["moved"] += data.nbytes - to_itself * data.element_size()
        counted["messages"] += 1

    def all_gather_into_tensor(output, data, **_):
        # To each other replica, or through them.
        counted["moved"] += output.nbytes - data.nbytes
        counted["spreads"] += 1

    def all_reduce(tensor, **_):
        counted["reduced" if tensor.is_floating_point() else "flags"] += tensor.nbytes

    def counts(count: Callable[..., None]) -> Callable[..., Any]:
        original = getattr(dist, count.__name__)

        def call(*args, **options):
            with counting:
                count(*args, **options)
            return original(*args, **options)

        return call

    optimizers.set_gradients(0)
    collectives = (all_to_all_single, all_gather_into_tensor, all_reduce)
    with mock.patch.multiple(dist, **{each.__name__: counts(each) for each in collectives}):
        optimizers.sharded.step()
    # Tensor-parallel ranks have a plan of their own for what they replicate.
    plans = optimizers.sharded.engine.plans
    report = build_report(4, plans)
    return {
        **counted,
        "planned": report.ranks[dist.get_rank()].bytes_sent,
        "buckets": sum(len(plan.buckets) for plan in plans),
        "blocks": sum(len(matrix.blocks) for plan in plans for matrix in plan.matrices),
    }


def test_bytes_at_the_collectives_are_those_of_the_plan():
    """Collectives carry the bytes of the plan, without padding."""
    by_rank = results(4)["bytes"]
    for counted, (comm_dtype, grid) in zip(itertools.chain(*by_rank), 4 * BYTES, strict=True):
        assert counted["moved"] == counted["planned"]
        assert counted["buckets"] > 1
        assert counted["messages"] <= 2 * counted["buckets"]
        if "num_replicas" in grid:
            assert counted["buckets"] >= counted["spreads"] > 0
        elif not grid:
            assert "spreads" not in counted
        assert counted.get("reduced", 0) == (8 * counted["blocks"] if comm_dtype == "bf16" else 0)
    for of_ranks in zip(*by_rank, strict=True):
        assert sum(counted["moved"] for counted in of_ranks) > 0


# What shares the work of four ranks.
SHARING = ({"num_replicas": 4}, {"num_replicas": 2}, {"num_tensor_ranks": 2})
# CommDtypes, precision, backend and atol.
ROUNDING = {
    # fp32 sums in another order, through 15 products.
    "fp32": ("fp32", "highest", "standard", 1e-5),
    # Gram matrices have the squares of singular values, and so twice the digits of an error.
    "fp32_gram": ("fp32", "highest", "gram", 1e-4),
    # Gram matrices are added in bf16, which keeps 8 bits: 3 steps of 0.02 times a result with
    # elements below 1, scaled by at most 7, are off by a few hundredths of that.
    "bf16": ("bf16", "medium", "standard", 2e-2),
    "bf16_gram": ("bf16", "medium", "gram", 2e-2),
}


def _step_with_cut_matrices(name: str, grid: dict[str, int]) -> list[Any]:
    """Cut every matrix, whether it pays or not."""
    comm_dtype, precision, backend, atol = ROUNDING[name]
    settings = {"fp32_matmul_prec": precision}
    exchange = {"comm_dtype": comm_dtype, "newton_schulz": backend}
    num_shards = 4 // math.prod(grid.values())
    with split_always(4):
        optimizers = build_optimizers(num_shards, settings, exchange, **grid)
    plan = optimizers.sharded.engine.plans[0]
    step_both(optimizers, comm_dtype)
    different = optimizers.differences(atol)
    if backend == "gram":
        whole = build_optimizers(num_shards, settings, {**exchange, "max_owners": 1}, **grid)
        step_both(whole, comm_dtype)
        different += whole.differences(atol)
    owners = zip(plan.matrices, plan.owners, strict=True)
    return [different, [len(ranks) for _, ranks in owners]]


@pytest.mark.parametrize(
    "cases",
    [
        [*((name, {}) for name in ROUNDING), *(("bf16", grid) for grid in SHARING)],
        pytest.param(
            list(itertools.product(("fp32", "fp32_gram"), SHARING)), marks=pytest.mark.slow
        ),
    ],
    ids=["bf16", "fp32"],
)
def test_cut_matrices_agree_with_whole_ones_up_to_rounding(cases):
    """Matrices split over several owners agree with whole ones up to rounding."""
    by_rank = run_ranks(4, each_of, _step_with_cut_matrices, cases).check().results
    for (different, num_owners), case in zip(itertools.chain(*by_rank), 4 * cases, strict=True):
        assert different == [], case
        assert max(num_owners) == 4 and min(num_owners) >= 2, case


def _memory_of_steps(staging_bytes: int | None) -> list[int]:
    exchange = {"comm_dtype": "bf16", "staging_bytes": staging_bytes}
    optimizers = build_optimizers(2, {}, exchange, cases=[(64, [40, 24])] * 9)
    engine = optimizers.sharded.engine
    (memory,) = (x for x in vars(engine._arena).values() if torch.is_tensor(x))
    between_steps = memory.untyped_storage().nbytes()
    in_step = 0

    def orthogonalize(updates, results, overlap_fn=None, original=engine.orthogonalize):
        nonlocal in_step
        for params in original(updates, results):
            in_step = max(in_step, memory.untyped_storage().nbytes())
            yield params

    engine.orthogonalize = orthogonalize
    step_both(optimizers, "bf16")
    assert optimizers.differences() == []
    between_steps = max(between_steps, memory.untyped_storage().nbytes())
    return [between_steps, in_step, engine.staging_bytes]


def test_staging_memory_is_freed_and_within_the_limit():
    """A step takes the staging memory of the report, and frees it at its end."""
    for (before, free, free_bytes), (after, limited, limited_bytes) in results(2)["memory"]:
        assert before == after == 0
        # Without a limit it takes more: otherwise this would test nothing.
        assert 0 < limited == limited_bytes <= 35_000 < free == free_bytes


def _nan_in_one_matrix() -> list[str]:
    optimizers = build_optimizers(2, {}, {"comm_dtype": "bf16"})
    optimizers.set_gradients(0)
    param = optimizers.params[0][0]
    param.grad._local_tensor.fill_(float("nan"))
    optimizers.sharded.step()
    optimizers.whole.step()
    return optimizers.differences(atol=1e-2)


def test_nan_in_one_matrix_does_not_reach_another():
    """NaN in one matrix reaches no other."""
    for different in results(2)["nan"]:
        assert {each.partition(":")[0] for each in different} == {"layer.0.weight"}


def _zero_gradients(comm_dtype: str) -> list[float]:
    settings = {"weight_decay": 0.0}
    optimizers = build_optimizers(3, settings, {"comm_dtype": comm_dtype})
    before = optimizers.state()
    for param, _, _ in optimizers.params:
        if param.grad is None:
            param.grad = param.detach() * 0 if param._local_tensor.numel() else None
    optimizers.sharded.step()
    after = optimizers.state()
    return [
        (a - b).abs().max().item() if a.numel() else 0.0
        for (a, _), (b, _) in zip(before, after, strict=True)
    ]


def test_zero_gradients_give_a_zero_update():
    """Gradients of zero give an update of zero, as no norm divides by zero."""
    changes = [*itertools.chain(*itertools.chain(*results(3)["zeros"]))]
    assert changes and not any(changes)


def _step_after_an_abandoned_one() -> list[str]:
    optimizers = build_optimizers(1, {}, {"comm_dtype": "bf16"})
    engine = optimizers.sharded.engine
    rows = {each: each.of(each.param._local_tensor.detach() + 1) for each in engine.handles}
    abandoned = engine.orthogonalize(rows, rows)
    next(abandoned)
    abandoned.close()
    step_both(optimizers, "bf16")
    return optimizers.differences()


def test_exception_in_a_step_leaves_nothing_to_the_next():
    """A step that ended early leaves no norms to the next one."""
    assert results(1)["abandoned"] == [[]]


def _step_after_messages_were_left(grid: dict[str, int]) -> list[Any]:
    """Abandon a step whose gathers, or what replicas pass on, are under way, and step again."""
    exchange = {"comm_dtype": "bf16", "num_buckets": 4}
    cases = [*[(12, [12, 12])] * 8, (12, [16, 16])]
    if grid:
        cases = [(cols, [sum(rows)]) for cols, rows in cases]
    optimizers = build_optimizers(1 if grid else 2, {}, exchange, cases=cases, **grid)
    engine = optimizers.sharded.engine
    rows = {each: each.of(each.param._local_tensor.detach() + 1) for each in engine.handles}
    with collectives_run("at_wait") as timing:
        abandoned = engine.orthogonalize(rows, rows)
        next(abandoned)
        (runner,) = engine.runners
        while grid and ("scatter", 0) not in runner.in_flight:
            next(abandoned)
        under_way = len(runner.in_flight)
        abandoned.close()
        step_both(optimizers, "bf16")
    return [under_way, optimizers.differences(), timing.breaches]


@pytest.mark.cpu_only
def test_messages_of_an_abandoned_step_are_waited_for():
    """Messages of an abandoned step end before the next one uses their memory."""
    for under_way, different, breaches in itertools.chain(*results(2)["messages"]):
        assert under_way > 0 and different == [] and breaches == []


BYTES = list(
    itertools.product(("bf16", "fp32"), ({}, {"num_replicas": 2}, {"num_tensor_ranks": 2}))
)


def _each(function: Callable[..., Any], *cases: Sequence[Any]) -> list[Any]:
    return [function(*case) for case in cases]


_MESSAGES = partial(_each, _step_after_messages_were_left, [{}], [{"num_replicas": 2}])
results = cached_cases(
    {
        1: {"abandoned": _step_after_an_abandoned_one},
        2: {
            "memory": partial(_each, _memory_of_steps, [None], [35_000]),
            "nan": _nan_in_one_matrix,
            **({"messages": _MESSAGES} if kind() == "cpu" else {}),
        },
        3: {"zeros": partial(_each, _zero_gradients, ["bf16"], ["fp32"])},
        4: {"bytes": partial(_each, _count_bytes, *BYTES)},
    }
)
