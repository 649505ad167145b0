# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What plans mean for each rank: Newton-Schulz time, bytes, memory; as numbers and as a table."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.scatter import ShardScatter, scatters_of
from megatron_muon.plan.staging import BucketSizes, PlanStaging, ScatterSizes, StagingLayout
from megatron_muon.plan.step_estimate import step_seconds

_MAX_RANKS_SHOWN = 16


@dataclass
class RankReport:
    """One rank's share.

    Args:
        rank: Rank of the job.
        load_s: Estimated Newton-Schulz seconds.
        elements_sent: Elements sent to owners, and results sent back.
        bytes_sent: Their bytes.
        bytes_received: Bytes received from others.
        send_s: Estimated seconds of what it sends.
        receive_s: Estimated seconds of what it receives.
        num_matrices: Matrices it owns, or has a part of.
        num_calls: Calls of Newton-Schulz: each orthogonalizes one stack.
        stack_elements: Elements of all stacks, padding included.
        step_s: Estimated seconds until it is done with a step.
        staging_bytes: Memory of messages and stacks while a step runs; nothing stays between steps.
        num_split_groups: Sets of ranks that it splits matrices with: each is a communicator.
    """

    rank: int
    load_s: float = 0.0
    elements_sent: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    send_s: float = 0.0
    receive_s: float = 0.0
    num_matrices: int = 0
    num_calls: int = 0
    stack_elements: int = 0
    step_s: float = 0.0
    staging_bytes: int = 0
    num_split_groups: int = 0

    @property
    def traffic_s(self) -> float:
        """Estimated seconds of the busier direction of its links."""
        return max(self.send_s, self.receive_s)


