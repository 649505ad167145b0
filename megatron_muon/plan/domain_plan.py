# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The plan of a domain: of all its instances together, or of groups of them.

An instance is one replica of every shard: an optimizer instance of HSDP, a rank of ZeRO-0. If all
instances share the work, a matrix is orthogonalized once, and its result travels to all of them.
Over slow links that may take longer than the work it saves. Then groups of instances each
orthogonalize all matrices. With R instances in groups of g, a rank has R / g times the work. From
other instances it receives (g - 1) / g of its results, where sharing brings it (R - 1) / R.

All groups run the plan of the first one, each on its own ranks. So they do the same operations on
the same stacks, and instances stay equal, as they do with an optimizer that needs no exchange. For
this groups split no matrix, and use no kernel that each rank chooses by timing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_muon.plan.assignment import (
    Assignment,
    Objective,
    Thresholds,
    assignments,
    matrix_seconds,
)
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.layout import MatrixLayout, on_ranks
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.plan.wire import Wire

# Sets of ranks that hold the same rows, each ascending and as long as the others.
type Replicas = Sequence[Sequence[int]]

# Groups do more work, and the estimate errs: they have to shorten the step by 10 %.
_WORTH_WORK = 0.9


def plan_domain(
    matrices: Sequence[MatrixLayout],
    replicas: Replicas,
    cost: CostModel,
    wire: Wire,
    settings: ExchangeSettings,
    *,
    load_s: Mapping[int, float],
    num_kinds: int = 1,
    objective: Objective = "joint",
) -> ExchangePlan:
    """Plan for all instances of a domain, or for the first group of them if groups are faster.

    Every rank of the domain comes to the same plan. :func:`of_group` is that of another group.

    Args:
        matrices: Layouts, in parameter order, of the whole domain.
        replicas: All ranks of the domain, by the rows that they hold.
        cost: Rates of the machine.
        wire: What travels.
        settings: Groups of instances, which :func:`groups_problem` has checked, staging memory,
            numbers of parts, portions.
        load_s: Seconds that ranks of the domain spend on other matrices.
        num_kinds: Kinds that share the staging memory.
        objective: How owners are chosen.
    """
    planner = _DomainPlanner(matrices, replicas, cost, wire, settings, load_s, num_kinds, objective)
    num_instances = len(replicas[0])
    if settings.instance_groups is not None:
        # A domain without replicas is one instance, whatever number others have.
        return planner.plan(max(1, num_instances // settings.instance_groups))
    shared = planner.plan(num_instances)
    # Groups would not use it.
    if settings.names_a_kernel:
        return shared
    size = planner.promising_size(shared.predicted_step_s)
    if size == num_instances:
        return shared
    # Only the most promising size is planned: planning is long for many ranks.
    groups = planner.plan(size, has_alternatives=False)
    is_shorter = groups.predicted_step_s <= _WORTH_WORK * shared.predicted_step_s
    is_small = groups.staging_bytes <= max(planner.staging_bytes, shared.staging_bytes)
    return groups if is_shorter and is_small else shared


@dataclass(frozen=True)
class _DomainPlanner:
    """Plans of a domain, for one size of groups after another; see :func:`plan_domain`."""

    matrices: Sequence[MatrixLayout]
    replicas: Replicas
    cost: CostModel
    wire: Wire
    settings: ExchangeSettings
    load_s: Mapping[int, float]
    num_kinds: int
    objective: Objective

    @property
    def staging_bytes(self) -> int:
        """Memory that a plan of this kind stays within if it can."""
        return self.settings.wanted_staging_bytes // self.num_kinds

    @cached_property
    def _untimed(self) -> CostModel:
        return self.cost.untimed

    def plan(self, size: int, *, has_alternatives: bool = True) -> ExchangePlan:
        """Plan for the first instances, so many of them.

        Args:
            size: Instances that share the work.
            has_alternatives: Whether a second choice of owners is planned too.
        """
        num_instances = len(self.replicas[0])
        matrices, load_s, cost = self.matrices, self.load_s, self.cost
        max_parts = self.settings.max_parts
        if size < num_instances:
            load_s = _load_of_first_group(self.replicas, size, load_s)
            matrices = on_ranks(matrices, {rank: rank for rank in load_s})
            # Owners of a split matrix add up in the order of their links, which may differ between
            # groups. Kernels that are chosen by timing may differ too. Other last bits would then
            # make instances drift apart.
            max_parts, cost = 1, self._untimed
        choices = assignments(
            matrices,
            cost,
            self.wire,
            objective=self.objective,
            max_parts=max_parts,
            initial_load_s=load_s,
        )

        def plan_of(assignment: Assignment) -> ExchangePlan:
            """Plan with some owners."""
            return ExchangePlan.build(
                matrices,
                assignment,
                cost,
                self.wire,
                staging_bytes=self.staging_bytes,
                is_limit=self.settings.staging_bytes is not None,
                may_portion=self.settings.overlap_within_matrices,
                num_groups=num_instances // size,
            )

        best, *others = choices if has_alternatives else choices[:1]
        return _fastest(plan_of, best, others, self.staging_bytes)

    def promising_size(self, shared_s: float) -> int:
        """Return the size of groups that promise the shortest step; all instances if none does.

        Args:
            shared_s: Predicted step if all instances share the work.
        """
        size, about_s = len(self.replicas[0]), shared_s
        for smaller in _smaller_divisors(size):
            if _lie_alike(self.replicas, smaller, self.cost):
                seconds = _about_seconds(
                    self.matrices, self.replicas, smaller, self._untimed, self.wire, self.load_s
                )
                if seconds <= _WORTH_WORK * about_s:
                    size, about_s = smaller, seconds
        return size


def _fastest(
    plan_of: Callable[[Assignment], ExchangePlan],
    best: Assignment,
    others: Sequence[Assignment],
    staging_bytes: int,
) -> ExchangePlan:
    """Return the plan with the shortest predicted step, that of the best owners if steps are equal.

    Args:
        plan_of: Makes a plan.
        best: The best owners by a rough estimate.
        others: Other owners, with more traffic.
        staging_bytes: Memory that the plan of others may take, if that of the best takes less.
    """
    found = plan_of(best)
    for other in others:
        wanted_s = found.predicted_step_s / Thresholds.equal_step
        # A step takes no less than its busiest rank.
        if max(other.load_s.values()) <= wanted_s:
            plan = plan_of(other)
            is_small = plan.staging_bytes <= max(staging_bytes, found.staging_bytes)
            if plan.predicted_step_s <= wanted_s and is_small:
                found = plan
    return found


def groups_problem(
    domains: Sequence[Replicas], settings: ExchangeSettings, *, most: int
) -> str | None:
    """Describe a number of groups that instances cannot form, or return None.

    Args:
        domains: Replicas of each domain of a rank.
        settings: The number of groups.
        most: Instances of the domain of the job that has most of them.
    """
    groups = settings.instance_groups
    if groups is None or groups == 1:
        return None
    if most == 1:
        return (
            "exchange.instance_groups: expected ranks that hold the same rows, as those of HSDP or "
            f"of ZeRO-0 do, got none for {groups} groups. Leave it out."
        )
    for replicas in domains:
        num_instances = len(replicas[0])
        # A domain without replicas has nothing to group, but another one has.
        if num_instances == 1:
            continue
        if num_instances % groups:
            return (
                f"exchange.instance_groups: expected a divisor of the {num_instances} instances "
                f"that hold the same rows, got {groups}. Leave it out, or choose a divisor."
            )
        if not all(map(_ascend, _ranks_of_groups(replicas, num_instances // groups))):
            return (
                f"exchange.instance_groups: expected {groups} groups whose ranks hold rows in the "
                "same order, got ranks in another order. Leave it out, or order the ranks of each "
                "instance alike."
            )
    return None


def most_instances(domains: Sequence[Replicas]) -> int:
    """Return how many instances the domain with most of them has; 1 of no domains."""
    return max([len(replicas[0]) for replicas in domains], default=1)


def group_of(plan: ExchangePlan, replicas: Replicas, rank: int) -> int:
    """Return the number of the group of instances that a rank is in."""
    (ranks,) = (ranks for ranks in replicas if rank in ranks)
    return list(ranks).index(rank) * plan.num_groups // len(ranks)


def of_group(plan: ExchangePlan, replicas: Replicas, number: int) -> ExchangePlan:
    """Return the plan of a group of instances, which is that of the first one on other ranks."""
    return plan.on_ranks(ranks_of_group(plan, replicas, replicas, number))


def ranks_of_group(
    plan: ExchangePlan, planned_for: Replicas, replicas: Replicas, number: int
) -> dict[int, int]:
    """Return, by rank of a plan, the one that is in its place in a group.

    Args:
        plan: The plan of the first group of a domain.
        planned_for: Ranks of that domain that hold the same rows.
        replicas: The same of the domain of the group, which may be another that lies alike.
        number: Of the group.
    """
    size = len(replicas[0]) // plan.num_groups
    first = number * size
    return {
        rank: in_its_place
        for ranks, others in zip(planned_for, replicas, strict=True)
        for rank, in_its_place in zip(ranks[:size], others[first : first + size], strict=True)
    }


def _ranks_of_groups(replicas: Replicas, size: int) -> Iterator[list[int]]:
    """Yield the ranks of each group of so many instances, in the order of those of the first."""
    # By rank of the first group, where the ranks in its place stand.
    places = sorted(
        (rank, ranks, position) for ranks in replicas for position, rank in enumerate(ranks[:size])
    )
    for first in range(0, len(replicas[0]), size):
        yield [ranks[first + position] for _, ranks, position in places]


def _ascend(ranks: Sequence[int]) -> bool:
    return list(ranks) == sorted(ranks)


def _lie_alike(replicas: Replicas, size: int, cost: CostModel) -> bool:
    """Return whether estimates of the first group hold for all groups of so many instances.

    Their ranks share nodes alike. In the order of the first group's they ascend: rows arrive in
    that order, some of them in their stack.
    """
    return all(_ascend(ranks) for ranks in _ranks_of_groups(replicas, size)) and (
        len({cost.nodes_alike(ranks) for ranks in _ranks_of_groups(replicas, size)}) == 1
    )


def _smaller_divisors(number: int) -> Iterator[int]:
    """Yield the divisors of a number below it, descending."""
    return (size for size in range(number // 2, 0, -1) if number % size == 0)


def _load_of_first_group(
    replicas: Replicas, size: int, load_s: Mapping[int, float]
) -> dict[int, float]:
    """Return the load of each rank of the first group: the most of those in its place."""
    return {
        rank: max(load_s.get(other, 0.0) for other in ranks[position::size])
        for ranks in replicas
        for position, rank in enumerate(ranks[:size])
    }


def _about_seconds(
    matrices: Sequence[MatrixLayout],
    replicas: Replicas,
    size: int,
    cost: CostModel,
    wire: Wire,
    load_s: Mapping[int, float],
) -> float:
    """Estimate the step of groups of so many instances without planning it.

    Work and traffic hide each other, but for those of the longest matrix. All but one came within
    20 % of the steps predicted for plans: of Llama-3-8B and 70B, Qwen3-30B and 235B in 4 to 64
    instances, in groups of all sizes, on links of 4 to 45 GB/s. The one was 27 % off.
    """
    loads_s = _load_of_first_group(replicas, size, load_s).values()
    work_s = [matrix_seconds(matrix, cost) for matrix in matrices]
    longest_s = max(work_s)
    busy_s = max(longest_s, (sum(work_s) + sum(loads_s)) / len(loads_s))
    # Rows come to owners, and results go back, within an instance. An owner may hold some.
    instance = [ranks[0] for ranks in replicas]
    moved = sum(each.num_elements - max(each.elements_by_rank.values()) for each in matrices)
    one_byte_s = sum(cost.seconds_per_byte(rank, instance[0]) for rank in instance) / len(instance)
    link_s = (wire.gather_bytes + wire.scatter_bytes) * moved / len(loads_s) * one_byte_s
    link_s += _seconds_of_results(matrices, replicas, size, cost, wire)
    return max(busy_s, link_s) + min(longest_s, link_s)


def _seconds_of_results(
    matrices: Sequence[MatrixLayout], replicas: Replicas, size: int, cost: CostModel, wire: Wire
) -> float:
    """Return how long the replicas of a group pass on what the fullest shard has."""
    # All layers of a kind lie alike: what ranks hold is gone through once.
    held_by_tiling = {id(matrix.elements_by_rank): matrix.elements_by_rank for matrix in matrices}
    num_alike = Counter(id(matrix.elements_by_rank) for matrix in matrices)
    found_s = 0.0
    for ranks in replicas:
        held = sum(
            held_by_tiling[tiling].get(ranks[0], 0) * num for tiling, num in num_alike.items()
        )
        of_shard_s = cost.all_gather_seconds(tuple(ranks[:size]), wire.scatter_bytes * held)
        found_s = max(found_s, of_shard_s)
    return found_s
