# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What one rank does in a step, in order, over all of its plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.rank_plan import RankPlan
from megatron_muon.plan.schedule import Action, actions_of
from megatron_muon.plan.staging import StagingLayout


class LocalStack(NamedTuple):
    """A stack of local matrices.

    Args:
        plan: Position of its plan among those of the rank.
        number: Position in :attr:`RankPlan.local`.
    """

    plan: int
    number: int


@dataclass(frozen=True)
class RankSchedule:
    """The step of one rank.

    Args:
        rank_plans: What the rank does of each plan.
        actions: What it does, in order.
        local: Local matrices to orthogonalize at the beginning of each round, and at the end.
        staging: Memory of messages and stacks.
    """

    rank_plans: tuple[RankPlan, ...]
    actions: tuple[Action, ...]
    local: tuple[tuple[LocalStack, ...], ...]
    staging: StagingLayout

    @classmethod
    def build(cls, plans: Sequence[ExchangePlan], rank: int) -> "RankSchedule":
        """Work out what one rank does.

        Args:
            plans: Plans of the domains that the rank is in, in the order in which it has them.
            rank: Rank of the job.
        """
        rank_plans = tuple(RankPlan.build(plan, rank) for plan in plans)
        actions = actions_of([each.order for each in rank_plans])
        staging = [each.staging(plan.wire) for each, plan in zip(rank_plans, plans, strict=True)]
        return cls(rank_plans, actions, _deal(rank_plans, actions), StagingLayout.build(staging))


def _deal(
    rank_plans: Sequence[RankPlan], actions: Sequence[Action]
) -> tuple[tuple[LocalStack, ...], ...]:
    """Deal local matrices out to the rounds in which the rank has the least to do, and the end.

    There they fill the time in which the last results travel.
    """
    load_s = [
        rank_plans[plan].bucket_load_s[number]
        for kind, plan, number in actions
        if kind == "orthogonalize"
    ]
    load_s.append(0.0)
    local = [
        (seconds, LocalStack(plan, number))
        for plan, rank_plan in enumerate(rank_plans)
        for number, seconds in enumerate(rank_plan.local_load_s)
    ]
    dealt: list[list[LocalStack]] = [[] for _ in load_s]
    # Longest first, always to the quietest round: the usual greedy rule for even loads.
    for seconds, stack in sorted(local, key=lambda each: (-each[0], each[1])):
        quietest = min(range(len(load_s)), key=lambda number: (load_s[number], number))
        load_s[quietest] += seconds
        dealt[quietest].append(stack)
    return tuple(tuple(sorted(stacks)) for stacks in dealt)