@dataclass(frozen=True)
class Report:
    """A job's plans in numbers.

    Args:
        ranks: Share of each rank.
        ideal_s: Newton-Schulz time if all matrices, none split, were spread evenly, seconds.
        num_elements: Elements of all matrices.
        moved_elements: Elements sent to owners.
        lower_bound_bytes: Fewest bytes possible with one owner for each matrix: the largest holder
            owns, everything else is gathered and scattered.
        bound_s: Seconds that a step takes at least with these owners.
        norm_bytes: Bytes of the all-reduce of norms, counted once.
        num_buckets: Most buckets of a plan.
        num_portions: Most portions of a portioned bucket; 1 where none is.
        num_in_groups: Matrices by the number of groups of instances that each orthogonalize them.
            Other totals, but ``norm_bytes``, count a matrix in each group.
        num_split_groups: Sets of ranks that split matrices.
        num_blocks: Blocks that each backend orthogonalizes.
        matrices: ``index``, ``fqn`` and ``owner`` (``owners`` where it is split), in order.
    """

    ranks: list[RankReport]
    ideal_s: float
    bound_s: float
    num_elements: int
    moved_elements: int
    lower_bound_bytes: int
    norm_bytes: int
    num_buckets: int
    num_portions: int
    num_in_groups: dict[int, int]
    num_split_groups: int
    num_blocks: dict[str, int]
    matrices: list[dict[str, Any]]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def busiest_s(self) -> float:
        """Newton-Schulz time of the busiest rank, seconds."""
        return max(rank.load_s for rank in self.ranks)

    @property
    def busiest_over_ideal(self) -> float:
        """Busiest Newton-Schulz time over the ideal."""
        return self.busiest_s / self.ideal_s if self.ideal_s else 1.0

    @property
    def step_s(self) -> float:
        """Predicted step of the slowest rank."""
        return max(rank.step_s for rank in self.ranks)

    @property
    def exposed_step_s(self) -> float:
        """Predicted step where no traffic is hidden."""
        return max(rank.load_s + rank.traffic_s for rank in self.ranks)

    @property
    def padding(self) -> float:
        """Share that padding adds to the elements of stacks."""
        return sum(rank.stack_elements for rank in self.ranks) / max(1, self.num_elements) - 1

    @property
    def _most_over_mean(self) -> float:
        """Most bytes that a rank sends or receives, over the mean."""
        most = max(max(rank.bytes_sent, rank.bytes_received) for rank in self.ranks)
        mean = sum(rank.bytes_sent for rank in self.ranks) / self.world_size
        return most / mean if mean else 1.0

    @property
    def _max_split_groups(self) -> int:
        return max(rank.num_split_groups for rank in self.ranks)

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        # Keys are an interface: scripts read them. Attributes may be renamed, keys may not.
        sent = [rank.elements_sent for rank in self.ranks]
        return {
            "world_size": self.world_size,
            "busiest_over_ideal": self.busiest_over_ideal,
            "mean_elements_sent": sum(sent) / self.world_size,
            "max_elements_sent": max(sent),
            "moved_fraction": self.moved_elements / max(1, self.num_elements),
            "bytes": sum(rank.bytes_sent for rank in self.ranks),
            "lower_bound_bytes": self.lower_bound_bytes,
            "norm_bytes": self.norm_bytes,
            "num_buckets": self.num_buckets,
            "num_portions": self.num_portions,
            "matrices_by_instance_groups": self.num_in_groups,
            "num_split_groups": self.num_split_groups,
            "max_split_groups_of_a_rank": self._max_split_groups,
            "padding": self.padding,
            "blocks_by_backend": self.num_blocks,
            "newton_schulz_ms": self.busiest_s * 1e3,
            "ideal_newton_schulz_ms": self.ideal_s * 1e3,
            "predicted_step_ms": self.step_s * 1e3,
            "predicted_step_without_overlap_ms": self.exposed_step_s * 1e3,
            "step_bound_ms": self.bound_s * 1e3,
            "ranks": [
                {
                    "rank": rank.rank,
                    "newton_schulz_ms": rank.load_s * 1e3,
                    "traffic_ms": rank.traffic_s * 1e3,
                    "elements_sent": rank.elements_sent,
                    "bytes_sent": rank.bytes_sent,
                    "bytes_received": rank.bytes_received,
                    "staging_bytes": rank.staging_bytes,
                    "num_matrices": rank.num_matrices,
                    "num_calls": rank.num_calls,
                }
                for rank in self.ranks
            ],
            "matrices": self.matrices,
        }

    def lines(self) -> Iterator[str]:
        """Yield the table that a user reads."""
        sent = sum(rank.bytes_sent for rank in self.ranks)
        working = sum(rank.load_s > 0 for rank in self.ranks)
        split = f"{sum('owners' in matrix for matrix in self.matrices)} are split"
        if self.num_split_groups:
            split += (
                f", over {self.num_split_groups} sets of ranks, {self._max_split_groups} a rank at "
                "most"
            )
        yield (
            f"{len(self.matrices)} matrices, {self.num_elements / 1e6:,.1f} M elements, on "
            f"{self.world_size} ranks, {working} of which orthogonalize; {split}"
        )
        if set(self.num_in_groups) != {1}:
            groups = ", ".join(
                f"{matrices} matrices in {'each of ' if number > 1 else ''}{number}"
                for number, matrices in sorted(self.num_in_groups.items())
            )
            yield f"groups of instances: {groups}; totals count each group"
        yield (
            f"Newton-Schulz: busiest rank {self.busiest_s * 1e3:.3f} ms, ideal "
            f"{self.ideal_s * 1e3:.3f} ms, ratio {self.busiest_over_ideal:.3f}; at most "
            f"{max(rank.num_calls for rank in self.ranks)} calls a rank, "
            f"stacks padded by {self.padding:.1%}"
        )
        if set(self.num_blocks) != {"standard"}:
            blocks = ", ".join(f"{name} {num}" for name, num in sorted(self.num_blocks.items()))
            yield f"Newton-Schulz by backend, blocks: {blocks}"
        bound = (
            f"{sent / self.lower_bound_bytes:.2f} x" if self.lower_bound_bytes else "none needed"
        )
        yield (
            f"traffic: {self.moved_elements / max(1, self.num_elements):.1%} of elements move, "
            f"{sent / 1e6 / self.world_size:,.1f} MB a rank, {self._most_over_mean:.2f} x that at "
            f"most; lower bound "
            f"{self.lower_bound_bytes / 1e6 / self.world_size:,.1f} MB ({bound}); "
            f"norms {self.norm_bytes:,} bytes"
        )
        portions = f" of {self.num_portions} portions" if self.num_portions > 1 else ""
        yield (
            f"predicted step: {self.step_s * 1e3:.3f} ms in {self.num_buckets} buckets{portions}, "
            f"{self.bound_s * 1e3:.3f} ms at least with these owners"
        )
        yield "rank  matrices  Newton-Schulz ms  traffic ms  sent MB  received MB  staging MB"
        # Of many ranks only the busiest matter: they decide the step.
        shown = sorted(self.ranks, key=lambda rank: (-rank.load_s, rank.rank))
        if self.world_size <= _MAX_RANKS_SHOWN:
            shown = self.ranks
        for rank in shown[:_MAX_RANKS_SHOWN]:
            yield (
                f"{rank.rank:4d}  {rank.num_matrices:8d}  {rank.load_s * 1e3:16.3f}  "
                f"{rank.traffic_s * 1e3:10.3f}  {rank.bytes_sent / 1e6:7.1f}  "
                f"{rank.bytes_received / 1e6:11.1f}  {rank.staging_bytes / 1e6:10.1f}"
            )
        if self.world_size > _MAX_RANKS_SHOWN:
            yield f"... the {_MAX_RANKS_SHOWN} busiest of {self.world_size} ranks"


