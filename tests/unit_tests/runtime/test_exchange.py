# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that will exchange are connected at construction, and no others."""

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, each_of

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]


def _connected_and_used(num_buckets: int, matrices: Any) -> list[Any]:
    """Return whom gathers and scatters connect, whom they send to in a step, and the sizes."""
    original = dist.all_to_all_single
    sizes: list[tuple[list[int], list[int]]] = []

    def recorded(output: Any, sent: Any, received: Any, sends: Any, **options: Any) -> Any:
        sizes.append((list(sends), list(received)))
        return original(output, sent, received, sends, **options)

    exchange = {"comm_dtype": "bf16", "num_buckets": num_buckets, "cost_model": "stack_tiles=1"}
    with mock.patch.object(dist, "all_to_all_single", recorded):
        engine = build_optimizers(4, exchange=exchange, cases=matrices).sharded.engine
        connected = sizes.copy()
        engine._arena.allocate()
        (runner,) = engine.runners
        used = []
        for part in (runner._gathers, runner._scatters):
            sizes.clear()
            for index in range(len(runner.plan.buckets)):
                part.start(index).wait()
            used.append(_pairs(sizes))
    all_sizes = {size for call in connected for end in call for size in end}
    return [[_pairs([call]) for call in connected], used, sorted(all_sizes)]


def _pairs(calls: list[Any]) -> list[list[int]]:
    """Return to whom, and from whom, anything was sent; what a rank sends itself is left out."""
    ranks = [rank for rank in range(len(calls[0][0])) if rank != dist.get_rank()]
    return [[rank for rank in ranks if any(call[end][rank] for call in calls)] for end in (0, 1)]


def test_construction_connects_the_ranks_that_a_step_uses():
    """Construction connects exactly the ranks that gathers and scatters use."""
    cases = [(3, None), (1, None), (1, [(24, [16, 16, 0, 0])])]
    by_rank = run_ranks(4, each_of, _connected_and_used, cases).check().results
    for rank, found in enumerate(by_rank):
        for connected, used, sizes in found:
            assert connected == used
            assert set(sizes) <= {0, 1}
        connected, _, sizes = found[-1]
        assert sizes == ([0, 1] if rank < 2 else [0])
