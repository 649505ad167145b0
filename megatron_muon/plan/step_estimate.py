# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How long a step takes: every rank goes through its rounds, and waits for the others.

A model of discrete events. A rank computes, launches collectives and waits for them in the order of
:mod:`megatron_muon.plan.schedule`. That order is fixed, so nothing is drawn at random: an event is
as late as the last of those it needs.

- A collective starts when all ranks of its plan have launched it, and have ended the one before it
  in that plan: a message needs both of its ranks.
- A gather ends on a rank when the rows that it owns have passed its link, a scatter on all ranks
  when the results of all owners have passed theirs. A link carries one collective at a time, in the
  order in which they start.
- Local matrices fill the rounds in which a rank has least to do, and the end of the step, where the
  last scatters travel.

What it leaves out: the links of ranks that hold rows and own none of a bucket, norms, copies in
memory, and that Newton-Schulz and traffic slow each other down.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_muon.plan.schedule import (
    Depth,
    finished_after,
    finished_in_round,
    rounds_of,
    started_before,
    started_in_round,
)


@dataclass(frozen=True)
class BucketSeconds:
    """What a bucket takes, in seconds by rank; a rank that is not there takes none.

    Args:
        load_s: Newton-Schulz.
        gather_s: Its rows, over the link of an owner.
        scatter_s: Its results, over the link of an owner.
    """

    load_s: Mapping[int, float]
    gather_s: Mapping[int, float]
    scatter_s: Mapping[int, float]


@dataclass(frozen=True)
class PlanSeconds:
    """What a plan takes.

    Args:
        ranks: Ranks that join its collectives.
        buckets: Its buckets.
        depth: How many of them are under way.
    """

    ranks: Sequence[int]
    buckets: Sequence[BucketSeconds]
    depth: Depth


def step_seconds(
    plans: Sequence[PlanSeconds], local_load_s: Mapping[int, float]
) -> dict[int, float]:
    """Estimate when each rank is done with a step.

    Args:
        plans: Plans of all domains, in the order in which ranks have them.
        local_load_s: Seconds of local matrices by rank, and of anything else that needs no other
            rank.
    """
    return _Simulation(plans, local_load_s).run()


@dataclass
class _Collective:
    """A collective, and what is known of it so far.

    Args:
        plan: Number of its plan.
        seconds: Of each owner's messages over its link.
        is_scatter: Whether all ranks wait for the last owner.
        num_launched: Ranks that have launched it.
        ended_s: When it ended on each rank; empty until it has started.
        waiting: Ranks that wait for it.
    """

    plan: int
    seconds: Mapping[int, float]
    is_scatter: bool
    num_launched: int = 0
    ended_s: dict[int, float] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)


class _Work(NamedTuple):
    seconds: float


class _Launch(NamedTuple):
    collective: _Collective


class _Wait(NamedTuple):
    collective: _Collective


type _Event = _Work | _Launch | _Wait