def build_report(
    ranks: Sequence[int], plans: Sequence[ExchangePlan], *, is_one_group: bool = False
) -> Report:
    """Add up what plans mean for each rank.

    Args:
        ranks: Ranks of the job, or those of one plan.
        plans: Plans of its domains; the load of a later one includes that of those before.
        is_one_group: Whether one group of instances is described, not all that run a plan.
    """
    # Ranks without a matrix are there too: they wait for the others, and may still send rows.
    shares = {rank: RankReport(rank) for rank in ranks}
    totals: Counter[str] = Counter()
    num_blocks: Counter[str] = Counter()
    # Of all groups of instances, by their number.
    num_in_groups: Counter[int] = Counter()
    norm_bytes: Counter[int] = Counter()
    matrices: list[dict[str, Any]] = []
    staging: dict[int, list[PlanStaging]] = defaultdict(list)
    for plan in plans:
        wire = plan.wire
        # A later plan's load includes that of the plans before it.
        for rank, seconds in plan.assignment.load_s.items():
            shares[rank].load_s = seconds
        _add_traffic(plan, shares, totals, staging)
        num_in_groups[plan.num_groups] += len(plan.matrices)
        totals["split_groups"] += len(plan.sets_of_owners)
        for rank in (rank for owners in plan.sets_of_owners for rank in owners):
            shares[rank].num_split_groups += 1
        for index, (matrix, owners) in enumerate(zip(plan.matrices, plan.owners, strict=True)):
            who = {"owner": owners[0]} if len(owners) == 1 else {"owners": list(owners)}
            matrices.append({"index": len(matrices), "fqn": matrix.fqn, **who})
            num_blocks.update(plan.backend(index, block) for block in range(len(matrix.blocks)))
            totals["elements"] += matrix.num_elements
            norm_bytes[plan.num_groups] += wire.norm_bytes * len(matrix.blocks)
            # An owner saves what it holds itself, so the largest holder saves most. Results go to
            # every replica, rows come from one of them.
            held = matrix.elements_by_rank
            largest, with_replicas = max(held.values()), sum(held.values())
            totals["lower_bound"] += wire.gather_bytes * (matrix.num_elements - largest)
            totals["lower_bound"] += wire.scatter_bytes * (with_replicas - largest)
            # A part counts as a matrix: it takes a call of Newton-Schulz like one.
            for owner in owners:
                shares[owner].num_matrices += 1
    for rank, of_rank in staging.items():
        shares[rank].staging_bytes = StagingLayout.build(of_rank).num_bytes
    _add_steps(plans, shares)
    for counted in (num_in_groups, norm_bytes) if not is_one_group else ():
        for num_groups in counted:
            counted[num_groups] //= num_groups
    return Report(
        list(shares.values()),
        _ideal_seconds(plans, len(shares)),
        max([plan.bound_s for plan in plans] + [share.load_s for share in shares.values()]),
        totals["elements"],
        totals["moved"],
        totals["lower_bound"],
        norm_bytes.total(),
        max(len(plan.buckets) for plan in plans),
        max(plan.order.num_gathers for plan in plans),
        dict(num_in_groups),
        totals["split_groups"],
        dict(num_blocks),
        matrices,
    )


