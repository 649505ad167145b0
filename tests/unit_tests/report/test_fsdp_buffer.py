# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Simulated buffers against Megatron-FSDP's own functions."""

from typing import Any

import pytest
from helpers.ranks import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_muon.plan.layout import rows_in_buffer
from megatron_muon.plan.splits import Splits
from megatron_muon.report.preview.fsdp_buffer import unit_buffer
from megatron_muon.report.preview.model_shape import PRESETS


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


def _compare(cases: list[Any]) -> list[Any]:
    different = []
    for shapes, num_shards in cases:
        shapes = [tuple(shape) for shape in shapes]
        expected = _shards_by_megatron(shapes, num_shards)
        try:
            ranks = [(rank,) for rank in range(num_shards)]
            size, begins = unit_buffer(shapes, num_shards)
            rows = [
                rows_in_buffer(ranks, size, begin, *shape) if len(shape) == 2 else None
                for shape, begin in zip(shapes, begins, strict=True)
            ]
        except ValueError:
            # Inside a row: Megatron-FSDP refuses such a model itself.
            is_inside = any(x % 1 for ranges in expected if ranges for pair in ranges for x in pair)
            rows = "refused inside a row" if is_inside else "refused"
        # A rank without rows is left out.
        held = [
            ranges and {rank: (a, b) for rank, (a, b) in enumerate(ranges) if a < b}
            for ranges in expected
        ]
        if rows not in (held, "refused inside a row"):
            different.append([shapes, num_shards])
    return different


def _random_cases() -> list[Any]:
    """Let hypothesis draw cases here, where megatron is not imported for each."""
    cases = []
    sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 96])
    shape = st.one_of(st.tuples(sizes), st.tuples(sizes, sizes))

    @settings(max_examples=400, database=None, derandomize=True)
    @given(st.lists(shape, min_size=1, max_size=9), st.integers(1, 9))
    def draw(shapes, num_shards):
        cases.append([shapes, num_shards])

    draw()
    return cases


@pytest.mark.ranks
def test_simulated_shards_are_those_of_megatron_fsdp():
    """Random parameters, and a layer of each preset, are cut at the same rows."""
    cases = _random_cases()
    for model in PRESETS.values():
        for layer in (0, model.num_layers - 1):
            dense = [each.shape for each in model.dense_parameters(layer, Splits())]
            experts = [each.shape for each in model.expert_parameters(layer, 4, Splits())]
            cases += [[shapes, n] for shapes in (dense, experts) if shapes for n in (1, 8, 60, 512)]
    assert len(cases) > 400
    assert run_ranks(1, _compare, cases).check().results == [[]]
