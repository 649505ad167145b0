# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Refuse settings: one table for command lines and megatron-core scripts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_muon.user_errors import SettingsError

# Values of --optimizer: Muon and its adaptive forms, and Lion, which is elementwise.
BUILT_OPTIMIZERS = ("muon", "adaptive_muon", "lion")
# Names under which Megatron builds a Muon without Megatron-FSDP.
MUON_OPTIMIZERS = ("muon", "dist_muon", "adaptive_muon")

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Unsupported:
    """One setting that cannot work.

    Args:
        flag: Flag or setting, as the user knows it.
        is_requested: Returns True if settings ask for it.
        reason: Why it cannot work.
        instead: Advice.
        actual: Returns the value for the message; None if ``flag`` is enough.
    """

    flag: str
    is_requested: Callable[[Settings], bool]
    reason: str
    instead: str
    actual: Callable[[Settings], str] | None = None

    def sentence(self, settings: Settings) -> str:
        """Return flag, value, reason and advice as a sentence."""
        actual = f", got {self.actual(settings)}" if self.actual is not None else ""
        return f"{self.flag}{actual}: {self.reason}; {self.instead}."


def _value_of(name: str) -> Callable[[Settings], str]:
    """Return an ``actual`` that is the value of one setting."""
    return lambda settings: str(settings.get(name)).removeprefix("torch.")


def _flags(*names: str) -> Callable[[Settings], str]:
    """Return an ``actual`` that spells the flags on the command line."""

    def spelled(settings: Settings) -> str:
        requested = []
        for name in names:
            value = settings.get(name)
            # False is a flag that is absent; 0 may be a value.
            if value is None or value is False:
                continue
            flag = "--" + name.replace("_", "-")
            requested.append(flag if value is True else f"{flag} {_value_of(name)(settings)}")
        return " ".join(requested)

    return spelled


def _all_set(*names: str) -> Callable[[Settings], bool]:
    """Return an ``is_requested`` that is true if all of some settings are."""
    return lambda settings: all(settings.get(name) for name in names)


CHECKPOINTS = ("save", "load", "pretrained_checkpoint")


def has_checkpoints(settings: Settings) -> bool:
    """Return whether a checkpoint is saved or loaded."""
    return any(settings.get(key) is not None for key in CHECKPOINTS)


_STAGES = "pipeline_model_parallel_size"


def _has_several(settings: Settings, name: str) -> bool:
    # Configurations have fields that are None.
    return (settings.get(name) or 1) > 1


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


def _has_low_precision_main_params(settings: Settings) -> bool:
    dtype = str(settings.get("megatron_fsdp_main_params_dtype", "fp32")).removeprefix("torch.")
    # auto and None mean the dtype of the model.
    if dtype in ("auto", "None"):
        return bool(settings.get("bf16"))
    return dtype not in ("fp32", "float32")


def _has_whole_graph(settings: Settings) -> bool:
    # Lists of names or enums. Megatron translates the older settings after this check.
    keys = ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")
    requested = [settings.get("cuda_graph_impl")]
    for value in filter(None, map(settings.get, keys)):
        requested += value if isinstance(value, list) else str(value).split(",")
    return "full_iteration" in [getattr(scope, "name", scope) for scope in requested]


# Refused with any optimizer: Adam's weights are clipped too.
QK_CLIP_UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(
        "--qk-clip with tensor parallelism, but for multi-latent attention",
        lambda s: (
            bool(s.get("qk_clip"))
            and _has_several(s, "tensor_model_parallel_size")
            and not s.get("multi_latent_attention")
        ),
        "upstream's clip divides the sizes of all ranks by the query groups of one, and fails",
        "use data parallelism alone, or --multi-latent-attention",
        _flags("tensor_model_parallel_size"),
    ),
    Unsupported(
        "--qk-clip --attention-output-gate",
        _all_set("qk_clip", "attention_output_gate"),
        "upstream's clip leaves the gate out of linear_qkv, and fails",
        "drop one of them",
    ),
    Unsupported(
        "--qk-clip --optimizer-cpu-offload",
        _all_set("qk_clip", "optimizer_cpu_offload"),
        "the next step overwrites clipped weights with their copies on the CPU",
        "drop one of them",
    ),
    Unsupported(
        "--qk-clip --experimental-attention-variant dsa",
        lambda s: bool(s.get("qk_clip")) and s.get("experimental_attention_variant") == "dsa",
        "upstream has no clip for absorbed multi-latent attention",
        "drop --qk-clip",
    ),
)