def _add_steps(plans: Sequence[ExchangePlan], ranks: dict[int, RankReport]) -> None:
    """Add when each rank is done with a step."""
    # Local matrices, and what ranks had to do before the first plan.
    local_load_s = {rank: share.load_s for rank, share in ranks.items()}
    for bucket in (bucket for plan in plans for bucket in plan.seconds):
        for rank, seconds in bucket.load_s.items():
            local_load_s[rank] = max(0.0, local_load_s[rank] - seconds)
    steps = step_seconds([plan.plan_seconds for plan in plans], local_load_s)
    for rank, seconds in steps.items():
        ranks[rank].step_s = seconds


def _ideal_seconds(plans: Sequence[ExchangePlan], num_ranks: int) -> float:
    """Spread all matrices, and the load from before the first plan, evenly."""
    # What ranks had to do before the first plan is known by its ideal alone, which contains it.
    first = plans[0].assignment
    initial_load_s = first.ideal_s * len(first.load_s) - _whole_seconds(plans[0])
    return (initial_load_s + sum(map(_whole_seconds, plans))) / num_ranks


def _whole_seconds(plan: ExchangePlan) -> float:
    return sum(
        plan.cost.newton_schulz_seconds(*shape)
        for matrix in plan.matrices
        for shape in matrix.blocks
    )


@dataclass
class _Staged:
    """Elements that a rank stages for one bucket."""

    bucket: Counter[str]  # by field of BucketSizes
    scatters: list[Counter[str]]  # by field of ScatterSizes
    in_place: bool = False  # whether rows arrive in the stack

    @classmethod
    def empty(cls, plan: ExchangePlan) -> "_Staged":
        """Return nothing for a bucket of a plan."""
        return cls(Counter(), [Counter() for _ in range(plan.num_scatters)])

    @property
    def bucket_sizes(self) -> BucketSizes:
        """Elements of its gather and its stacks."""
        sizes = BucketSizes(*(self.bucket[field] for field in BucketSizes._fields))
        return sizes.in_place if self.in_place else sizes

    @property
    def scatter_sizes(self) -> list[ScatterSizes]:
        """Elements of each of its scatters."""
        fields = ScatterSizes._fields
        return [ScatterSizes(*(sizes[field] for field in fields)) for sizes in self.scatters]


