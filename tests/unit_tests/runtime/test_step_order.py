# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The order in which a rank launches, waits and computes is that of plan/schedule.py."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, each_of

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]

# What an action of the schedule does; replicas pass on what has come back.
CALLS = {
    "start_gather": ["start gather"],
    "wait_for_gather": ["wait gather"],
    "orthogonalize": ["orthogonalize"],
    "start_scatter": ["start scatter"],
    "finish_scatter": ["wait scatter"],
}
WITH_REPLICAS = {
    "start_scatter": ["start scatter", "wait scatter", "start spread"],
    "finish_scatter": ["wait spread"],
}
# About four matrices of one size for each rank, so that there are buckets enough.
SHARDS = [*[(12, [6, 6, 6, 6])] * 16, (12, [8, 8, 8, 8])]
REPLICAS = [*[(12, [12, 12])] * 16, (12, [16, 16])]
# The first one is whole on its rank, and another one travels.
WHOLE = [(8, [16, 0, 0, 0]), (12, [8, 8, 8, 8])]


def _order_of_a_step(num_buckets: int, num_replicas: int, matrices: Any) -> list[Any]:
    exchange = {"comm_dtype": "bf16", "num_buckets": num_buckets}
    grid = {"num_shards": 4 // num_replicas, "num_replicas": num_replicas}
    optimizers = build_optimizers(**grid, exchange=exchange, cases=matrices)
    engine = optimizers.sharded.engine
    (built,) = engine.runners
    log: list[str] = []

    def logged(part: Any, name: str) -> Any:
        """Log the start of a collective, and the wait for it."""

        def start() -> Any:
            work = part.start()
            log.append(f"start {name}")
            return SimpleNamespace(wait=lambda: (log.append(f"wait {name}"), work.wait()))

        return part and SimpleNamespace(start=start)

    num_exchanged = len(built.plan.buckets)
    for n, bucket in enumerate(built.buckets[:num_exchanged]):
        built.buckets[n] = bucket._replace(
            gather=logged(bucket.gather, f"gather {n}"),
            scatter=logged(bucket.scatter, f"scatter {n}"),
            sections=logged(bucket.sections, f"spread {n}"),
        )
    original = built.orthogonalize

    def orthogonalize(n):
        log.append(f"orthogonalize {n if n < num_exchanged else 'local'}")
        return original(n)

    built.orthogonalize = orthogonalize
    optimizers.set_gradients(0)
    optimizers.sharded.step()
    expected = []
    for kind, _, number in engine._actions:
        if kind == "local_matrices":
            expected.append("orthogonalize local")
        else:
            calls = CALLS | WITH_REPLICAS if num_replicas > 1 else CALLS
            expected += [f"{call} {number}" for call in calls[kind]]
    return [len(built.plan.buckets), log, expected]


def test_step_is_in_the_order_of_the_schedule():
    """Collectives and products of a step come in the order of the schedule."""
    cases = [(5, 1, SHARDS), (5, 2, REPLICAS), (2, 2, REPLICAS), (1, 1, WHOLE)]
    by_rank = run_ranks(4, each_of, _order_of_a_step, cases).check().results
    for (num_buckets, *_), found in zip(4 * cases, itertools.chain(*by_rank), strict=True):
        count, log, expected = found
        assert count == num_buckets
        assert log == expected
    *_, log, _ = by_rank[0][-1]
    assert log[:3] == ["start gather 0", "orthogonalize local", "wait gather 0"]
