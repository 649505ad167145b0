# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What Muon under Megatron-FSDP refuses: one table for command lines and megatron-core scripts."""

from collections.abc import Sequence

from megatron_muon.mcore.pipeline_settings import STAGES_UNSUPPORTED
from megatron_muon.mcore.refusal import (
    CHECKPOINTS,
    Settings,
    Unsupported,
    asks_for,
    flags,
    has_checkpoints,
    value,
)
from megatron_muon.user_errors import SettingsError

# What --optimizer may be: Muon and its adaptive forms, and Lion, which is elementwise.
BUILT_OPTIMIZERS = ("muon", "adaptive_muon", "lion")


def _layer_wise_flag(settings: Settings) -> str:
    # The flag only turns a layout off; the configuration of a script names the optimizer itself.
    if settings.get("use_layer_wise_param_layout", True) is False:
        return "--no-use-layer-wise-param-layout"
    return "use_layer_wise_distributed_optimizer"


def _is_hsdp(settings: Settings) -> bool:
    # None where a configuration has the field and nobody set it.
    return (settings.get("num_distributed_optimizer_instances") or 1) > 1


def _has_low_precision_main_params(settings: Settings) -> bool:
    dtype = str(settings.get("megatron_fsdp_main_params_dtype", "fp32")).removeprefix("torch.")
    # auto and None mean the dtype of the model.
    if dtype in ("auto", "None"):
        return bool(settings.get("bf16"))
    return dtype not in ("fp32", "float32")


def _has_whole_graph(settings: Settings) -> bool:
    # Lists of names or enums. Megatron translates the older settings after this check.
    keys = ("cuda_graph_modules", "cuda_graph_scope", "cuda_graph_scope_deprecated")
    given = [settings.get("cuda_graph_impl")]
    for found in filter(None, map(settings.get, keys)):
        given += found if isinstance(found, list) else str(found).split(",")
    return "full_iteration" in [getattr(each, "name", each) for each in given]


_REFUSED_OPTIMIZERS: tuple[Unsupported, ...] = (
    Unsupported(
        "--optimizer dist_muon",
        asks_for("dist_muon"),
        "it is Muon with the layer-wise distributed optimizer, which Megatron-FSDP replaces",
        "use --optimizer muon",
    ),
    Unsupported(
        "--optimizer soap or rekls",
        asks_for("soap", "rekls"),
        "their state belongs to whole matrices, and has no rows to shard",
        "use --optimizer muon or adaptive_muon",
        value("optimizer"),
    ),
    Unsupported(
        "--optimizer laprop",
        asks_for("laprop"),
        "it is elementwise, and has not been built here",
        "use --optimizer adam or lion",
    ),
    Unsupported(
        "--optimizer scion",
        asks_for("scion"),
        "Megatron cannot build it: Scion takes no betas, which Megatron passes",
        "use --optimizer muon --muon-scale-mode unit_rms_norm without --muon-nesterov; "
        "--muon-extra-scale-factor is the spectral radius. Scion's weight decay of 1 would reach "
        "what Adam steps, too",
    ),
    Unsupported(
        "--optimizer muon_hyperball, polargrad, spel, mop or sinkhorn_muon",
        asks_for("muon_hyperball", "polargrad", "spel", "mop", "sinkhorn_muon"),
        "Megatron cannot build them: they take no betas, which Megatron passes",
        "use --optimizer muon or adaptive_muon",
        value("optimizer"),
    ),
)