def _add_traffic(
    plan: ExchangePlan,
    ranks: dict[int, RankReport],
    totals: Counter[str],
    staging: dict[int, list[PlanStaging]],
) -> None:
    """Add what each rank sends and receives, and what it stages."""
    staged: dict[int, list[_Staged]] = defaultdict(
        lambda: [_Staged.empty(plan) for _ in plan.buckets]
    )
    for number, bucket in enumerate(plan.buckets):
        rows: Counter[tuple[int, int]] = Counter()  # elements by source and owner
        # By portion and holders, by owner.
        results: dict[tuple[int, tuple[int, ...]], Counter[int]] = defaultdict(Counter)
        for index in bucket:
            for owner, source, holders, elements, portion in plan.transfers(index):
                if source != owner:
                    rows[source, owner] += elements
                if len(holders) > 1 or source != owner:
                    results[portion, holders][owner] += elements
        for (source, owner), elements in rows.items():
            _add_message(plan, ranks[source], ranks[owner], elements, plan.wire.gather_bytes)
            staged[source][number].bucket["gather_send"] += elements
            staged[owner][number].bucket["gather_receive"] += elements
            # Once there: what comes back is as much, times the replicas.
            totals["moved"] += elements
        # A portion has a scatter of its own; without portions results are shared out evenly.
        num_scatters = plan.num_scatters // plan.order.num_gathers
        for (portion, holders), by_owner in results.items():
            shards = scatters_of(holders, by_owner, num_scatters, plan.cost)
            for k, shard in enumerate(shards, start=portion):
                for share in shard.shares:
                    staged[share.owner][number].scatters[k]["send"] += share.num_elements
                _add_scatter(plan, ranks, shard)
                for holder in holders:
                    staged[holder][number].scatters[k]["receive"] += shard.num_elements
        for rank, stacks in plan.stacking.elements(bucket).items():
            staged[rank][number].bucket["stacks"] += sum(stacks)
            _add_calls(ranks[rank], stacks)
        is_portioned = plan.order.is_portioned
        for rank in plan.stacking.arriving_in_place(bucket, is_portioned=is_portioned):
            # Where no rows come from others, they are read to the stack.
            staged[rank][number].in_place = staged[rank][number].bucket["gather_receive"] > 0
    # Stacks of local matrices take turns in one place: the largest decides.
    local_stacks = plan.stacking.elements(plan.local)
    local = {owner: max(sizes) for owner, sizes in local_stacks.items()}
    for owner, sizes in local_stacks.items():
        _add_calls(ranks[owner], sizes)
    wire = plan.wire
    for rank in {*staged, *local}:
        staging[rank].append(
            PlanStaging(
                plan.order,
                [each.bucket_sizes.in_bytes(wire) for each in staged[rank]],
                [sizes.in_bytes(wire) for each in staged[rank] for sizes in each.scatter_sizes],
                local.get(rank, 0) * wire.gather_bytes,
            )
        )


def _add_calls(rank: RankReport, stacks: Sequence[int]) -> None:
    """Add one call for each stack, of which the elements are given."""
    rank.num_calls += len(stacks)
    rank.stack_elements += sum(stacks)


def _add_scatter(plan: ExchangePlan, ranks: dict[int, RankReport], shard: ShardScatter) -> None:
    """Add the traffic of one scatter, from owners and between replicas."""
    for share in shard.shares:
        if share.owner != share.holder:
            owner, holder = ranks[share.owner], ranks[share.holder]
            _add_message(plan, owner, holder, share.num_elements, plan.wire.scatter_bytes)
    if shard.num_spread:
        num_bytes = shard.num_spread * plan.wire.scatter_bytes
        seconds = plan.cost.all_gather_seconds(
            shard.holders, shard.num_elements * plan.wire.scatter_bytes
        )
        # Each chunk goes from replica to replica.
        for holder in (ranks[rank] for rank in shard.holders):
            holder.elements_sent += shard.num_spread
            holder.bytes_sent += num_bytes
            holder.bytes_received += num_bytes
            holder.send_s += seconds
            holder.receive_s += seconds


def _add_message(
    plan: ExchangePlan, sender: RankReport, receiver: RankReport, elements: int, width: int
) -> None:
    """Add a message of so many elements, of so many bytes each."""
    num_bytes = elements * width
    # Each direction of a link has the full rate, so they are added up apart.
    seconds = num_bytes * plan.cost.seconds_per_byte(sender.rank, receiver.rank)
    sender.elements_sent += elements
    sender.bytes_sent += num_bytes
    sender.send_s += seconds
    receiver.bytes_received += num_bytes
    receiver.receive_s += seconds


def log_lines(plan: ExchangePlan) -> list[str]:
    """Describe the plan of one domain of a live run."""
    ranks = sorted({rank for matrix in plan.matrices for rank in matrix.ranks})
    return [
        f"Muon exchange plan of {len(ranks)} ranks, {ranks[0]} to {ranks[-1]}:",
        *build_report(ranks, [plan], is_one_group=True).lines(),
    ]
