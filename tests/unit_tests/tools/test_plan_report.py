# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Reports of a plan: work of the ranks, its times, and models."""

import dataclasses
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from helpers.layouts import BF16, TWO_INPUTS, one_matrix, plan_of, plans, rows_cut_at, whole_matrix
from helpers.ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.plan import ExchangePlan, RankBucket
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.exchange_plan import plan_matrices
from megatron_muon.plan.layout import Splits, rows_in_buffer
from megatron_muon.plan.owners import matrix_ns
from megatron_muon.plan.rank_plan import RankSchedule
from megatron_muon.plan.settings import CommDtypes, PlanSettings
from megatron_muon.tools.plan.command import main
from megatron_muon.tools.plan.model_shape import PRESETS, ModelShape
from megatron_muon.tools.plan.rank_report import (
    all_gather_ns,
    build_report,
    messages_ns,
)
from megatron_muon.tools.plan.simulation import Parallelism, simulate, unit_buffer
from megatron_muon.tools.plan.sizes import fullest_bytes, messages_to
from megatron_muon.tools.plan.summary import (
    count_layers,
    memory_under_megatron_fsdp,
    size_of_shape,
)
from megatron_muon.tools.plan.timeline import Round, timeline


def _bytes(plan: ExchangePlan, bucket: RankBucket, rank: int) -> tuple[int, int]:
    """Return the bytes that a rank sends and receives in a bucket."""
    gather, scatter = bucket.gather or ({}, {}), bucket.scatter
    replicas = next(
        (r.holders for m in plan.matrices for r in m.regions if rank in r.holders), (rank,)
    )
    section_size = bucket.num_elements.scatter_receive // len(replicas)
    passed_on = section_size * (len(replicas) - 1)
    sent, received = (
        plan.dtypes.gather_bytes * sum(rows.values())
        + plan.dtypes.scatter_bytes
        * (passed_on + sum(n for other, n in results.items() if other != rank))
        for rows, results in zip(gather, scatter, strict=True)
    )
    return sent, received


@settings(max_examples=50)
@given(plans(dtypes=[BF16, TWO_INPUTS]))
def test_report_counts_what_a_rank_sends_stages_and_runs(plan):
    """The report counts bytes, staging memory and calls of each rank without its plan.

    Its timeline has all of this work, one thing at a time on GPU and links.
    """
    report = build_report(1 + max(plan.ranks), [plan])
    for rank in plan.ranks:
        schedule = RankSchedule.build([plan], rank)
        (rank_plan,) = schedule.rank_plans
        both = [_bytes(plan, bucket, rank) for bucket in rank_plan.buckets]
        buckets = [*rank_plan.local, *rank_plan.buckets]
        found = report.ranks[rank]
        assert found.bytes_sent == sum(sent for sent, _ in both)
        assert found.bytes_received == sum(received for _, received in both)
        assert found.staging_bytes == schedule.staging_bytes
        assert found.num_calls == sum(len(bucket.stacks) for bucket in buckets)
        assert max(found.newton_schulz_ns, found.traffic_ns) - 1 <= found.step_ns
        on_gpu = [span for span in found.spans if span.kind == "Newton-Schulz"]
        on_links = [span for span in found.spans if span.kind != "Newton-Schulz"]
        for lane, expected_ns in (
            (on_gpu, found.newton_schulz_ns),
            (on_links, found.traffic_ns),
        ):
            # In floats of at most 1e9 ns.
            time_ns = sum(span.end - span.start for span in lane)
            assert time_ns == pytest.approx(expected_ns, rel=1e-9, abs=1e-3)
            assert all(one.end <= other.start for one, other in pairwise(lane))
    step_ns = max(rank.step_ns for rank in report.ranks)
    for rank in report.ranks:
        assert step_ns >= max(rank.newton_schulz_ns, rank.traffic_ns) - 1
    fullest = max(rank.staging_bytes for rank in report.ranks)
    assert fullest_bytes(plan) == plan.staging_bytes == fullest
    sent = sum(rank.bytes_sent for rank in report.ranks)
    assert sent == sum(rank.bytes_received for rank in report.ranks)
    if all(len(owners) == 1 for owners in plan.owners):
        # The largest holder owns a matrix; everything else is gathered and scattered.
        held = [matrix.elements_by_rank.values() for matrix in plan.matrices]
        least = sum(
            plan.dtypes.gather_bytes * (matrix.num_elements - max(of))
            + plan.dtypes.scatter_bytes * (sum(of) - max(of))
            for matrix, of in zip(plan.matrices, held, strict=True)
        )
        assert sent >= least


