# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of Newton-Schulz: a stand-in on CPUs, the graphs themselves on a GPU."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from helpers.device import kind
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, init_group, split_always, step_both

pytestmark = pytest.mark.ranks

EXCHANGE = {"wire": "bf16", "num_buckets": 3, "cuda_graphs": True}


class CountedGraphs:
    """Runs functions again in place of graphs, whose addresses must not have changed."""

    def __init__(self, _device: Any) -> None:
        self.stacks: list[tuple[int, Any]] = []
        self.num_replays = 0

    def capture(self, stack: Any, function: Callable[[], None]) -> Callable[[], None]:
        """Count a capture; what it returns counts replays."""
        self.stacks.append((stack.data_ptr(), stack.shape))

        def replay() -> None:
            self.num_replays += 1
            assert stack.untyped_storage().nbytes() > 0, "memory was freed between steps"
            assert (stack.data_ptr(), stack.shape) in self.stacks, "memory moved"
            function()

        return replay


def _step_with_stand_in(is_split: bool) -> dict[str, Any]:
    from megatron_muon.runtime import owner_compute

    init_group()
    with mock.patch.object(owner_compute, "CudaGraphs", CountedGraphs):
        if is_split:
            with split_always(2):
                optimizers = build_optimizers(2, {}, EXCHANGE)
        else:
            optimizers = build_optimizers(2, {}, EXCHANGE)
    compute = optimizers.sharded.compute
    step_both(optimizers, "bf16", num_steps=2)
    graphs = compute._graphs
    stacks = [
        stack
        for plan in compute._engine._plans
        for owned in (*plan._buckets, *plan._local)
        for stack in owned.work
    ]
    alone = [stack for stack in stacks if len(stack.owners) == 1]
    return {
        "differences": optimizers.differences(2e-2 if is_split else 0.0),
        "captured": len(graphs.stacks),
        "addresses": len(set(graphs.stacks)),
        "distinct": len({(stack.tensor.data_ptr(), stack.tensor.shape) for stack in alone}),
        "replays": graphs.num_replays,
        "alone": len(alone),
        "stacks": len(stacks),
    }


@pytest.mark.cpu_only
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
def test_each_stack_is_captured_once_and_replayed_in_every_step(is_split):
    """With the bits of whole matrices; what communicates is not captured."""
    for found in run_ranks(2, _step_with_stand_in, is_split).check().results:
        assert found["differences"] == []
        assert found["captured"] == found["addresses"] == found["distinct"]
        assert found["replays"] == 2 * found["alone"]
        assert (found["alone"] < found["stacks"]) == is_split
        assert is_split or found["captured"] > 1


def _build_without_gpu() -> str:
    init_group()
    try:
        build_optimizers(2, {}, EXCHANGE)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.cpu_only
def test_ranks_without_a_gpu_are_refused_by_the_name_of_the_flag():
    """Not stepped without graphs in silence."""
    for text in run_ranks(2, _build_without_gpu).check().results:
        assert text == "--muon-fsdp-cuda-graphs: expected a GPU, got cpu ranks. Leave it out."


def _step_on_gpu(backend: str) -> list[str]:
    """Step with graphs and without them."""
    import torch

    assert kind() == "cuda"
    init_group()
    states = []
    for cuda_graphs in (False, True):
        exchange = {**EXCHANGE, "newton_schulz": backend, "cuda_graphs": cuda_graphs}
        optimizers = build_optimizers(2, {}, exchange)
        step_both(optimizers, "bf16", num_steps=3)
        states.append(optimizers.state())
    return [
        f"parameter {number}"
        for number, (ours, theirs) in enumerate(zip(*states, strict=True))
        if not all(map(torch.equal, ours, theirs))
    ]


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["standard", "gram", "auto"])
def test_graphs_have_the_bits_of_their_launches(backend):
    """Three steps; construction has compared each graph too."""
    for different in run_ranks(2, _step_on_gpu, backend).check().results:
        assert different == []
