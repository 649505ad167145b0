# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A preview plans as a run does, of the shards that Megatron-FSDP makes."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.plan.exchange_plan import plan_matrices
from megatron_muon.plan.layout import Splits, rows_in_buffer
from megatron_muon.plan.settings import PlanSettings
from megatron_muon.tools.plan.model_shape import PRESETS
from megatron_muon.tools.plan.simulation import Parallelism, simulate, unit_buffer


@pytest.mark.parametrize("numbers", [PlanSettings(), PlanSettings(staging_bytes=300_000_000)])
def test_preview_plans_what_a_run_plans(numbers):
    """A preview has the plan of a run, where each rank plans with what it knows."""
    model = dataclasses.replace(PRESETS["qwen3-30b-a3b"], num_layers=2)
    *of_experts, dense = simulate(model, Parallelism(dp=8, ep=2), numbers)
    assert [plan.ranks for plan in of_experts] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    numbers, load_ns = numbers.shared_by(2), {}
    for expected in of_experts:
        before = dict.fromkeys(expected.ranks, 0)
        plan = plan_matrices(expected.matrices, numbers, load_ns=before)
        assert plan.entries() == expected.entries()
        load_ns |= {rank: plan.load_ns[rank] for rank in plan.ranks}
    plan = plan_matrices(dense.matrices, numbers, load_ns=load_ns)
    assert plan.entries() == dense.entries()


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
