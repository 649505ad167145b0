# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A preview plans as a run does, and what the rules of the planner are worth on known models."""

import dataclasses
from typing import Any

import pytest
from helpers.ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.plan import ExchangePlan
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.exchange_plan import plan_matrices
from megatron_muon.plan.layout import Splits, rows_in_buffer
from megatron_muon.plan.rank_plan import RankPlan
from megatron_muon.plan.settings import PlanSettings
from megatron_muon.report.model_shape import PRESETS
from megatron_muon.report.rank_report import Report, build_report
from megatron_muon.report.simulation import Parallelism, simulate, unit_buffer


def _plans(preset: str, parallel: Parallelism, **numbers: Any) -> list[ExchangePlan]:
    return simulate(PRESETS[preset], parallel, PlanSettings(**numbers))


def _report(preset: str, parallel: Parallelism, **numbers: Any) -> Report:
    return build_report(range(parallel.stage_size), _plans(preset, parallel, **numbers))


@pytest.mark.parametrize("numbers", [PlanSettings(), PlanSettings(staging_bytes=300_000_000)])
def test_preview_plans_what_a_run_plans(numbers):
    """A run rounded loads between plans, and a preview did not: 48 owners differed.

    Here every rank plans experts, then dense matrices on top of them, with what it knows itself.
    """
    model = dataclasses.replace(PRESETS["qwen3-30b-a3b"], num_layers=2)
    *of_experts, dense = simulate(model, Parallelism(dp=8, ep=2), numbers)
    assert [plan.ranks for plan in of_experts] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    load_ns = dict.fromkeys(range(8), 0)
    staged = dict.fromkeys(range(8), 0)
    for expected in of_experts:
        before = dict.fromkeys(expected.ranks, 0)
        share = numbers.share_of_staging(0, 2)
        plan = plan_matrices(expected.matrices, numbers, load_ns=before, staging_bytes=share)
        assert plan.entries() == expected.entries()
        for rank in plan.ranks:
            load_ns[rank] = plan.load_ns[rank]
            staged[rank] = plan.staging_bytes
    share = numbers.share_of_staging(max(staged.values()), 1)
    plan = plan_matrices(dense.matrices, numbers, load_ns=load_ns, staging_bytes=share)
    assert plan.entries() == dense.entries()


def test_dense_model_is_balanced_by_few_owners_or_by_splitting():
    """128 matrices: on 64 ranks the largest holders would load four ranks with 32 times the mean.

    On 512 ranks they cannot keep all ranks busy unless they are split.
    """
    report = _report("llama3-8b", Parallelism(dp=64))
    assert report.busiest_over_ideal <= 1.10
    assert report.moved_elements <= 0.975 * report.num_elements
    split, whole = (_report("llama3-8b", Parallelism(dp=512), max_owners=n) for n in (8, 1))
    assert whole.min_step_ns > 3 * split.min_step_ns
    assert whole.busiest_over_ideal > 7 and split.busiest_over_ideal < 2.2


def test_chunks_that_replicas_pass_on_cross_nodes_once():
    """ZeRO-0 on 8 nodes: an owner would send every result to 56 ranks of other nodes itself."""
    (plan,) = _plans("llama3-8b", Parallelism(dp=64, sharding="no_shard"))
    report = build_report(plan.ranks, [plan])
    sends_all_ns = 0
    for rank in plan.ranks:
        owned = [bucket.owned.num_elements for bucket in RankPlan.build(plan, rank).buckets]
        num_bytes = plan.dtypes.scatter_bytes * sum(owned)
        time_ns = plan.cost.messages_ns(7 * num_bytes, 56 * num_bytes)
        sends_all_ns = max(sends_all_ns, time_ns)
    assert sends_all_ns > 2 * max(rank.send_ns for rank in report.ranks)


def test_stacks_are_for_experts():
    """Thousands of small matrices: one call for up to 32 of them."""
    parallel = Parallelism(dp=32, ep=8)
    model = dataclasses.replace(PRESETS["qwen3-30b-a3b"], num_layers=8)
    reports = [
        build_report(range(parallel.stage_size), simulate(model, parallel, PlanSettings(cost)))
        for cost in (CostModel(), CostModel(stack_tiles=1))
    ]
    stacked, alone = (max(rank.num_calls for rank in report.ranks) for report in reports)
    assert alone > 5 * stacked
    assert reports[1].min_step_ns > 1.15 * reports[0].min_step_ns


