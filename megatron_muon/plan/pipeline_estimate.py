# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How long the buckets of a plan take, one behind the other, on all ranks."""

from collections.abc import Mapping, Sequence


def pipeline_seconds(
    bucket_load_s: Sequence[Mapping[int, float]],
    local_load_s: Mapping[int, float],
    traffic_s: Sequence[float],
) -> float:
    """Estimate a step: traffic runs beside Newton-Schulz, and a collective waits for its last rank.

    A rank may be ahead of another by about a bucket, no more: it launches the gather of bucket
    ``i + 1`` when that of bucket ``i`` has arrived. A gather ends when all ranks have launched it.

    Args:
        bucket_load_s: For each bucket, seconds of Newton-Schulz by rank.
        local_load_s: Seconds of local matrices by rank. They fill the buckets where the rank has
            least to do.
        traffic_s: For each bucket, seconds of its messages, one way.
    """
    ranks = {*local_load_s, *(rank for bucket in bucket_load_s for rank in bucket)}
    if not bucket_load_s:
        return max(local_load_s.values(), default=0.0)
    fillers = {}
    for rank in ranks:
        loads = [bucket.get(rank, 0.0) for bucket in bucket_load_s]
        fillers[rank] = _fill(loads, local_load_s.get(rank, 0.0))
    # The first gather starts at once; nothing can hide it but local matrices.
    clock = dict.fromkeys(ranks, 0.0)
    link = gathered = traffic_s[0]
    scattered = 0.0
    for index, bucket in enumerate(bucket_load_s):
        for rank in ranks:
            clock[rank] = max(clock[rank] + fillers[rank][index], gathered)
        # The next gather starts when the slowest rank comes to launch it and the link is free.
        following = gathered
        if index + 1 < len(bucket_load_s):
            link = following = max([link, *clock.values()]) + traffic_s[index + 1]
        for rank in ranks:
            clock[rank] += bucket.get(rank, 0.0)
        # The scatter of this bucket needs the results of every rank.
        link = max(link, max(clock.values(), default=0.0)) + traffic_s[index]
        # Only the scatter before is waited for: its rows are applied while this one travels.
        for rank in ranks:
            clock[rank] = max(clock[rank], scattered)
        gathered, scattered = following, link
    return max(link, max(clock.values(), default=0.0))


def _fill(loads: Sequence[float], filler: float) -> list[float]:
    """Share a filler out over loads, so that the smallest loads become equal.

    Like water that is poured over steps: ``level`` is where it stands.
    """
    level = 0.0
    total, count = filler, 0
    for load in sorted(loads):
        if count and load * count >= total:
            break
        total += load
        count += 1
        level = total / count
    return [max(0.0, level - load) for load in loads]