def test_load_counts_launches_of_stacks_that_exist():
    """The load of a rank counts the launches of its real stacks."""
    cost = CostModel(stack_tiles=1024)
    matrices = [one_matrix([256, 256], 512) for _ in range(64)]
    few, many = (
        build_report(2, [plan_of(matrices, cost, num_buckets=number)]).ranks[0] for number in (1, 4)
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
    owner, near, far = build_report(3, [plan]).ranks
    # Bytes of 150 rows inside of the node and of 100 to the other one, in two widths.
    by_rank = ((owner, (150, 100)), (near, (150, 0)), (far, (0, 100)))
    for rank, (inside, outside) in by_rank:
        rows, results = (
            messages_ns(cost, 512 * width * inside, 512 * width * outside) for width in (4, 2)
        )
        newton_schulz = sum(cost.costs_ns(550, 512, 1, on_node=True)) if rank is owner else 0
        assert rank.rounds == [[Round(rows, results, newton_schulz)]]
        assert rank.step_ns >= rows + results


def test_owners_send_to_the_replica_of_their_node():
    """Ranks of a node are consecutive: only results that do not fit go to another node."""
    # Owner, holder, elements.
    messages = messages_to((1, 5), Counter({0: 24, 3: 16, 6: 40}))
    assert list(messages) == [(0, 1, 24), (3, 1, 16), (6, 5, 40)]
    messages = messages_to((1, 5), Counter({0: 24, 6: 56}))
    assert list(messages) == [(0, 1, 24), (6, 1, 16), (6, 5, 40)]


def test_links_within_a_node_are_faster():
    """Messages to other nodes and all-gathers over several nodes take the slower link."""
    cost = CostModel(gbps=450, gbps_between_nodes=45)
    assert messages_ns(cost, 450_000, 45_000) == 1000 + 1000
    # An all-gather enters a node once, over the links of the fewest ranks of a node.
    assert all_gather_ns(cost, [0, 1], 900) == round(450 / 450)
    assert all_gather_ns(cost, [0, 8], 90_000) == round(45_000 / 45)
    assert all_gather_ns(cost, [0, 1, 8, 9], 120_000) == round(90_000 / 90)


def test_rounds_of_replicas_have_their_all_gather():
    """Rounds of replicas include the all-gather of their results."""
    cost, num_elements = CostModel(), 64 * 512
    matrix = whole_matrix("weight", rows_cut_at(64, 512, [64]), [[(0, 1)]])
    plan = plan_of([matrix], cost, max_owners=1)
    time_ns = all_gather_ns(cost, (0, 1), 2 * num_elements)
    for rank in build_report(2, [plan]).ranks:
        (((rows, results, _),),) = rank.rounds
        assert rows == 0
        assert results == messages_ns(cost, num_elements, 0) + time_ns


def test_rows_come_before_newton_schulz_and_results_after_it():
    """Gathers and scatters of three buckets run beside the products of others."""
    rounds = [
        Round(rows=3, results=30, newton_schulz=10),
        Round(rows=5, results=4, newton_schulz=10),
        Round(rows=1, results=4, newton_schulz=10),
    ]
    spans = timeline(8, [rounds])
    assert [(span.kind, span.start, span.end) for span in spans] == [
        ("rows to owners", 0, 3),
        ("rows to owners", 3, 8),
        ("Newton-Schulz", 0, 2),  # a quarter of the local matrices
        ("rows to owners", 8, 9),
        ("Newton-Schulz", 3, 13),
        ("results", 13, 43),
        ("Newton-Schulz", 13, 15),
        ("Newton-Schulz", 15, 25),
        ("results", 43, 47),
        ("Newton-Schulz", 25, 27),
        ("Newton-Schulz", 27, 37),
        # The GPU waits for the first results before it starts the third.
        ("results", 47, 51),
        ("Newton-Schulz", 43, 45),
    ]


def test_newton_schulz_waits_for_rows_and_results_for_newton_schulz(tmp_path, capsys):
    """Gather, products and scatter of a single bucket follow one another."""
    file = tmp_path / "step.svg"
    assert main(["--preset", "llama3-8b", "--dp", "64", "--svg", str(file)]) == 0
    text = capsys.readouterr().out
    said = "step of Muon: 23.8 ms on the slowest GPU, of which Newton-Schulz 14.0 ms and waits"
    assert said in text
    assert "the step is 0.3%" in text
    root = ElementTree.parse(file).getroot()
    rects = [rect.attrib for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    # Behind the background and the legend: rows, products, results; the GPU is drawn first.
    products, rows, results = rects[-3:]
    ends = [float(rect["x"]) + float(rect["width"]) for rect in (rows, products)]
    begins = [float(rect["x"]) for rect in (products, results)]
    assert all(abs(end - begin) < 0.02 for end, begin in zip(ends, begins, strict=True))


@pytest.mark.parametrize("numbers", [PlanSettings(), PlanSettings(staging_bytes=300_000_000)])
def test_preview_plans_what_a_run_plans(numbers):
    """A preview has the plan of a run, where each rank plans with what it knows."""
    model = dataclasses.replace(PRESETS["qwen3-30b-a3b"], num_layers=2)
    *of_experts, dense = simulate(model, Parallelism(dp=8, ep=2), numbers, Splits())
    assert [plan.ranks for plan in of_experts] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    for expected in (*of_experts, dense):
        plan = plan_matrices(expected.matrices, numbers.staging_budget(2), fullest_bytes)
        assert plan.entries() == expected.entries()


def _shards_by_megatron(shapes: list[tuple[int, ...]], num_shards: int) -> list[Any]:
    """Cut parameters of one module as Megatron-FSDP does; row ranges of the 2-D ones."""
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
    """Simulated shards are Megatron-FSDP's to a hundredth of a shard."""
    cases = []
    for model in (model for model in PRESETS.values() if not model.q_lora_rank):
        for layer in (0, model.num_layers - 1):
            dense = [each.shape for each in model.dense_parameters(layer, Splits())]
            experts = [each.shape for each in model.expert_parameters(layer, 4, Splits())]
            cases += [[shapes, n] for shapes in (dense, experts) if shapes for n in (1, 8, 60)]
    assert max(run_ranks(1, _compare, cases).check().results[0]) <= 0.01


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1), st.integers(1, 9))
def test_simulated_shards_are_whole_rows_and_do_not_overlap(shapes, num_shards):
    """Each parameter has a place of its own in the simulated buffer."""
    size, begins = unit_buffer(tuple(shapes), num_shards)
    ends = 0
    for begin, (rows, cols) in sorted(zip(begins, shapes, strict=True)):
        assert begin >= ends
        ends = begin + rows * cols
    assert ends <= size and size % num_shards == 0