# Whatever the optimizer is: Adam's weights are clipped too.
QK_CLIP_UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(
        "--qk-clip with tensor parallelism, but for multi-latent attention",
        lambda s: (
            bool(s.get("qk_clip"))
            and (s.get("tensor_model_parallel_size") or 1) > 1
            and not s.get("multi_latent_attention")
        ),
        "upstream's clip divides the sizes of all ranks by the query groups of one, and fails",
        "use data parallelism alone, or --multi-latent-attention",
        flags("tensor_model_parallel_size"),
    ),
    Unsupported(
        "--qk-clip --attention-output-gate",
        lambda s: bool(s.get("qk_clip") and s.get("attention_output_gate")),
        "upstream's clip leaves the gate out of linear_qkv, and fails",
        "drop one of them",
    ),
    Unsupported(
        "--qk-clip --optimizer-cpu-offload",
        lambda s: bool(s.get("qk_clip") and s.get("optimizer_cpu_offload")),
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

FSDP_UNSUPPORTED = (*QK_CLIP_UNSUPPORTED, *STAGES_UNSUPPORTED)

# docs/support.md shows the same rows; a test compares them. A predicate sees the command line's
# namespace, or the merged configurations of a script on megatron-core, where most keys are absent:
# absent means not asked for.
UNSUPPORTED: tuple[Unsupported, ...] = (
    *_REFUSED_OPTIMIZERS,
    Unsupported(
        "--optimizer of another name",
        lambda s: (
            s.get("optimizer") not in BUILT_OPTIMIZERS
            and not any(row.is_requested(s) for row in _REFUSED_OPTIMIZERS)
        ),
        "it has no implementation over row shards here",
        "use --optimizer muon, adaptive_muon, lion, adam or sgd",
        value("optimizer"),
    ),
    Unsupported(
        "--fp16",
        lambda s: bool(s.get("fp16")),
        "emerging optimizers have no loss scaling",
        "use --bf16",
    ),
    Unsupported(
        "--use-precision-aware-optimizer",
        lambda s: bool(s.get("use_precision_aware_optimizer")),
        "it keeps gradients and states outside of the fp32 tensors that Muon steps",
        "drop it; Muon already keeps one state tensor where Adam keeps two",
    ),
    Unsupported(
        "--exp-avg-dtype fp16 or fp8",
        lambda s: s.get("exp_avg_dtype") in ("fp16", "fp8"),
        "momentum is averaged in float32, and rounded to bfloat16 at most",
        "use --exp-avg-dtype bf16 or fp32",
        value("exp_avg_dtype"),
    ),
    Unsupported(
        "--optimizer-cpu-offload",
        lambda s: bool(s.get("optimizer_cpu_offload")),
        "Newton-Schulz runs where the momentum lies",
        "drop it, or shard over more ranks",
    ),
    Unsupported(
        "--optimizer-cuda-graph",
        lambda s: bool(s.get("optimizer_cuda_graph")),
        "the step checks gradients on the host",
        "drop it",
    ),
    Unsupported(
        "--cuda-graph-impl, --cuda-graph-modules or --cuda-graph-scope full_iteration",
        _has_whole_graph,
        "a replay runs no Python: HSDP would raise for reductions that nobody counted, and every "
        "step would attach all gradients once more",
        "use --cuda-graph-impl none, or graphs of layers, which no test covers",
    ),
    Unsupported(
        "the layer-wise distributed optimizer",
        lambda s: (
            bool(s.get("use_layer_wise_distributed_optimizer"))
            or s.get("use_layer_wise_param_layout", True) is False
        ),
        "it assigns whole layers to ranks, and Megatron-FSDP has already sharded their rows",
        "drop it; rows stay sharded under --use-megatron-fsdp",
        _layer_wise_flag,
    ),
    Unsupported(
        "--use-torch-fsdp2",
        lambda s: bool(s.get("use_torch_fsdp2")),
        "the optimizer reads Megatron-FSDP's shards",
        "use --use-megatron-fsdp alone",
    ),
    *FSDP_UNSUPPORTED,
    Unsupported(
        "ddp_config.megatron_fsdp_use_decoupled_grad",
        lambda s: bool(s.get("megatron_fsdp_use_decoupled_grad")),
        "gradients then hang on another attribute than Muon and Adam read",
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
        lambda s: (s.get("gtp_weight_remat_size") or 1) > 1,
        "it shards rows a second time, which Megatron-FSDP does not record",
        "drop it",
        flags("gtp_weight_remat_size"),
    ),
    Unsupported(
        "HSDP without --overlap-grad-reduce",
        lambda s: _is_hsdp(s) and not s.get("overlap_grad_reduce"),
        "Megatron-FSDP then never reduces gradients over the outer ranks, and the replicas drift",
        "add --overlap-grad-reduce",
        flags("num_distributed_optimizer_instances"),
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
            and (s.get("mtp_num_layers") or 0) > 1
            and s.get("data_parallel_sharding_strategy") in ("optim_grads", "optim_grads_params")
        ),
        "Transformer Engine then keeps the gradient of one use of the layer, and drops the others",
        "add --no-gradient-accumulation-fusion",
        flags("mtp_num_layers", "mtp_use_repeated_layer", "data_parallel_sharding_strategy"),
    ),
    Unsupported(
        "--outer-dp-sharding-strategy optim without optim_grads_params",
        lambda s: (
            _is_hsdp(s)
            and s.get("outer_dp_sharding_strategy", "no_shard") != "no_shard"
            and s.get("data_parallel_sharding_strategy") != "optim_grads_params"
        ),
        "Megatron-FSDP shards over outer ranks only what is fully sharded over inner ones",
        "add --data-parallel-sharding-strategy optim_grads_params",
        flags("outer_dp_sharding_strategy", "data_parallel_sharding_strategy"),
    ),
    Unsupported(
        "--megatron-fsdp-main-params-dtype other than fp32",
        _has_low_precision_main_params,
        "Newton-Schulz and momentum need float32 main parameters",
        "use --megatron-fsdp-main-params-dtype fp32",
        value("megatron_fsdp_main_params_dtype"),
    ),
    Unsupported(
        "--ckpt-format other than fsdp_dtensor",
        lambda s: s.get("ckpt_format", "fsdp_dtensor") != "fsdp_dtensor",
        "Megatron-FSDP writes no other format",
        "use --ckpt-format fsdp_dtensor",
        value("ckpt_format"),
    ),
    Unsupported(
        "checkpoints of grouped experts with biases under expert parallelism",
        lambda s: (
            bool(s.get("moe_grouped_gemm") and s.get("add_bias_linear"))
            and (s.get("expert_model_parallel_size") or 1) > 1
            and has_checkpoints(s)
        ),
        "Megatron-FSDP's checkpoints give the biases of all expert-parallel ranks one name",
        "add --disable-bias-linear",
        flags(
            "moe_grouped_gemm",
            "expert_model_parallel_size",
            *CHECKPOINTS,
        ),
    ),
    Unsupported(
        "--async-save",
        lambda s: bool(s.get("async_save")),
        "upstream's asynchronous writer has not been run with Megatron-FSDP here, and does not "
        "replace a checkpoint in one step",
        "drop it",
    ),
    Unsupported(
        "--non-persistent-ckpt-type",
        lambda s: s.get("non_persistent_ckpt_type") is not None,
        "upstream writes these checkpoints for Megatron-FSDP, and cannot load them",
        "use --save-interval with --save-retain-interval",
        value("non_persistent_ckpt_type"),
    ),
    Unsupported(
        "--ckpt-convert-format",
        lambda s: s.get("ckpt_convert_format") is not None,
        "a Megatron-FSDP model writes no other format",
        "drop it",
        value("ckpt_convert_format"),
    ),
    Unsupported(
        "--load-main-params-from-ckpt",
        lambda s: bool(s.get("load_main_params_from_ckpt")),
        "fsdp_dtensor checkpoints hold the main parameters, which are loaded anyway",
        "drop it",
    ),
)


def unsupported_settings(
    settings: Settings, rows: Sequence[Unsupported] = UNSUPPORTED
) -> list[str]:
    """List what Muon under Megatron-FSDP cannot honour.

    Args:
        settings: Names and values as Megatron's arguments and configurations spell them; a name
            that is absent counts as not requested.
        rows: What is refused; :data:`FSDP_UNSUPPORTED` with another optimizer than Muon.

    Returns:
        A sentence for each refused setting: what was given, the reason, what to use instead.
    """
    return [row.sentence(settings) for row in rows if row.is_requested(settings)]


def raise_where_refused(optimizer: object, refusals: Sequence[str]) -> None:
    """Raise all refusals together, if there are any.

    Args:
        optimizer: Value of ``--optimizer``.
        refusals: Sentences of :func:`unsupported_settings`.

    Raises:
        SettingsError: With all of them.
    """
    if refusals:
        raise SettingsError(
            f"--optimizer {optimizer} --use-megatron-fsdp cannot run with:\n  "
            + "\n  ".join(refusals)
        )