def test_memory_is_shared_by_buffers_that_are_not_alive_together():
    """A buffer of its own for every message would need more than twice the memory."""
    (plan,) = _plans("llama3-8b", Parallelism(dp=8))
    totals = []
    for rank in plan.ranks:
        staging = RankPlan.build(plan, rank).staging(plan.dtypes)
        totals.append(sum(staging.buffers()))
    assert max(totals) > 2 * plan.staging_bytes


def _shards_by_megatron(shapes: list[tuple[int, ...]], num_shards: int) -> list[Any]:
    """Cut parameters of one module as Megatron-FSDP does; row ranges of the 2-D ones."""
    from types import SimpleNamespace

    import torch
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as upstream

    module = torch.nn.Module()
    for index, shape in enumerate(shapes):
        param = torch.nn.Parameter(torch.empty(shape, device="meta"))
        module.register_parameter(f"p{index:05d}", param)
    policy = upstream.BucketingPolicy(
        suggested_bucket_size=None, fsdp_unit_modules=[torch.nn.Module],
        data_parallel_sharding_strategy="optim_grads_params",
    )  # fmt: skip
    (group,), *_ = upstream._get_parameter_groups(module, policy, {})
    items, bucket, _ = upstream.build_data_parallel_buffer_index(
        [param.shape for param in group.params],
        0,
        num_shards,
        True,
        SimpleNamespace(data_parallel_sharding_strategy="optim_grads_params"),
        chunk_size_factor=group.chunk_size_factor,
    )
    shard = bucket.size // num_shards
    found = {}
    for index, param in enumerate(group.params):
        start, cols = items[index].global_data_index, param.shape[1:].numel()
        ranges = []
        for rank in range(num_shards):
            first = min(max(rank * shard - start, 0), param.numel())
            last = min(max((rank + 1) * shard - start, 0), param.numel())
            ranges.append([first / cols, last / cols])
        found[id(param)] = ranges if param.dim() == 2 else None
    return [found[id(param)] for param in module.parameters()]


def _compare(cases: list[Any]) -> list[float]:
    """Return by how much the rows of a rank differ at most, in shards of the buffer."""
    differences = []
    for shapes, num_shards in cases:
        ranks = [(rank,) for rank in range(num_shards)]
        size, begins = unit_buffer(tuple(shapes), num_shards)
        most = 0
        expected = _shards_by_megatron(shapes, num_shards)
        for shape, begin, of_ranks in zip(shapes, begins, expected, strict=True):
            if len(shape) != 2:
                continue
            held = rows_in_buffer(ranks, size, begin, *shape)
            for rank, (start, stop) in enumerate(of_ranks):
                first, last = held.get(rank, (0, 0))
                most = max(most, abs((last - first) - (stop - start)) * shape[1])
        differences.append(most / (size // num_shards))
    return differences


@pytest.mark.ranks
def test_simulated_shards_are_those_of_megatron_fsdp():
    """To a hundredth of a shard: DeepSeek-V3 has small matrices, which Megatron puts into gaps."""
    cases = []
    for model in (model for model in PRESETS.values() if not model.q_lora_rank):
        for layer in (0, model.num_layers - 1):
            dense = [each.shape for each in model.dense_parameters(layer, Splits())]
            experts = [each.shape for each in model.expert_parameters(layer, 4, Splits())]
            cases += [[shapes, n] for shapes in (dense, experts) if shapes for n in (1, 8, 60)]
    assert max(run_ranks(1, _compare, cases).check().results[0]) <= 0.01


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1), st.integers(1, 9))
def test_simulated_shards_are_whole_rows_and_do_not_overlap(shapes, num_shards):
    """Each parameter has a place of its own in the buffer."""
    size, begins = unit_buffer(tuple(shapes), num_shards)
    ends = 0
    for begin, (rows, cols) in sorted(zip(begins, shapes, strict=True)):
        assert begin >= ends
        ends = begin + rows * cols
    assert ends <= size and size % num_shards == 0