# Megatron-FSDP with pipeline stages, with any optimizer.
_STAGES_ROWS: tuple[Unsupported, ...] = (
    Unsupported(
        "checkpoints with several stages on a rank (interleaved schedules)",
        lambda s: _has_several(s, _STAGES) and _has_chunks(s) and has_checkpoints(s),
        "Megatron-FSDP's checkpoints hold one chunk of layers per rank",
        "use one stage per rank, or train without checkpoints",
        _flags(
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "pipeline_model_parallel_layout",
            *CHECKPOINTS,
        ),
    ),
    Unsupported(
        "checkpoints of --mtp-num-layers with pipeline stages",
        lambda s: _has_several(s, _STAGES) and bool(s.get("mtp_num_layers")) and has_checkpoints(s),
        "two stages save their copies of the embedding under one name",
        "drop --mtp-num-layers, or train without checkpoints",
        _flags("mtp_num_layers", *CHECKPOINTS),
    ),
    Unsupported(
        "--defer-embedding-wgrad-compute",
        _all_set("defer_embedding_wgrad_compute"),
        "Megatron-FSDP reduces the gradient of the output layer before it has been computed",
        "drop it",
    ),
)

FSDP_UNSUPPORTED = (*QK_CLIP_UNSUPPORTED, *_STAGES_ROWS)

# docs/support.md shows the same rows; a test compares them. A predicate sees the command line's
# namespace, or the merged configurations of a script on megatron-core, where most keys are absent:
# absent means not asked for.
UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(
        "--optimizer other than muon, adaptive_muon and lion",
        lambda s: s.get("optimizer") not in BUILT_OPTIMIZERS,
        "it has no implementation over row shards here",
        "use --optimizer muon, adaptive_muon, lion, adam or sgd",
        _value_of("optimizer"),
    ),
    Unsupported(
        "--fp16",
        _all_set("fp16"),
        "emerging optimizers have no loss scaling",
        "use --bf16",
    ),
    Unsupported(
        "--use-precision-aware-optimizer",
        _all_set("use_precision_aware_optimizer"),
        "it keeps gradients and states outside of the fp32 tensors that Muon steps",
        "drop it; Muon already keeps one state tensor where Adam keeps two",
    ),
    Unsupported(
        "--exp-avg-dtype fp16 or fp8",
        lambda s: s.get("exp_avg_dtype") in ("fp16", "fp8"),
        "momentum is averaged in float32, and rounded to bfloat16 at most",
        "use --exp-avg-dtype bf16 or fp32",
        _value_of("exp_avg_dtype"),
    ),
    Unsupported(
        "--optimizer-cpu-offload",
        _all_set("optimizer_cpu_offload"),
        "Megatron then steps copies of the parameters on the CPU",
        "drop it; --muon-fsdp-offload-momentum keeps momentum in CPU memory",
    ),
    Unsupported(
        "--optimizer-cuda-graph",
        _all_set("optimizer_cuda_graph"),
        "the step checks gradients on the host",
        "drop it",
    ),
    Unsupported(
        "--cuda-graph-impl, --cuda-graph-modules or --cuda-graph-scope full_iteration",
        _has_whole_graph,
        "replaying a graph skips the Python hooks that reduce and attach gradients",
        "use --cuda-graph-impl none, or graphs of layers, which no test covers",
    ),
    Unsupported(
        "--no-use-layer-wise-param-layout or use_layer_wise_distributed_optimizer",
        lambda s: (
            bool(s.get("use_layer_wise_distributed_optimizer"))
            or s.get("use_layer_wise_param_layout", True) is False
        ),
        "it assigns whole layers to ranks, and Megatron-FSDP has already sharded their rows",
        "drop it; rows stay sharded under --use-megatron-fsdp",
    ),
    *FSDP_UNSUPPORTED,
    Unsupported(
        "ddp_config.megatron_fsdp_use_decoupled_grad",
        _all_set("megatron_fsdp_use_decoupled_grad"),
        "gradients are then stored in another attribute than Muon and Adam read",
        "leave it False",
    ),
    Unsupported(
        "--muon-fp32-matmul-prec low",
        lambda s: s.get("muon_fp32_matmul_prec") == "low",
        "Megatron offers it, but torch has no such precision and the first step fails",
        "use medium or high",
    ),
    Unsupported(
        "GTP weight rematerialization",
        lambda s: _has_several(s, "gtp_weight_remat_size"),
        "it shards rows a second time, which Megatron-FSDP does not record",
        "drop it",
        _flags("gtp_weight_remat_size"),
    ),
    Unsupported(
        "HSDP without --overlap-grad-reduce",
        lambda s: (
            _has_several(s, "num_distributed_optimizer_instances")
            and not s.get("overlap_grad_reduce")
        ),
        "Megatron-FSDP then never reduces gradients over the outer ranks, and the replicas drift",
        "add --overlap-grad-reduce",
        _flags("num_distributed_optimizer_instances"),
    ),
    Unsupported(
        "--ddp-average-in-collective",
        lambda s: bool(s.get("ddp_average_in_collective") or s.get("average_in_collective")),
        "Megatron-FSDP then drops the scaling of expert gradients, and fails on dense models",
        "drop it; gradients are averaged all the same",
    ),
    Unsupported(
        "--mtp-use-repeated-layer with fused gradient accumulation, under optim_grads and "
        "optim_grads_params",
        lambda s: (
            bool(s.get("mtp_use_repeated_layer") and s.get("gradient_accumulation_fusion"))
            # One prediction uses the layer once, and there is nothing to drop.
            and _has_several(s, "mtp_num_layers")
            and s.get("data_parallel_sharding_strategy") in ("optim_grads", "optim_grads_params")
        ),
        "Transformer Engine then keeps the gradient of one use of the layer, and drops the others",
        "add --no-gradient-accumulation-fusion",
        _flags("mtp_num_layers", "mtp_use_repeated_layer", "data_parallel_sharding_strategy"),
    ),
    Unsupported(
        "--megatron-fsdp-main-params-dtype other than fp32",
        _has_low_precision_main_params,
        "Newton-Schulz and momentum need float32 main parameters",
        "use --megatron-fsdp-main-params-dtype fp32",
        _value_of("megatron_fsdp_main_params_dtype"),
    ),
    Unsupported(
        "checkpoints of grouped experts with biases under expert parallelism",
        lambda s: (
            bool(s.get("moe_grouped_gemm") and s.get("add_bias_linear"))
            and _has_several(s, "expert_model_parallel_size")
            and has_checkpoints(s)
        ),
        "Megatron-FSDP's checkpoints give the biases of all expert-parallel ranks one name",
        "add --disable-bias-linear",
        _flags(
            "moe_grouped_gemm",
            "expert_model_parallel_size",
            *CHECKPOINTS,
        ),
    ),
    Unsupported(
        "--async-save",
        _all_set("async_save"),
        "upstream's asynchronous writer has not been run with Megatron-FSDP here, and does not "
        "replace a checkpoint in one step",
        "drop it",
    ),
    Unsupported(
        "--non-persistent-ckpt-type",
        lambda s: s.get("non_persistent_ckpt_type") is not None,
        "upstream writes these checkpoints for Megatron-FSDP, and cannot load them",
        "use --save-interval with --save-retain-interval",
        _value_of("non_persistent_ckpt_type"),
    ),
    Unsupported(
        "--ckpt-convert-format",
        lambda s: s.get("ckpt_convert_format") is not None,
        "a Megatron-FSDP model writes no other format",
        "drop it",
        _value_of("ckpt_convert_format"),
    ),
    Unsupported(
        "--load-main-params-from-ckpt",
        _all_set("load_main_params_from_ckpt"),
        "fsdp_dtensor checkpoints hold the main parameters, which are loaded anyway",
        "drop it",
    ),
)


