# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How long a step takes: every rank goes through its rounds, and waits for the others.

A model of discrete events. A rank computes, launches collectives and waits for them in the order of
:mod:`megatron_muon.plan.schedule`. That order is fixed, so nothing is drawn at random: an event is
as late as the last of those it needs.

- A collective starts when all ranks of its plan have launched it, and have ended the one before it
  of its channel: a message needs both of its ranks. A plan has one channel between owners and
  holders, and one between replicas.
- A gather ends on a rank when its link has carried all rows that the rank sends and receives, and
  the holders that send to it have sent all that they send. A scatter ends on all ranks when all
  links have carried the results. Replicas then pass results on beside what their
  ranks do, one scatter after the other, and end together. A link carries one collective at a time,
  in the order in which they start. What replicas pass on does not slow messages down: under HSDP it
  takes other links, and under ZeRO-0 owners send little.
- Local matrices fill the rounds in which a rank has least to do, and the end of the step, where the
  last scatters travel.

What it leaves out: that under ZeRO-0 one communicator carries scatters and what replicas pass on,
one after the other; that a holder may be late because its link carries another plan's rows; norms,
copies in memory, and that Newton-Schulz and traffic slow each other down.
"""

import heapq
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from megatron_muon.plan.schedule import Action, ActionKind, PlanOrder, actions_of


@dataclass(frozen=True)
class BucketSeconds:
    """What a bucket takes, in seconds by rank; a rank that is not there takes none.

    Args:
        load_s: Newton-Schulz.
        gather_s: Its rows, over the link of a rank that sends or receives them.
        scatter_s: Its results, over such a link, in all scatters of the bucket.
        spread_s: What replicas pass on, over the link of each.
        edge_s: The share of the first product of Newton-Schulz, and of the last one, each. They
            are taken portion by portion where the bucket is portioned.
        sum_s: What each portion adds to the first product.
        sources_s: By owner, what the slowest holder that sends rows to it takes to send all.
    """

    load_s: Mapping[int, float]
    gather_s: Mapping[int, float]
    scatter_s: Mapping[int, float]
    spread_s: Mapping[int, float] = field(default_factory=dict)
    edge_s: Mapping[int, float] = field(default_factory=dict)
    sum_s: Mapping[int, float] = field(default_factory=dict)
    sources_s: Mapping[int, float] = field(default_factory=dict)

    def of_rank(self, rank: int) -> tuple[float, ...]:
        """Return what it takes on a rank."""
        mappings = (
            *(self.load_s, self.gather_s, self.scatter_s),
            *(self.spread_s, self.edge_s, self.sum_s, self.sources_s),
        )
        return tuple(mapping.get(rank, 0.0) for mapping in mappings)

    def on_ranks(self, rank_of: Mapping[int, int]) -> "BucketSeconds":
        """Put the rank that a mapping names in the place of each."""
        return BucketSeconds(
            **{
                each.name: {rank_of[rank]: s for rank, s in getattr(self, each.name).items()}
                for each in fields(self)
            }
        )


@dataclass(frozen=True)
class PlanSeconds:
    """What a plan takes.

    Args:
        ranks: Ranks that join its collectives.
        buckets: Its buckets.
        order: What of it decides the order of a step.
        latency_s: Seconds of a collective that carries nothing.
    """

    ranks: Sequence[int]
    buckets: Sequence[BucketSeconds]
    order: PlanOrder
    latency_s: float = 0.0


def step_seconds(
    plans: Sequence[PlanSeconds], local_load_s: Mapping[int, float]
) -> dict[int, float]:
    """Estimate when each rank is done with a step.

    Ranks that take the same seconds in the same plans do the same at the same time: one of them is
    run. Of thousands of ranks most own nothing of a plan, or matrices of the same shapes.

    Args:
        plans: Plans of all domains, in the order in which ranks have them.
        local_load_s: Seconds of local matrices by rank, and of anything else that needs no other
            rank.
    """
    seconds_of: dict[int, list[Hashable]] = {rank: [load] for rank, load in local_load_s.items()}
    for number, plan in enumerate(plans):
        for rank in plan.ranks:
            buckets = tuple(bucket.of_rank(rank) for bucket in plan.buckets)
            seconds_of.setdefault(rank, []).append((number, buckets))
    first: dict[tuple[Hashable, ...], int] = {}
    alike = {rank: first.setdefault(tuple(seconds), rank) for rank, seconds in seconds_of.items()}
    ended_s = _Simulation(
        [
            replace(plan, ranks=[rank for rank in plan.ranks if alike[rank] == rank])
            for plan in plans
        ],
        {rank: load for rank, load in local_load_s.items() if alike[rank] == rank},
    ).run()
    return {rank: ended_s[alike[rank]] for rank in sorted(alike)}


@dataclass
class _Collective:
    """A collective, and what is known of it so far.

    Args:
        channel: Number of its channel: collectives of one come one after the other.
        plan: Its plan, whose ranks join it.
        seconds: Of each rank's messages over its link.
        ends_together: Whether all ranks wait for the last one.
        sources_s: By rank, what the slowest of those that send to it takes.
        num_launched: Ranks that have launched it.
        ended_s: When it ended on each rank; empty until it has started.
        waiting: Numbers of programs that wait for it.
    """

    channel: int
    plan: PlanSeconds
    seconds: Mapping[int, float]
    ends_together: bool
    sources_s: Mapping[int, float] = field(default_factory=dict)
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


class _PlanEvents:
    """What the actions of one plan mean in the model."""

    def __init__(self, number: int, plan: PlanSeconds) -> None:
        num_gathers, num_scatters = plan.order.num_gathers, plan.order.num_scatters
        self._plan = plan
        self._gathers, self._scatters, self._spreads = [], [], []
        for bucket in plan.buckets:
            gather_s = _divided(bucket.gather_s, num_gathers)
            sources_s = _divided(bucket.sources_s, num_gathers)
            for _ in range(num_gathers):
                self._gathers.append(_Collective(2 * number, plan, gather_s, False, sources_s))
            # Each scatter of a bucket has an equal share of every owner's results.
            scatter_s = _divided(bucket.scatter_s, num_scatters)
            spread_s = _divided(bucket.spread_s, num_scatters)
            for _ in range(num_scatters):
                self._scatters.append(_Collective(2 * number, plan, scatter_s, True))
                self._spreads.append(_Collective(2 * number + 1, plan, spread_s, True))

    def of_action(self, kind: ActionKind, number: int, rank: int) -> Iterator[_Event]:
        """Yield what an action is on a rank."""
        has_replicas = self._plan.order.has_replicas
        if kind == "start_gather":
            yield _Launch(self._gathers[number])
        elif kind == "wait_for_gather":
            yield _Wait(self._gathers[number])
        elif kind == "first_product":
            bucket = number // self._plan.order.num_gathers
            sum_s = self._plan.buckets[bucket].sum_s.get(rank, 0.0)
            yield _Work(self._edge_s(bucket, rank) + sum_s)
        elif kind == "last_product":
            yield _Work(self._edge_s(number // self._plan.order.num_scatters, rank))
        elif kind == "orthogonalize":
            num_products = 2 * self._plan.order.num_gathers
            yield _Work(self.load_s(number, rank) - num_products * self._edge_s(number, rank))
        elif kind == "start_scatter":
            yield _Launch(self._scatters[number])
        elif kind == "finish_scatter":
            yield _Wait((self._spreads if has_replicas else self._scatters)[number])

    def relay(self, number: int) -> Iterator[_Event]:
        """Yield what passes the results of a scatter on, beside what the rank does."""
        if self._plan.order.has_replicas:
            yield _Wait(self._scatters[number])
            yield _Launch(self._spreads[number])

    def load_s(self, bucket: int, rank: int) -> float:
        """Return the Newton-Schulz seconds of a rank in a bucket."""
        return self._plan.buckets[bucket].load_s.get(rank, 0.0)

    def _edge_s(self, bucket: int, rank: int) -> float:
        """Return the seconds of a portion's first product, and of its last one."""
        if not self._plan.order.is_portioned:
            return 0.0
        return self._plan.buckets[bucket].edge_s.get(rank, 0.0) / self._plan.order.num_gathers


