# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages under Megatron-FSDP beside DDP with the same stages, with and without repairs.

Both runs have the same ranks, microbatches and samples, so gradients are summed in nearly the same
order: losses agree to the last digits of fp32, as in test_parity.py, and norms too.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ranks import Run, launch, run_ranks
from helpers.repairs import without
from helpers.toy_gpt import (
    BF16,
    EP,
    FP32_GRADIENTS,
    HFSDP,
    HSDP,
    INTERLEAVED,
    MOE,
    NO_MATRIX,
    PP,
    TIED,
    TP,
    ZERO,
    assert_trains_alike,
    fsdp_toy_gpt,
    microbatches,
    relative_differences,
    toy_gpt,
    train,
)

from megatron_muon.mcore.pipeline_repairs import free_views

pytestmark = pytest.mark.ranks

slow = functools.partial(pytest.param, marks=pytest.mark.slow)
TEN = ("--muon-fp32-matmul-prec", "high", "--train-iters", "10")
ADAM = ("--optimizer", "adam", "--lr", "1e-3", "--train-iters", "10")
# Dense layers in the first stage, experts in the second.
EXPERTS_IN_ONE = (*PP, *MOE, "--moe-layer-freq", "[0,1]")
LOSS_TOLERANCE = 5e-7
# Sums of squares in another order, in fp32: a few units in the last place of 1.2e-7.
NORM_TOLERANCE = 1e-6
# As test_parity.py: weights are rounded to bf16 in each iteration.
BF16_TOLERANCE = 1.5e-4


@functools.cache
def _under_ddp(world_size: int, flags: tuple[str, ...]) -> Run:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if TP[0] in flags else None
    return train(world_size, toy_gpt(*flags), 2, env=env)


def _under_fsdp(
    world_size: int, zero: int, flags: tuple[str, ...], before: Callable[[], None] | None = None
) -> Run:
    return train(world_size, fsdp_toy_gpt(ZERO[zero], *flags), 2, before=before)


def check(
    world_size: int,
    zero: int,
    flags: tuple[str, ...],
    fsdp_flags: tuple[str, ...] = (),
    tolerances: tuple[float, float] = (LOSS_TOLERANCE, NORM_TOLERANCE),
) -> None:
    """Compare losses and gradient norms of every iteration with DDP's."""
    expected = _under_ddp(world_size, flags)
    found = _under_fsdp(world_size, zero, (*flags, *fsdp_flags))
    assert_trains_alike(found, expected, tolerances)


@pytest.mark.parametrize(
    ("world_size", "zero", "flags", "fsdp_flags"),
    [
        slow(4, 0, PP, (), id="zero0"),
        slow(4, 1, PP, (), id="zero1"),
        slow(4, 2, PP, (), id="zero2"),
        pytest.param(4, 3, PP, (), id="zero3"),
        slow(6, 3, PP, (), id="three_ranks_per_stage"),
        slow(4, 2, PP, HSDP, id="hsdp"),
        slow(4, 3, PP, HFSDP, id="hfsdp"),
        slow(4, 3, (*PP, *EP), (), id="ep2"),
        slow(4, 0, (*EXPERTS_IN_ONE, *EP[-2:]), (), id="experts_in_one_zero0_ep2"),
        slow(4, 3, EXPERTS_IN_ONE, (), id="experts_in_one_zero3"),
        slow(4, 3, (*PP, *TP), (), id="tp2_dp1"),
        slow(8, 3, (*PP, *TP, *EP, "--sequence-parallel"), (), id="tp2_ep2"),
        pytest.param(4, 1, (*INTERLEAVED, TIED), (), id="zero1_interleaved_tied"),
        slow(4, 3, INTERLEAVED, (), id="zero3_interleaved"),
        slow(4, 0, (*PP, TIED), (), id="zero0_tied"),
        slow(4, 3, (*PP, TIED), HFSDP, id="hfsdp_tied"),
        slow(8, 2, (*PP, *TP, TIED), HSDP, id="hsdp_tp2_tied"),
        pytest.param(4, 3, NO_MATRIX, (), id="zero3_stage_without_matrix"),
        slow(4, 3, (*PP, "--mtp-num-layers", "1"), (), id="zero3_mtp"),
    ],
)
def test_stages_train_like_ddp(world_size, zero, flags, fsdp_flags):
    """Losses and norms of ten iterations of Muon, in every layout."""
    check(world_size, zero, (*flags, *TEN), fsdp_flags)


@pytest.mark.parametrize(
    ("world_size", "zero", "flags", "fsdp_flags"),
    [
        pytest.param(4, 3, (*PP, TIED), (), id="zero3_tied"),
        slow(4, 1, PP, (), id="zero1"),
        slow(4, 3, INTERLEAVED, (), id="zero3_interleaved"),
        slow(8, 2, (*PP, *EP), HSDP, id="hsdp_ep2"),
        slow(4, 3, NO_MATRIX, HFSDP, id="hfsdp_stage_without_layer"),
    ],
)
def test_adam_trains_like_ddp(world_size, zero, flags, fsdp_flags):
    """The repairs are those of Megatron-FSDP, not of Muon."""
    check(world_size, zero, (*flags, *ADAM), fsdp_flags)


