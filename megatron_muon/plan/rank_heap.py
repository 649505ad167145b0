# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks in the order of a number that changes."""

import heapq
from collections.abc import Iterable, Mapping


class RankHeap:
    """Ranks, those with the smallest or with the largest number first.

    A rank whose number changes is pushed again. An entry that no longer equals the number is
    dropped when it comes to the top. That keeps a change at log(ranks), where searching for the old
    entry would cost all of them.

    Args:
        values: The number of each rank, as it is now. Who changes one pushes the rank.
        ranks: Those to choose from.
        is_descending: Whether the largest number comes first. Of equal ones the lower rank does.
    """

    def __init__(
        self, values: Mapping[int, float], ranks: Iterable[int], *, is_descending: bool = False
    ) -> None:
        self._values = values
        self._sign = -1.0 if is_descending else 1.0
        self._heap = [(self._sign * values[rank], rank) for rank in ranks]
        heapq.heapify(self._heap)

    def push(self, rank: int) -> None:
        """Add a rank with the number that it has now."""
        heapq.heappush(self._heap, (self._sign * self._values[rank], rank))

    def first(self) -> int:
        """Return the first rank."""
        while not self._holds(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def first_few(self, count: int) -> list[int]:
        """Return the first ranks, as many as asked for if there are."""
        found: list[tuple[float, int]] = []
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            # A number that came back has two equal entries.
            if self._holds(entry) and entry not in found[-1:]:
                found.append(entry)
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [rank for _, rank in found]

    def _holds(self, entry: tuple[float, int]) -> bool:
        value, rank = entry
        return value == self._sign * self._values[rank]