def _divided(seconds: Mapping[int, float], number: int) -> dict[int, float]:
    return {rank: each / number for rank, each in seconds.items()}


class _Simulation:
    def __init__(self, plans: Sequence[PlanSeconds], local_load_s: Mapping[int, float]) -> None:
        self._plans = plans
        self._local_load_s = local_load_s
        self._plans_of: dict[int, list[int]] = {rank: [] for rank in local_load_s}
        for number, plan in enumerate(plans):
            for rank in plan.ranks:
                self._plans_of.setdefault(rank, []).append(number)
        self._events = [_PlanEvents(number, plan) for number, plan in enumerate(plans)]
        # Of messages, and of what replicas pass on.
        self._links_free_s = [dict.fromkeys(self._plans_of, 0.0) for _ in range(2)]
        # Of each channel: when its last collective ended; and the collectives that all ranks have
        # launched and that have not started. It is known when the first of them starts.
        num_channels = 2 * len(plans)
        self._last_ended_s = [0.0] * num_channels
        self._launched: list[deque[_Collective]] = [deque() for _ in range(num_channels)]
        # A rank runs a program, which has its number. Beside it, it passes results on: that program
        # has as many added.
        self._first_relay = 1 + max(self._plans_of, default=0)
        # What comes next, by time: a program goes on, or a collective of a channel starts. Channels
        # are numbered ~channel, which is negative: of equal times a collective comes first.
        self._due: list[tuple[float, int]] = []

    def run(self) -> dict[int, float]:
        """Run all ranks to their end."""
        ranks = sorted(self._plans_of)
        programs = {rank: self._program(rank) for rank in ranks}
        programs |= {self._first_relay + rank: self._relays(rank) for rank in ranks}
        ended_s: dict[int, float] = {}
        self._due = [(0.0, number) for number in programs]
        while self._due:
            now, number = heapq.heappop(self._due)
            if number < 0:
                self._start(~number, now)
            elif self._advance(programs[number], number, now):
                ended_s[number] = now
        found = {rank: ended_s[rank] for rank in ranks if rank in ended_s}
        # A schedule in which ranks wait for each other in a circle would end early.
        if len(found) < len(ranks):
            raise ValueError(
                f"step estimate: expected {len(ranks)} ranks to end, got {len(found)}. Check that "
                "every plan has a depth of 1 or more."
            )
        return found

    def _advance(self, program: Iterator[_Event], number: int, now: float) -> bool:
        """Let a program go on until it has to wait, and return whether it has ended."""
        for event in program:
            if isinstance(event, _Launch):
                self._launch(event.collective, now)
                continue
            if isinstance(event, _Work):
                if not event.seconds:
                    continue
                heapq.heappush(self._due, (now + event.seconds, number))
            elif event.collective.ended_s:
                ended_s = event.collective.ended_s[number % self._first_relay]
                heapq.heappush(self._due, (max(now, ended_s), number))
            else:
                event.collective.waiting.append(number)
            return False
        return True

    def _launch(self, collective: _Collective, now: float) -> None:
        """Launch a collective on one more rank."""
        collective.num_launched += 1
        if collective.num_launched == len(collective.plan.ranks):
            self._launched[collective.channel].append(collective)
            if len(self._launched[collective.channel]) == 1:
                self._schedule_start(collective.channel, now)

    def _schedule_start(self, channel: int, now: float) -> None:
        heapq.heappush(self._due, (max(now, self._last_ended_s[channel]), ~channel))

    def _start(self, channel: int, now: float) -> None:
        """Start the first collective of a channel that is due, and work out when it ends."""
        collective = self._launched[channel].popleft()
        ended_s = collective.ended_s
        link_free_s = self._links_free_s[channel % 2]
        latency_s = collective.plan.latency_s
        for rank in collective.plan.ranks:
            ended_s[rank] = now + latency_s
            seconds = collective.seconds.get(rank, 0.0)
            if seconds:
                link_free_s[rank] = max(now, link_free_s[rank]) + seconds
                sent_s = now + collective.sources_s.get(rank, 0.0)
                ended_s[rank] = max(link_free_s[rank], sent_s) + latency_s
        self._last_ended_s[channel] = max(ended_s.values())
        if collective.ends_together:
            ended_s.update(dict.fromkeys(ended_s, self._last_ended_s[channel]))
        for number in collective.waiting:
            heapq.heappush(self._due, (ended_s[number % self._first_relay], number))
        if self._launched[channel]:
            self._schedule_start(channel, now)

    def _actions(self, rank: int) -> tuple[Action, ...]:
        return actions_of([self._plans[number].order for number in self._plans_of[rank]])

    def _relays(self, rank: int) -> Iterator[_Event]:
        """Yield how a rank passes results on, in order."""
        numbers = self._plans_of[rank]
        for kind, plan, number in self._actions(rank):
            if kind == "start_scatter":
                yield from self._events[numbers[plan]].relay(number)

    def _program(self, rank: int) -> Iterator[_Event]:
        """Yield what a rank does, in order."""
        numbers = self._plans_of[rank]
        actions = self._actions(rank)
        fillers = self._fillers(rank, actions)
        for kind, plan, number in actions:
            if kind == "local":
                yield _Work(fillers[number])
            else:
                yield from self._events[numbers[plan]].of_action(kind, number, rank)

    def _fillers(self, rank: int, actions: Sequence[Action]) -> list[float]:
        """Share out the rank's local load over its rounds and the end."""
        numbers = self._plans_of[rank]
        loads = [
            self._events[numbers[plan]].load_s(number, rank)
            for kind, plan, number in actions
            if kind == "orthogonalize"
        ]
        return _fill([*loads, 0.0], self._local_load_s.get(rank, 0.0))


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
