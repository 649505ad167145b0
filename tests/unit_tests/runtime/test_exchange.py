# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that will exchange are connected at construction, and no others."""

from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, init_group

pytestmark = pytest.mark.ranks


def _connected_and_used(num_shards: int, exchange: dict[str, Any]) -> dict[str, list[list[int]]]:
    """Return the sizes of messages, sent and received, at construction and in a step."""
    import torch.distributed as dist

    original = dist.all_to_all_single
    sizes: list[tuple[list[int], list[int]]] = []

    def recorded(output: Any, sent: Any, received: Any, sends: Any, **options: Any) -> Any:
        sizes.append((list(sends), list(received)))
        return original(output, sent, received, sends, **options)

    init_group()
    dist.all_to_all_single = recorded
    optimizers = build_optimizers(num_shards, exchange=exchange)
    connected = list(sizes)
    sizes.clear()
    optimizers.set_gradients(0)
    optimizers.sharded.step()
    # Odd collectives of a step are gathers or scatters as their buckets overlap: only the pairs
    # count here.
    return {"connected": _pairs(connected), "used": _pairs(sizes), "sizes": [_all_sizes(connected)]}


def _pairs(sizes: list[Any]) -> list[list[int]]:
    """Return to whom, and from whom, anything was sent."""
    return [
        [rank for rank in range(len(sizes[0][end])) if any(each[end][rank] for each in sizes)]
        for end in (0, 1)
    ]


def _all_sizes(sizes: list[Any]) -> list[int]:
    return sorted({size for each in sizes for end in each for size in end})


@pytest.mark.parametrize("bucket_numel", [1500, 10**6], ids=["buckets", "one_bucket"])
def test_construction_connects_the_ranks_that_a_step_uses(bucket_numel):
    """The same ranks as the first step does, by one element each."""
    exchange = {"wire": "bf16", "bucket_numel": bucket_numel}
    for found in run_ranks(4, _connected_and_used, 4, exchange).check().results:
        assert found["connected"] == found["used"]
        assert set(found["sizes"][0]) <= {0, 1}


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
    build_optimizers(3, exchange={"wire": "bf16"}, cases=[(24, [16, 16, 0])])
    return sorted(sizes)
