# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that will exchange are connected at construction, and no others."""

import itertools
from typing import Any
from unittest import mock

import pytest
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, each_of, init_group

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]


def _connected_and_used(num_buckets: int) -> list[Any]:
    """Return whom gathers and scatters connect, whom they send to in a step, and the sizes."""
    import torch.distributed as dist

    original = dist.all_to_all_single
    sizes: list[tuple[list[int], list[int]]] = []

    def recorded(output: Any, sent: Any, received: Any, sends: Any, **options: Any) -> Any:
        sizes.append((list(sends), list(received)))
        return original(output, sent, received, sends, **options)

    exchange = {"comm_dtype": "bf16", "num_buckets": num_buckets}
    with mock.patch.object(dist, "all_to_all_single", recorded):
        return _compared(build_optimizers(4, exchange=exchange), sizes)


def _compared(optimizers: Any, sizes: list[tuple[list[int], list[int]]]) -> list[Any]:
    connected = sizes.copy()
    sizes.clear()
    engine = optimizers.sharded.engine
    engine._arena.allocate()
    (buckets,) = engine.runners
    used = []
    for part in (buckets._gathers, buckets._scatters):
        for index in range(len(buckets.plan.buckets)):
            part.start(index).wait()
        used.append(_pairs(sizes))
        sizes.clear()
    all_sizes = {size for call in connected for end in call for size in end}
    return [[_pairs([call]) for call in connected], used, sorted(all_sizes)]


def _pairs(calls: list[Any]) -> list[list[int]]:
    """Return to whom, and from whom, anything was sent; what a rank sends itself is left out."""
    import torch.distributed as dist

    ranks = [rank for rank in range(len(calls[0][0])) if rank != dist.get_rank()]
    return [[rank for rank in ranks if any(call[end][rank] for call in calls)] for end in (0, 1)]


def test_construction_connects_the_ranks_that_a_step_uses():
    """Gathers and scatters apart, by one element each; and no others."""
    by_rank = run_ranks(4, each_of, _connected_and_used, [[3], [1]]).check().results
    for connected, used, sizes in itertools.chain(*by_rank):
        assert connected == used
        assert set(sizes) <= {0, 1}


def test_rank_without_messages_joins():
    """Rank 2 of three holds nothing of the one matrix, and joins the collectives."""
    assert run_ranks(3, _connect_two_of_three).check().results == [[0, 1], [0, 1], [0]]


def _connect_two_of_three() -> list[int]:
    import torch.distributed as dist

    original = dist.all_to_all_single
    sizes: set[int] = set()

    def recorded(output: Any, sent: Any, received: Any, sends: Any, **options: Any) -> Any:
        sizes.update(received, sends)
        return original(output, sent, received, sends, **options)

    init_group()
    dist.all_to_all_single = recorded
    # The last one is that of query, key and value.
    exchange = {"comm_dtype": "bf16", "cost_model": "stack_tiles=1"}
    build_optimizers(3, exchange=exchange, cases=[(24, [16, 16, 0])])
    return sorted(sizes)