# Parameters, billions, of AutoModelForCausalLM of transformers 5.24.
BILLIONS = {"llama3-8b": 8.030, "qwen3-30b-a3b": 30.532, "deepseek-v3": 671.026}


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_presets_have_the_parameters_of_the_model(name, billions):
    """Presets have as many parameters as the models of transformers."""
    assert size_of_shape(PRESETS[name]).total / 1e9 == pytest.approx(billions, rel=5e-4)


@pytest.mark.parametrize("has_fp32", [True, False])
def test_memory_follows_the_sharding_strategy(has_fp32):
    """Bytes of weights, gradients, states and a step equal a count by hand."""
    model = ModelShape(1, 8, 16, 2, 2, vocab_size=10)
    (muon, adamw), _ = count_layers(model, Parallelism(1))
    adamw += model.embedding_elements
    total, states, of_gradient = muon + adamw, 4 * muon + 8 * adamw, 4 if has_fp32 else 2
    expected = {
        "no_shard": ((2 + of_gradient + 4) * total, 1),
        "optim": ((2 + of_gradient + 2) * total, 2),
        "optim_grads": ((2 + of_gradient // 2 + 2) * total, 2),
        "optim_grads_params": ((1 + of_gradient // 2 + 2) * total, 2),
    }
    for sharding, (in_model, shards) in expected.items():
        memory = memory_under_megatron_fsdp(
            model, Parallelism(2, sharding=sharding), has_fp32_gradients=has_fp32
        )
        copies = 0 if has_fp32 else 4 * total // shards
        assert memory == (in_model, states // shards, 8 * total // shards, copies, copies)
