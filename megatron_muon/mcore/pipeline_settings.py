# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What pipeline stages under Megatron-FSDP cannot have, with any optimizer."""

from typing import Any

from megatron_muon.mcore.refusal import (
    CHECKPOINTS,
    Settings,
    Unsupported,
    flags,
    has_checkpoints,
)

_STAGES = "pipeline_model_parallel_size"


def has_stages(settings: Settings) -> bool:
    """Return whether there are several pipeline stages."""
    return (settings.get(_STAGES) or 1) > 1


def _has_chunks(settings: Settings) -> bool:
    """Return whether a rank has several stages, which Megatron derives from one of these later."""
    layout = settings.get("pipeline_model_parallel_layout")
    if isinstance(layout, str):
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout,
        )

        return PipelineParallelLayerLayout.get_num_stages_from_str(layout) > settings[_STAGES]
    keys = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    return any(settings.get(key) is not None for key in keys)


STAGES_UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(
        "checkpoints with several stages on a rank (interleaved schedules)",
        lambda s: has_stages(s) and _has_chunks(s) and has_checkpoints(s),
        "Megatron-FSDP's checkpoints hold one chunk of layers per rank",
        "use one stage per rank, or train without checkpoints",
        flags(
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "pipeline_model_parallel_layout",
            *CHECKPOINTS,
        ),
    ),
    Unsupported(
        "checkpoints of --mtp-num-layers with pipeline stages",
        lambda s: has_stages(s) and bool(s.get("mtp_num_layers")) and has_checkpoints(s),
        "two stages save their copies of the embedding under one name",
        "drop --mtp-num-layers, or train without checkpoints",
        flags("mtp_num_layers", *CHECKPOINTS),
    ),
    Unsupported(
        "--defer-embedding-wgrad-compute",
        lambda s: bool(s.get("defer_embedding_wgrad_compute")),
        "Megatron-FSDP reduces the gradient of the output layer before it has been computed",
        "drop it",
    ),
)


def alignment_problems(config: Any) -> list[str]:
    """List what makes stages reduce no gradients, as a sentence.

    Args:
        config: Configuration of a model chunk, while it trains.
    """
    if config.pipeline_model_parallel_size < 2 or config.grad_sync_func is None:
        return []
    return [
        "config.grad_sync_func: expected None with pipeline stages, got a function, which "
        "Megatron-FSDP ignores: gradients of stages stay unreduced. Leave it out"
    ]