@pytest.mark.slow
def test_bf16_trains_like_ddp():
    """Weights and what stages send in bf16, gradients in fp32 as under DDP."""
    flags = (*PP, *BF16, "--train-iters", "10")
    check(4, 3, flags, FP32_GRADIENTS, (BF16_TOLERANCE, 100 * BF16_TOLERANCE))


@pytest.mark.parametrize(
    ("repair", "world_size", "zero", "flags", "said"),
    [
        pytest.param("_get_dp_tp_mesh", 2, 3, PP, "EinopsError", id="mesh"),
        slow("_get_hsdp_tp_mesh", 4, 3, (*PP, *HSDP), "EinopsError", id="hsdp_mesh"),
        slow("deallocate_output_tensor", 2, 1, PP, "counter-productive to free a view", id="views"),
        slow("_param_name", 2, 1, INTERLEAVED, "Parameter names conflict", id="names"),
        slow("_init_fsdp_param_and_grad_buffer", 2, 3, NO_MATRIX, "ZeroDivisionError", id="units"),
        slow(
            *("param_and_grad_buffer.make_fsdp_dtensor", 4, 3, (*PP, *TP)),
            "Inconsistent tensor metadata",
            id="check_of_the_job",
        ),
    ],
)
def test_stages_fail_without_the_repair(repair, world_size, zero, flags, said):
    """What upstream does, with every optimizer."""
    run = launch(
        world_size,
        fsdp_toy_gpt(ZERO[zero], *flags, *TEN),
        before=functools.partial(without, repair),
        timeout_s=60.0,
    )
    assert any(run.exit_codes)
    assert any(said in output for output in run.outputs)


@pytest.mark.slow
def test_tied_embeddings_differ_without_the_repair():
    """Shards of two stages hold other rows: ranks stop at other shapes, or train something else."""
    flags = (*PP, TIED, *TEN)
    expected = _under_ddp(4, flags).losses
    arguments = fsdp_toy_gpt(ZERO[3], *flags)
    before = functools.partial(without, "_allreduce_embedding_grad")
    run = launch(4, [*arguments, *microbatches(2, 4, flags)], before=before, timeout_s=60.0)
    if not any(run.exit_codes):
        assert max(relative_differences(run.losses, expected)) > 100 * LOSS_TOLERANCE


def _align(is_refused: bool) -> None:
    """Let Megatron align gradients of stages, as it does by default."""
    from megatron_muon.mcore import arguments, chained_optimizer

    original = arguments.check

    def check_and_align(args: Any) -> None:
        original(args)
        args.align_grad_reduce = True

    arguments.check = check_and_align
    if not is_refused:
        chained_optimizer.alignment_problems = lambda config: []


@pytest.mark.slow
def test_aligned_gradients_of_stages_are_refused_and_would_train_something_else():
    """The last stages never reduced theirs, and losses were others without a word."""
    with pytest.raises(AssertionError) as caught:
        _under_fsdp(4, 1, (*PP, *TEN), functools.partial(_align, True))
    assert "config.grad_sync_func: expected None with pipeline stages" in str(caught.value)
    assert "exit codes [1, 1, 1, 1]" in str(caught.value)
    wrong = _under_fsdp(4, 1, (*PP, *TEN), functools.partial(_align, False)).losses
    expected = _under_ddp(4, (*PP, *TEN)).losses
    assert max(relative_differences(wrong, expected)) > 1000 * LOSS_TOLERANCE


def test_freed_outputs_give_up_their_memory_and_keep_their_graph():
    """A view alone would leave the memory to the tensor that it is a view of."""

    def original(out: Any, is_on: bool = False) -> None:
        raise AssertionError("no view")

    class Hook(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    weight = torch.full((64, 64), 3.0, requires_grad=True)
    output = weight * 2
    out = Hook.apply(output)
    assert out._base is not None
    free_views(original)(out, True)
    assert out.untyped_storage().nbytes() == output.untyped_storage().nbytes() == 4
    grad = torch.ones(64, 64)
    # As megatron.core.pipeline_parallel.schedules.custom_backward: out has another shape by now.
    torch.autograd.Variable._execution_engine.run_backward(
        (out,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    assert torch.equal(weight.grad, 2 * grad)


def _layer_names(num_stages: int) -> list[str]:
    from megatron_muon.mcore.checkpoint_state import LayerNames

    layers = torch.nn.ModuleList([torch.nn.Linear(1, 1) for _ in range(2)])
    for number, layer in enumerate(layers):
        layer.layer_number = 5 + number
    chunk = torch.nn.Module()
    chunk.config = types.SimpleNamespace(pipeline_model_parallel_size=num_stages)
    chunk.module = torch.nn.Module()
    chunk.module.decoder = torch.nn.Module()
    chunk.module.decoder.layers = layers
    names = LayerNames(chunk)
    return [
        names(name)
        for name in (
            "module.decoder.layers.1.mlp.weight",
            "decoder.layers.0.experts.layers.1.bias",
            "decoder.layers.7.weight",
            "vision.layers.0.weight",
            "embedding.weight",
        )
    ]


def test_layers_of_a_stage_are_named_by_their_position_in_the_model():
    """The fifth and sixth layer of a model; other lists of layers keep their numbers."""
    (found,) = run_ranks(1, _layer_names, 2).check().results
    assert found == [
        "module.decoder.layers.5.mlp.weight",
        "decoder.layers.4.experts.layers.1.bias",
        "decoder.layers.7.weight",
        "vision.layers.0.weight",
        "embedding.weight",
    ]
