# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Order of a step, and of collectives that start behind others."""

import itertools
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, each_of

from megatron_muon.runtime.exchange import Chain

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


@pytest.mark.ranks
@pytest.mark.megatron
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


def _work(log: list[str], name: str) -> Any:
    return SimpleNamespace(wait=lambda: log.append(f"waited for {name}"))


def test_host_waits_on_gloo():
    """On gloo the host waits for a collective before it starts the next one."""
    log: list[str] = []

    def start(name: str, work: Any = None) -> Any:
        log.append(f"started {name}")
        return work

    chain = Chain(torch.device("cpu"))
    started = [
        chain.after(_work(log, "first"), lambda: start("after first", _work(log, "passed on"))),
        chain.after(None, lambda: start("after nothing")),
    ]
    assert log == ["waited for first", "started after first", "started after nothing"]
    assert started[0] is not None and started[1] is None


def test_second_stream_waits_for_the_step_and_earlier_work():
    """A second stream waits for the step and for the scatter, and the step for neither."""
    log: list[str] = []
    current = "step"

    def new_stream(device: torch.device) -> Any:
        assert device == torch.device("cuda", 1)
        return SimpleNamespace(wait_stream=lambda stream: log.append(f"second waits for {stream}"))

    @contextmanager
    def stream(entered: Any) -> Any:
        nonlocal current
        current = "second"
        yield
        current = "step"

    def start() -> str:
        log.append(f"{current} launches")
        return "work"

    scatter = SimpleNamespace(wait=lambda: log.append(f"{current} waits for the scatter"))
    with mock.patch.multiple(
        torch.cuda, Stream=new_stream, stream=stream, current_stream=lambda device: current
    ):
        chain = Chain(torch.device("cuda", 1))
        assert chain.after(scatter, start) == "work"
        assert chain.after(None, start) == "work"
        # The rank's own shard gets nothing, but it may send as an owner.
        assert chain.after(scatter, lambda: None) is scatter
        assert chain.after(None, lambda: None) is None
    behind_scatter = ["second waits for step", "second waits for the scatter"]
    behind_nothing = ["second waits for step"]
    assert log == [
        *(*behind_scatter, "second launches"),
        *(*behind_nothing, "second launches"),
        *behind_scatter,
        *behind_nothing,
    ]
