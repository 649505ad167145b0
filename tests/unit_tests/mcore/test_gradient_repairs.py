# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Repairs of upstream's gradients: each test is run without the repair too, where it must fail.

Norms of runs against DDP, and fused accumulation against the unsharded sum of microbatches.
"""

import functools
from typing import Any

import pytest
import torch
from helpers import fused_linear
from helpers.ranks import launch, run_ranks
from helpers.repairs import without
from helpers.toy_fsdp import build_gpt, run_backward, start_process_groups, wrap_gpt
from helpers.toy_gpt import EP, HFSDP, ZERO, fsdp_toy_gpt, slow, toy_gpt

pytestmark = pytest.mark.ranks
# Adam, so that only upstream's own optimizer is under test; parity of Muon is in test_parity.py.
# Several microbatches: three on four ranks, six on two.
ADAM = tuple(
    "--optimizer adam --lr 1e-3 --train-iters 3 --lr-warmup-iters 0 --global-batch-size 12".split()
)
# No scaling of gradients, and a copy of them in another dtype for the reduction.
PER_TOKEN = (*EP, "--bf16", "--calculate-per-token-loss")
BF16_REDUCTION = (
    *("--megatron-fsdp-main-grads-dtype", "fp32"),
    *("--megatron-fsdp-grad-comm-dtype", "bf16"),
)


def _norms(world_size: int, flags: list[str], missing: str | None = None) -> list[float]:
    before = functools.partial(without, missing) if missing else None
    return [each["grad_norm"] for each in launch(world_size, flags, before=before).check().history]


@functools.cache
def _sound_norms(
    world_size: int, flags: tuple[str, ...], fsdp_flags: tuple[str, ...]
) -> tuple[list[float], list[float]]:
    """Return the norms under DDP, on one rank if possible, and under FSDP with all repairs."""
    num_ranks = world_size if EP[-2] in flags else 1
    under_fsdp = fsdp_toy_gpt("optim_grads_params", *ADAM, *flags, *fsdp_flags)
    return _norms(num_ranks, toy_gpt(*ADAM, *flags)), _norms(world_size, under_fsdp)


@pytest.mark.parametrize(
    ("patch", "world_size", "flags", "fsdp_flags", "rel"),
    [
        slow("_create_hfsdp_helper_buffer", 4, (), HFSDP, 1e-5, id="scaling_factor"),
        slow("_get_megatron_optimizer_based_on_param_groups", 4, (), HFSDP, 1e-5, id="instances"),
        pytest.param("DataParallelBuffer.__init__", 2, EP, (), 1e-5, id="group_of_one_rank"),
        slow(
            *("DataParallelBuffer.__init__", 2, PER_TOKEN, BF16_REDUCTION, 1e-2),
            id="added_to_itself",
        ),
    ],
)
def test_gradient_norm_is_ddps_and_is_not_without_the_repair(
    patch, world_size, flags, fsdp_flags, rel
):
    """The norm of the first gradients equals DDP's to rounding, and does not without the repair.

    Without the repair: HFSDP's gradients are dp times too large, its norm is that of one instance's
    shards, and gradients over a group of one rank are scaled again, or added to themselves, with
    each microbatch.
    """
    expected, found = _sound_norms(world_size, flags, fsdp_flags)
    assert found == pytest.approx(expected, rel=rel)
    one = fsdp_toy_gpt("optim_grads_params", *ADAM, *flags, *fsdp_flags, "--train-iters", "1")
    broken = _norms(world_size, one, missing=patch)
    # For patches/README.md: -rP shows it.
    print(f"DDP {expected[0]:.4f}, repaired {found[0]:.4f}, upstream {broken[0]:.4f}")
    assert broken[0] != pytest.approx(expected[0], rel=10 * rel)


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
    """Return the largest error of a matrix's main gradient on all ranks, of its norm."""
    from megatron_muon.mcore.fsdp_model import named_optimizer_parameters
    from megatron_muon.rows.megatron_fsdp import own_rows

    model.finish_grad_sync()
    errors = []
    for fqn, param in named_optimizer_parameters([model]):
        if param.dim() == 2 and param._local_tensor.numel() > 0:
            expected = whole[fqn][slice(*own_rows(param))]
            found = param.grad._local_tensor.view_as(expected)
            errors.append((found - expected).norm() / expected.norm())
    assert len(errors) >= 3
    largest = torch.stack(errors).nan_to_num(nan=float("inf")).max()
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return largest.item()


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
    """Fused gradients of three microbatches are the unsharded sum under each strategy.

    On GPUs, where accumulation is fused unless a flag says otherwise, each microbatch under optim
    overwrote the one before: the last of a step alone trained. Megatron's own linear, the output
    layer of every GPT, did so under no_shard too; an output layer that is the embedding, or that
    predicts several tokens, lost gradients under every strategy.
    """
    run = run_ranks(NUM_RANKS, _differences, kind, settings).check()
    repaired, late, unrepaired = run.results[0]
    # The patches are looked up at each call, so a model may have been wrapped before.
    assert max(*repaired.values(), *late.values()) < SAME, (repaired, late)
    assert {sharding for sharding, error in unrepaired.items() if error > OTHER} == broken
    assert all(unrepaired[sharding] < SAME for sharding in unrepaired.keys() - broken)
