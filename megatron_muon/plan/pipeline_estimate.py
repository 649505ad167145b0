# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How long the buckets of a plan take, one behind the other, on all ranks."""

from collections.abc import Mapping, Sequence


def pipeline_seconds(
    work: Sequence[Mapping[int, float]], local: Mapping[int, float], traffic: Sequence[float]
) -> float:
    """Estimate a step: traffic runs beside the work, and a collective waits for its last rank.

    A rank may be ahead of another by about a bucket, no more: it launches the gather of bucket
    ``i + 1`` before it orthogonalizes bucket ``i``, and that gather ends when all ranks have
    launched it.

    Args:
        work: For each bucket, seconds of Newton-Schulz by rank.
        local: Seconds of local matrices by rank, which fill the buckets where the rank has least.
        traffic: For each bucket, seconds of its messages, one way.
    """
    ranks = {*local, *(rank for bucket in work for rank in bucket)}
    if not work:
        return max(local.values(), default=0.0)
    fillers = {
        rank: _fill([bucket.get(rank, 0.0) for bucket in work], local.get(rank, 0.0))
        for rank in ranks
    }
    clock = dict.fromkeys(ranks, 0.0)
    link = gathered = traffic[0]
    scattered = 0.0
    for index, bucket in enumerate(work):
        last_rank = max(clock.values(), default=0.0)
        following = gathered
        if index + 1 < len(work):
            link = following = max(link, last_rank) + traffic[index + 1]
        for rank in ranks:
            ready = max(clock[rank] + fillers[rank][index], gathered)
            clock[rank] = ready + bucket.get(rank, 0.0)
        link = max(link, max(clock.values(), default=0.0)) + traffic[index]
        for rank in ranks:
            clock[rank] = max(clock[rank], scattered)
        gathered, scattered = following, link
    return max(link, max(clock.values(), default=0.0))


def _fill(loads: Sequence[float], filler: float) -> list[float]:
    """Share out a filler over slots so that the least loaded become equal."""
    level = 0.0
    total, count = filler, 0
    for load in sorted(loads):
        if count and load * count >= total:
            break
        total += load
        count += 1
        level = total / count
    return [max(0.0, level - load) for load in loads]