def unsupported_settings(
    settings: Settings, rows: Sequence[Unsupported] = UNSUPPORTED
) -> list[str]:
    """List the settings that are not supported under Megatron-FSDP, as sentences.

    Args:
        settings: Names and values as Megatron's arguments and configurations spell them; a name
            that is absent counts as not requested.
        rows: Table of refusals; ``FSDP_UNSUPPORTED`` with another optimizer than Muon.

    Returns:
        A sentence for each refused setting: value, reason and advice.
    """
    return [row.sentence(settings) for row in rows if row.is_requested(settings)]


def raise_where_refused(optimizer: object, refusals: Sequence[str]) -> None:
    """Raise all refusals together, if there are any.

    Args:
        optimizer: Value of ``--optimizer``.
        refusals: Sentences of ``unsupported_settings()``.

    Raises:
        SettingsError: With all of them.
    """
    if refusals:
        raise SettingsError(
            f"--optimizer {optimizer} --use-megatron-fsdp cannot run with:\n  "
            + "\n  ".join(refusals)
        )


def alignment_problems(config: Any) -> list[str]:
    """Return an error message if stages would not reduce their gradients.

    Args:
        config: Configuration of a model chunk, while it trains.
    """
    if config.pipeline_model_parallel_size < 2 or config.grad_sync_func is None:
        return []
    return [
        "config.grad_sync_func: expected None with pipeline stages, got a function, which "
        "Megatron-FSDP ignores: gradients of stages stay unreduced. Leave it out "
        "(--no-align-grad-reduce; in Megatron-Bridge dist.align_grad_reduce=False)"
    ]
