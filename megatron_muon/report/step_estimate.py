# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The predicted time of a step: every rank goes through its rounds, and waits for the others.

A model of discrete events. A rank computes, launches collectives and waits for them in the order of
:mod:`megatron_muon.plan.schedule`. No plan depends on it.

- A collective starts when all ranks of its plan have launched it, and have ended the one before it
  of its channel: a message needs both of its ranks. A plan has one channel between owners and
  holders, and one between replicas.
- A gather ends on a rank when its link has carried all rows that the rank sends and receives, and
  the holders that send to it have sent all that they send. A scatter ends on all ranks when all
  links have carried the results. Replicas then pass results on beside what their ranks do, one
  scatter after the other, and end together. A rank has one link, for messages and for what replicas
  pass on; it carries one collective at a time, in the order in which they start.
- Local matrices are spread evenly over the rounds and the end of the step, where the last results
  arrive. Element-wise passes over what a rank holds come before the first gather.

Not modelled: that under ZeRO-0 one communicator carries scatters and what replicas pass on, one
after the other; that a holder may be late because its link carries another plan's rows; and that
Newton-Schulz and traffic slow each other down.
"""

import heapq
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron_muon.plan.schedule import Action, ActionKind, actions_of
from megatron_muon.report.step_times import PlanTimes


def step_ns(
    plans: Sequence[PlanTimes],
    local_ns: Mapping[int, int],
    passes_ns: Mapping[int, int] | None = None,
) -> dict[int, int]:
    """Estimate when each rank is done with a step, in nanoseconds.

    Ranks with the same times in the same plans do the same at the same time: one of them is run. Of
    thousands of ranks most own nothing of a plan, or matrices of the same shapes.

    Args:
        plans: Plans of all domains, in the order in which ranks have them.
        local_ns: Newton-Schulz of local matrices by rank.
        passes_ns: Element-wise passes by rank; None for none.
    """
    starts_ns = passes_ns or {}
    times_of: dict[int, list[Hashable]] = {
        rank: [load_ns, starts_ns.get(rank, 0)] for rank, load_ns in local_ns.items()
    }
    for number, plan in enumerate(plans):
        for rank in plan.ranks:
            buckets = tuple(bucket.of_rank(rank) for bucket in plan.buckets)
            times_of.setdefault(rank, [0, starts_ns.get(rank, 0)]).append((number, buckets))
    first: dict[tuple[Hashable, ...], int] = {}
    stands_for = {rank: first.setdefault(tuple(times), rank) for rank, times in times_of.items()}
    ended_ns = _Simulation(
        [
            replace(plan, ranks=[rank for rank in plan.ranks if stands_for[rank] == rank])
            for plan in plans
        ],
        {rank: local_ns.get(rank, 0) for rank, other in stands_for.items() if other == rank},
        starts_ns,
    ).run()
    return {rank: ended_ns[stands_for[rank]] for rank in sorted(stands_for)}


@dataclass
class _Collective:
    """A collective, and what is known of it so far.

    Args:
        channel: Number of its channel: collectives of one come one after the other.
        plan: Its plan, whose ranks join it.
        link_ns: Of each rank's messages over its link.
        ends_together: Whether all ranks wait for the last one.
        sources_ns: By rank, the slowest of those that send to it.
        num_launched: Ranks that have launched it.
        ended_ns: When it ended on each rank; empty until it has started.
        waiting: Numbers of programs that wait for it.
    """

    channel: int
    plan: PlanTimes
    link_ns: Mapping[int, int]
    ends_together: bool
    sources_ns: Mapping[int, int] = field(default_factory=dict)
    num_launched: int = 0
    ended_ns: dict[int, int] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)


class _Work(NamedTuple):
    time_ns: int


class _Launch(NamedTuple):
    collective: _Collective


class _Wait(NamedTuple):
    collective: _Collective


type _Event = _Work | _Launch | _Wait


class _PlanEvents:
    """The actions of one plan as events."""

    def __init__(self, number: int, plan: PlanTimes) -> None:
        num_scatters = plan.order.num_scatters
        self._plan = plan
        self._gathers, self._scatters, self._all_gathers = [], [], []
        for bucket in plan.buckets:
            gather = _Collective(2 * number, plan, bucket.gather_ns, False, bucket.sources_ns)
            self._gathers.append(gather)
            # Each scatter of a bucket has an equal share of every owner's results.
            scatter_ns = _divided(bucket.scatter_ns, num_scatters)
            all_gather_ns = _divided(bucket.all_gather_ns, num_scatters)
            for _ in range(num_scatters):
                self._scatters.append(_Collective(2 * number, plan, scatter_ns, True))
                self._all_gathers.append(_Collective(2 * number + 1, plan, all_gather_ns, True))

    def of_action(self, kind: ActionKind, number: int, rank: int) -> Iterator[_Event]:
        """Yield the events of an action on a rank."""
        has_replicas = self._plan.order.has_replicas
        if kind == "start_gather":
            yield _Launch(self._gathers[number])
        elif kind == "wait_for_gather":
            yield _Wait(self._gathers[number])
        elif kind == "orthogonalize":
            yield _Work(self._plan.buckets[number].load_ns.get(rank, 0))
        elif kind == "start_scatter":
            yield _Launch(self._scatters[number])
        elif kind == "finish_scatter":
            yield _Wait((self._all_gathers if has_replicas else self._scatters)[number])

    def pass_on(self, number: int) -> Iterator[_Event]:
        """Yield what passes the results of a scatter on, beside what the rank does."""
        if self._plan.order.has_replicas:
            yield _Wait(self._scatters[number])
            yield _Launch(self._all_gathers[number])


def _divided(times_ns: Mapping[int, int], number: int) -> dict[int, int]:
    return {rank: time_ns // number for rank, time_ns in times_ns.items()}


class _Simulation:
    def __init__(
        self,
        plans: Sequence[PlanTimes],
        local_ns: Mapping[int, int],
        starts_ns: Mapping[int, int],
    ) -> None:
        self._plans = plans
        self._local_ns = local_ns
        self._starts_ns = starts_ns
        self._plans_of: dict[int, list[int]] = {rank: [] for rank in local_ns}
        for number, plan in enumerate(plans):
            for rank in plan.ranks:
                self._plans_of.setdefault(rank, []).append(number)
        self._events = [_PlanEvents(number, plan) for number, plan in enumerate(plans)]
        self._link_free_ns = dict.fromkeys(self._plans_of, 0)
        # Of each channel: when its last collective ended; and the collectives that all ranks have
        # launched and that have not started. It is known when the first of them starts.
        num_channels = 2 * len(plans)
        self._last_ended_ns = [0] * num_channels
        self._launched: list[deque[_Collective]] = [deque() for _ in range(num_channels)]
        # A rank runs a program, which has its number. Beside it, it passes results on: that program
        # has as many added.
        self._first_relay = 1 + max(self._plans_of, default=0)
        # What comes next, by time: a program goes on, or a collective of a channel starts. Channels
        # are numbered ~channel, which is negative: of equal times a collective comes first.
        self._due: list[tuple[int, int]] = []

    def run(self) -> dict[int, int]:
        """Run all ranks to their end."""
        ranks = sorted(self._plans_of)
        programs = {rank: self._program(rank) for rank in ranks}
        programs |= {self._first_relay + rank: self._relays(rank) for rank in ranks}
        ended_ns: dict[int, int] = {}
        self._due = [(self._starts_ns.get(number, 0), number) for number in programs]
        heapq.heapify(self._due)
        while self._due:
            now, number = heapq.heappop(self._due)
            if number < 0:
                self._start(~number, now)
            elif self._advance(programs[number], number, now):
                ended_ns[number] = now
        found = {rank: ended_ns[rank] for rank in ranks if rank in ended_ns}
        # A schedule in which ranks wait for each other in a circle would end early.
        if len(found) < len(ranks):
            raise ValueError(
                f"step estimate: expected {len(ranks)} ranks to end, got {len(found)}. Check that "
                "every plan has a depth of 1 or more."
            )
        return found

    def _advance(self, program: Iterator[_Event], number: int, now: int) -> bool:
        """Let a program go on until it has to wait, and return whether it has ended."""
        for event in program:
            if isinstance(event, _Launch):
                self._launch(event.collective, now)
                continue
            if isinstance(event, _Work):
                if not event.time_ns:
                    continue
                heapq.heappush(self._due, (now + event.time_ns, number))
            elif event.collective.ended_ns:
                ended_ns = event.collective.ended_ns[number % self._first_relay]
                heapq.heappush(self._due, (max(now, ended_ns), number))
            else:
                event.collective.waiting.append(number)
            return False
        return True

    def _launch(self, collective: _Collective, now: int) -> None:
        """Launch a collective on one more rank."""
        collective.num_launched += 1
        if collective.num_launched == len(collective.plan.ranks):
            self._launched[collective.channel].append(collective)
            if len(self._launched[collective.channel]) == 1:
                self._schedule_start(collective.channel, now)

    def _schedule_start(self, channel: int, now: int) -> None:
        heapq.heappush(self._due, (max(now, self._last_ended_ns[channel]), ~channel))

    def _start(self, channel: int, now: int) -> None:
        """Start the first collective of a channel that is due, and work out when it ends."""
        collective = self._launched[channel].popleft()
        ended_ns = collective.ended_ns
        link_free_ns = self._link_free_ns
        latency_ns = collective.plan.latency_ns
        for rank in collective.plan.ranks:
            ended_ns[rank] = now + latency_ns
            time_ns = collective.link_ns.get(rank, 0)
            if time_ns:
                link_free_ns[rank] = max(now, link_free_ns[rank]) + time_ns
                sent_ns = now + collective.sources_ns.get(rank, 0)
                ended_ns[rank] = max(link_free_ns[rank], sent_ns) + latency_ns
        self._last_ended_ns[channel] = max(ended_ns.values())
        if collective.ends_together:
            ended_ns.update(dict.fromkeys(ended_ns, self._last_ended_ns[channel]))
        for number in collective.waiting:
            heapq.heappush(self._due, (ended_ns[number % self._first_relay], number))
        if self._launched[channel]:
            self._schedule_start(channel, now)

    def _actions(self, rank: int) -> tuple[Action, ...]:
        return actions_of([self._plans[number].order for number in self._plans_of[rank]])

    def _relays(self, rank: int) -> Iterator[_Event]:
        """Yield how a rank passes results on, in order."""
        numbers = self._plans_of[rank]
        for kind, plan, number in self._actions(rank):
            if kind == "start_scatter":
                yield from self._events[numbers[plan]].pass_on(number)

    def _program(self, rank: int) -> Iterator[_Event]:
        """Yield what a rank does, in order."""
        numbers = self._plans_of[rank]
        actions = self._actions(rank)
        num_slots = sum(action.kind == "local" for action in actions)
        for kind, plan, number in actions:
            if kind == "local":
                yield _Work(self._local_ns.get(rank, 0) // num_slots)
            else:
                yield from self._events[numbers[plan]].of_action(kind, number, rank)
