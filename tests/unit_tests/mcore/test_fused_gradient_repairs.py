# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Fused gradient accumulation under Megatron-FSDP, against the unsharded sum of microbatches."""

import functools
from typing import Any

import pytest
from helpers import fused_linear
from helpers.ranks import run_ranks
from helpers.repairs import without
from helpers.toy_fsdp import build_gpt, run_backward, start_process_groups, wrap_gpt
from helpers.toy_gpt import ZERO

pytestmark = pytest.mark.ranks

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
NUM_RANKS, NUM_MICROBATCHES = 2, 3
# Sums of 6 gradients in fp32, in another order: some ulp, of 6e-8 each. One that is lost, of 2 to
# 6, changes a third of the norm or more.
SAME, OTHER = 1e-5, 0.1
TE, EXPERTS, MEGATRON = "all_gather_and_wait_parameters_ready", "_ensure_main_grad", "forward"


def _whole_gradients(settings: dict[str, Any]) -> dict[str, Any]:
    """Sum the gradients of all microbatches of all ranks, unsharded and unfused."""
    gpt = build_gpt(**settings)
    for microbatch in range(NUM_MICROBATCHES):
        for rank in range(NUM_RANKS):
            run_backward(gpt, microbatch, data_of_rank=rank)
    # Megatron-FSDP averages over ranks, and leaves microbatches to the loss.
    return {name: param.grad / NUM_RANKS for name, param in gpt.named_parameters()}


def _difference(model: Any, whole: dict[str, Any]) -> float:
    """Return the largest error of a matrix's main gradient on this rank, of its norm."""
    from megatron_muon.mcore.fsdp_model import named_optimizer_parameters
    from megatron_muon.rows.megatron_fsdp import own_rows

    model.finish_grad_sync()
    largest, num_compared = 0.0, 0
    for fqn, param in named_optimizer_parameters([model]):
        if param.dim() != 2:
            continue
        start, stop = own_rows(param)
        if start == stop:
            continue
        found, expected = param.grad._local_tensor.view(stop - start, -1), whole[fqn][start:stop]
        error = ((found - expected).norm() / expected.norm()).item()
        # A comparison with NaN is never true.
        largest = max(largest, error) if error == error else float("inf")
        num_compared += 1
    assert num_compared >= 3
    return largest


def _train(
    sharding: str, kind: str, settings: dict[str, Any], whole: Any, *, is_late: bool = False
) -> float:
    """Run the microbatches of a step of one model, and compare."""
    import megatron_muon

    if not is_late:
        megatron_muon.enable()
    model = wrap_gpt(build_gpt(**settings), sharding)
    megatron_muon.enable()
    if kind == EXPERTS:
        fused_linear.mark_as_grouped_experts(model)
    elif kind == MEGATRON:
        fused_linear.fuse_linears_of_megatron(model)
    model.zero_grad_buffer()
    for microbatch in range(NUM_MICROBATCHES):
        run_backward(model, microbatch, is_last=microbatch == NUM_MICROBATCHES - 1)
    difference = _difference(model, whole)
    megatron_muon.disable()
    return difference


def _differences(kind: str, settings: dict[str, Any]) -> list[dict[str, float]]:
    """Compare with all patches, with patches enabled after wrapping, and without the one."""
    start_process_groups()
    whole = _whole_gradients(settings)
    if kind != MEGATRON:
        fused_linear.replace_linears_of_megatron()
    args = (kind, settings, whole)
    repaired = {sharding: _train(sharding, *args) for sharding in ZERO.values()}
    late = {sharding: _train(sharding, *args, is_late=True) for sharding in ("no_shard", "optim")}
    without(kind)
    return [repaired, late, {sharding: _train(sharding, *args) for sharding in ZERO.values()}]


@pytest.mark.parametrize(
    ("kind", "settings", "broken"),
    [
        pytest.param(TE, {}, {"optim"}, id="transformer_engine"),
        slow(EXPERTS, {}, {"optim"}, id="grouped_experts"),
        slow(MEGATRON, {}, {"no_shard", "optim"}, id="megatron"),
        slow(MEGATRON, {"is_tied": True}, set(ZERO.values()), id="tied_embedding"),
        slow(MEGATRON, {"mtp_num_layers": 1}, set(ZERO.values()), id="multi_token"),
    ],
)
def test_fused_gradients_are_the_unsharded_sum_if_repaired(kind, settings, broken):
    """Main gradients of three microbatches on two ranks, under each strategy.

    On GPUs, where accumulation is fused unless a flag says otherwise, each microbatch under optim
    overwrote the one before: the last of a step alone trained. Megatron's own linear, the output
    layer of every GPT, did so under no_shard too; an output layer that is the embedding, or that
    predicts several tokens, lost gradients under every strategy.
    """
    run = run_ranks(NUM_RANKS, _differences, kind, settings).check()
    # The matrix that is wrong may lie on one rank alone.
    repaired, late, unrepaired = (
        {sharding: max(found[sharding] for found in by_rank) for sharding in by_rank[0]}
        for by_rank in zip(*run.results, strict=True)
    )
    # The patches are looked up at each call, so a model may have been wrapped before.
    assert max(*repaired.values(), *late.values()) < SAME, (repaired, late)
    assert {sharding for sharding, error in unrepaired.items() if error > OTHER} == broken
    assert all(unrepaired[sharding] < SAME for sharding in unrepaired.keys() - broken)
