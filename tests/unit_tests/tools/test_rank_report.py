# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A report says of every rank what its plan makes it do."""

from helpers.layouts import one_matrix, plan_of, plans, rows_cut_at, whole_matrix
from hypothesis import given, settings

from megatron_muon.plan import ExchangePlan, RankBucket
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.owners import matrix_ns
from megatron_muon.plan.rank_plan import RankSchedule
from megatron_muon.plan.settings import CommDtypes
from megatron_muon.tools.plan.rank_report import build_report
from megatron_muon.tools.plan.timeline import Round


def _bytes(plan: ExchangePlan, bucket: RankBucket, rank: int) -> tuple[int, int]:
    """Return the bytes that a rank sends and receives in a bucket."""
    of_gather, of_scatter = plan.dtypes.gather_bytes, plan.dtypes.scatter_bytes
    sent = of_gather * sum(r.num_elements for routes in bucket.sends.values() for r in routes)
    received = of_gather * sum(r.num_elements for rows in bucket.receives.values() for r in rows)
    scatter = bucket.scatter
    to_others = [routes for holder, routes in scatter.sends.items() if holder != rank]
    sent += of_scatter * sum(route.num_elements for routes in to_others for route in routes)
    received += of_scatter * sum(n for owner, n in scatter.receives.items() if owner != rank)
    if scatter.shard is not None:
        gathered = scatter.shard.num_elements - scatter.shard.section_size
        sent, received = sent + of_scatter * gathered, received + of_scatter * gathered
    return sent, received


@settings(max_examples=50)
@given(plans())
def test_report_counts_what_a_rank_sends_stages_and_runs(plan):
    """The report counts bytes, staging memory and calls of each rank without its plan."""
    report = build_report(range(1 + max(plan.ranks)), [plan])
    for rank in plan.ranks:
        schedule = RankSchedule.build([plan], rank)
        (rank_plan,) = schedule.rank_plans
        both = [_bytes(plan, bucket, rank) for bucket in rank_plan.buckets]
        owned = [*rank_plan.local, *(bucket.owned for bucket in rank_plan.buckets)]
        found = report.ranks[rank]
        assert found.bytes_sent == sum(sent for sent, _ in both)
        assert found.bytes_received == sum(received for _, received in both)
        assert found.staging_bytes == schedule.staging.num_bytes
        assert found.num_calls == sum(len(each.stacks) for each in owned)
    for rank in report.ranks:
        assert report.step_ns >= max(rank.newton_schulz_ns, rank.traffic_ns) - 1
    sent = sum(rank.bytes_sent for rank in report.ranks)
    assert sent == sum(rank.bytes_received for rank in report.ranks)
    if all("owner" in matrix for matrix in report.matrices):
        assert sent >= report.lower_bound_bytes


def test_load_counts_launches_of_stacks_that_exist():
    """The load of a rank counts the launches of its real stacks."""
    cost = CostModel(stack_tiles=1024)
    matrices = [one_matrix([256, 256], 512) for _ in range(64)]
    few, many = (
        build_report([0, 1], [plan_of(matrices, cost, num_buckets=number)]).ranks[0]
        for number in (1, 4)
    )
    assert (few.num_calls, many.num_calls) == (1, 4)
    launches_ns = cost.work(512, 512).num_products * round(1000 * cost.kernel_us)
    assert many.newton_schulz_ns - few.newton_schulz_ns == 3 * launches_ns
    # The plan itself spread them as if stacks were full.
    assert abs(few.newton_schulz_ns - 32 * matrix_ns(matrices[0], cost)) <= 32


def test_rounds_have_the_times_of_rows_results_and_newton_schulz():
    """Rounds have the times of rows in fp32, of results in bf16, and of Newton-Schulz."""
    cost = CostModel(ranks_per_node=2)
    dtypes = CommDtypes("float32", "bfloat16")
    plan = plan_of([one_matrix([300, 150, 100], 512)], cost, dtypes, max_owners=1)
    assert plan.owners == ((0,),)
    owner, near, far = build_report([0, 1, 2], [plan]).ranks
    # Bytes of 150 rows inside of the node and of 100 to the other one, in two widths.
    by_rank = ((owner, (150, 100)), (near, (150, 0)), (far, (0, 100)))
    for rank, (inside, outside) in by_rank:
        rows, results = (
            cost.messages_ns(512 * width * inside, 512 * width * outside) for width in (4, 2)
        )
        newton_schulz = cost.stack_ns(1, 550, 512) if rank is owner else 0
        assert rank.rounds == [[Round(rows, results, newton_schulz)]]
        assert rank.step_ns >= rows + results


def test_rounds_of_replicas_have_their_all_gather():
    """Rounds of replicas include the all-gather of their results."""
    cost, num_elements = CostModel(), 64 * 512
    matrix = whole_matrix("weight", rows_cut_at(64, 512, [64]), [[(0, 1)]])
    plan = plan_of([matrix], cost, max_owners=1)
    all_gather_ns = cost.all_gather_ns((0, 1), 2 * num_elements)
    for rank in build_report([0, 1], [plan]).ranks:
        (((rows, results, _),),) = rank.rounds
        assert rows == 0
        assert results == cost.messages_ns(num_elements, 0) + all_gather_ns
