# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Repairs of pipeline stages under Megatron-FSDP; test_parity.py has the runs with all of them."""

import functools
import types
from typing import Any

import pytest
import torch
from helpers.parity import HIGH, HIGH_TOLERANCE
from helpers.ranks import launch
from helpers.repairs import without
from helpers.toy_gpt import (
    HSDP,
    INTERLEAVED,
    NO_MATRIX,
    PP,
    TIED,
    TP,
    V2,
    ZERO,
    fsdp_toy_gpt,
    microbatches,
    needs_flags,
    reference,
    relative_differences,
    slow,
    train,
)

from megatron_muon.mcore.checkpoint_state import layer_names
from megatron_muon.mcore.pipeline_repairs import free_views

pytestmark = pytest.mark.ranks
ADAM_ON_V2 = (*V2, "--optimizer", "adam")


@pytest.mark.parametrize(
    ("repair", "world_size", "zero", "flags", "said"),
    [
        pytest.param("_get_dp_tp_mesh", 2, 3, PP, "EinopsError", id="mesh"),
        slow("_get_hsdp_tp_mesh", 4, 3, (*PP, *HSDP), "EinopsError", id="hsdp_mesh"),
        slow("deallocate_output_tensor", 2, 1, PP, "counter-productive to free a view", id="views"),
        slow("_init_fsdp_param_and_grad_buffer", 2, 3, NO_MATRIX, "ZeroDivisionError", id="units"),
        slow(
            *("param_and_grad_buffer.make_fsdp_dtensor", 4, 3, (*PP, *TP)),
            # Ranks of two stages gather different tensors: what fails there varies.
            "check_tensor_meta",
            id="check_of_the_job",
        ),
        pytest.param(
            *("FsdpContext.register_post_backward_final_callback", 2, 3, (*PP, *ADAM_ON_V2)),
            "BACKWARD -> Phase.BACKWARD",
            id="v2_count",
            marks=needs_flags,
        ),
        pytest.param(
            *("FullyShardedDataParallelV2._validate_config", 2, 3, (*PP, *ADAM_ON_V2)),
            "MFSDP v2 does not currently support: tensor_model_parallel_size=1, pipeline_",
            id="v2_stages",
            marks=needs_flags,
        ),
        pytest.param(
            *("FullyShardedOptimizer._validate_config", 2, 3, (*INTERLEAVED, *ADAM_ON_V2)),
            "MFSDP v2 currently supports exactly one model chunk.",
            id="v2_chunks",
            marks=needs_flags,
        ),
    ],
)
def test_stages_fail_without_the_repair(repair, world_size, zero, flags, said):
    """Pipeline stages fail without each repair, with every optimizer."""
    run = launch(
        world_size,
        fsdp_toy_gpt(ZERO[zero], *flags, *microbatches(2, world_size, flags)),
        before=functools.partial(without, repair),
        timeout_s=60.0,
    )
    assert any(run.exit_codes)
    assert any(said in output for output in run.outputs)


def ddp_losses(*flags: str) -> list[float]:
    """Train two stages under DDP on the samples of four ranks."""
    return reference(*HIGH, *flags, num_microbatches=2).losses


@pytest.mark.slow
def test_tied_embeddings_differ_without_the_repair():
    """Shards of tied embeddings fail or train something else without the repair."""
    flags = (*PP, TIED, *HIGH)
    arguments = fsdp_toy_gpt(ZERO[3], *flags, *microbatches(2, 4, flags))
    before = functools.partial(without, "_allreduce_embedding_grad")
    run = launch(4, arguments, before=before, timeout_s=60.0)
    if not any(run.exit_codes):
        differences = relative_differences(run.losses, ddp_losses(*PP, TIED))
        assert max(differences) > 100 * HIGH_TOLERANCE


def _align(is_refused: bool) -> None:
    """Let Megatron align gradients of stages, as it does by default."""
    from megatron_muon.mcore import arguments, chained_optimizer

    arguments.adapt_arguments = lambda args: None
    if not is_refused:
        chained_optimizer.alignment_problems = lambda config: []


@pytest.mark.slow
def test_aligned_gradients_of_stages_are_refused():
    """Alignment of gradients over stages, which drops the last stage's, is refused."""
    aligned = fsdp_toy_gpt(ZERO[1], *PP, *HIGH)
    with pytest.raises(AssertionError) as caught:
        train(4, aligned, 2, before=functools.partial(_align, True))
    assert "config.grad_sync_func: expected None with pipeline stages" in str(caught.value)
    assert "exit codes [1, 1, 1, 1]" in str(caught.value)
    wrong = train(4, aligned, 2, before=functools.partial(_align, False)).losses
    assert max(relative_differences(wrong, ddp_losses(*PP))) > 1000 * HIGH_TOLERANCE


def test_freed_outputs_give_up_their_memory_and_keep_their_graph():
    """Freed outputs give up the memory of their views and keep their graph."""

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
    free_views(original, out, True)
    assert out.untyped_storage().nbytes() == output.untyped_storage().nbytes() == 4
    grad = torch.ones(64, 64)
    # As megatron.core.pipeline_parallel.schedules.custom_backward: out has another shape by now.
    torch.autograd.Variable._execution_engine.run_backward(
        (out,), (grad,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    assert torch.equal(weight.grad, 2 * grad)


def test_layers_of_a_stage_have_their_index_in_the_model():
    """Layers of a stage have the index in the whole model, and other lists keep their numbers.

    A tied output layer has the name of the embedding that it is a copy of.
    """
    chunk = torch.nn.Module()
    chunk.config = types.SimpleNamespace(pipeline_model_parallel_size=2)
    chunk.module = torch.nn.Module()
    chunk.module.decoder = torch.nn.Module()
    chunk.module.decoder.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2))
    for number, layer in enumerate(chunk.module.decoder.layers):
        layer.layer_number = 5 + number
    chunk.module.output_layer = torch.nn.Linear(1, 1, bias=False)
    # As Megatron marks the last stage's copy of a tied embedding.
    chunk.module.output_layer.weight.shared = True
    names = layer_names(chunk)
    for name, expected in {
        "module.decoder.layers.1.mlp.weight": "module.decoder.layers.5.mlp.weight",
        "decoder.layers.0.experts.layers.1.bias": "decoder.layers.4.experts.layers.1.bias",
        "decoder.layers.7.weight": "decoder.layers.7.weight",
        "vision.layers.0.weight": "vision.layers.0.weight",
        "embedding.weight": "embedding.weight",
        "module.output_layer.weight": "module.embedding.word_embeddings.weight",
    }.items():
        assert names(name) == expected