class _Simulation:
    def __init__(self, plans: Sequence[PlanSeconds], local_load_s: Mapping[int, float]) -> None:
        self._plans = plans
        self._local_load_s = local_load_s
        self._plans_of: dict[int, list[int]] = {rank: [] for rank in local_load_s}
        for number, plan in enumerate(plans):
            for rank in plan.ranks:
                self._plans_of.setdefault(rank, []).append(number)
        self._gathers = [
            [_Collective(number, bucket.gather_s, False) for bucket in plan.buckets]
            for number, plan in enumerate(plans)
        ]
        self._scatters = [
            [_Collective(number, bucket.scatter_s, True) for bucket in plan.buckets]
            for number, plan in enumerate(plans)
        ]
        self._link_free_s = dict.fromkeys(self._plans_of, 0.0)
        # Of each plan: when its last collective ended; and the collectives that all ranks have
        # launched and that have not started. It is known when the first of them starts.
        self._last_ended_s = [0.0] * len(plans)
        self._launched: list[deque[_Collective]] = [deque() for _ in plans]
        # What comes next, by time: a rank goes on, or a collective of a plan starts. Plans are
        # numbered ~plan, which is negative: of equal times a collective comes first.
        self._due: list[tuple[float, int]] = []

    def run(self) -> dict[int, float]:
        """Run all ranks to their end."""
        programs = {rank: self._program(rank) for rank in sorted(self._plans_of)}
        ended_s: dict[int, float] = {}
        self._due = [(0.0, rank) for rank in programs]
        while self._due:
            now, number = heapq.heappop(self._due)
            if number < 0:
                self._start(~number, now)
            elif self._advance(programs[number], number, now):
                ended_s[number] = now
        # A schedule in which ranks wait for each other in a circle would end early.
        if len(ended_s) < len(programs):
            raise ValueError(
                f"step estimate: expected {len(programs)} ranks to end, got {len(ended_s)}. Check "
                "that every plan has a depth of 1 or more."
            )
        return ended_s

    def _advance(self, program: Iterator[_Event], rank: int, now: float) -> bool:
        """Let a rank go on until it has to wait, and return whether it has ended."""
        for event in program:
            if isinstance(event, _Launch):
                self._launch(event.collective, now)
                continue
            if isinstance(event, _Work):
                heapq.heappush(self._due, (now + event.seconds, rank))
            elif event.collective.ended_s:
                heapq.heappush(self._due, (max(now, event.collective.ended_s[rank]), rank))
            else:
                event.collective.waiting.append(rank)
            return False
        return True

    def _launch(self, collective: _Collective, now: float) -> None:
        """Launch a collective on one more rank."""
        collective.num_launched += 1
        if collective.num_launched == len(self._plans[collective.plan].ranks):
            self._launched[collective.plan].append(collective)
            if len(self._launched[collective.plan]) == 1:
                self._schedule_start(collective.plan, now)

    def _schedule_start(self, plan: int, now: float) -> None:
        heapq.heappush(self._due, (max(now, self._last_ended_s[plan]), ~plan))

    def _start(self, plan: int, now: float) -> None:
        """Start the first collective of a plan that is due, and work out when it ends."""
        collective = self._launched[plan].popleft()
        ended_s = collective.ended_s
        for rank in self._plans[plan].ranks:
            ended_s[rank] = now
            seconds = collective.seconds.get(rank, 0.0)
            if seconds:
                ended_s[rank] = max(now, self._link_free_s[rank]) + seconds
                self._link_free_s[rank] = ended_s[rank]
        self._last_ended_s[plan] = max(ended_s.values())
        if collective.is_scatter:
            ended_s.update(dict.fromkeys(ended_s, self._last_ended_s[plan]))
        for rank in collective.waiting:
            heapq.heappush(self._due, (ended_s[rank], rank))
        if self._launched[plan]:
            self._schedule_start(plan, now)

    def _program(self, rank: int) -> Iterator[_Event]:
        """Yield what a rank does, in order."""
        numbers = self._plans_of[rank]
        plans = [self._plans[number] for number in numbers]
        counts = [len(plan.buckets) for plan in plans]
        rounds = rounds_of(counts)
        loads = [plans[turn.plan].buckets[turn.bucket].load_s.get(rank, 0.0) for turn in rounds]
        *fillers, last = _fill([*loads, 0.0], self._local_load_s.get(rank, 0.0))
        for number, plan in zip(numbers, plans, strict=True):
            for bucket in started_before(len(plan.buckets), plan.depth):
                yield _Launch(self._gathers[number][bucket])
        for turn, load_s, filler in zip(rounds, loads, fillers, strict=True):
            number, depth = numbers[turn.plan], plans[turn.plan].depth
            yield _Work(filler)
            yield _Wait(self._gathers[number][turn.bucket])
            started = started_in_round(turn.bucket, counts[turn.plan], depth)
            if started is not None:
                yield _Launch(self._gathers[number][started])
            yield _Work(load_s)
            finished = finished_in_round(turn.bucket, depth)
            if finished is not None:
                yield _Wait(self._scatters[number][finished])
            yield _Launch(self._scatters[number][turn.bucket])
        yield _Work(last)
        for number, plan in zip(numbers, plans, strict=True):
            for bucket in finished_after(len(plan.buckets), plan.depth):
                yield _Wait(self._scatters[number][bucket])


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
