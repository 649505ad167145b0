# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Refuse settings: one table for command lines and megatron-core scripts.

Settings that Megatron's own assertions refuse have no row.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_muon.user_errors import SettingsError

# Values of --optimizer whose step is elementwise, upstream's and ours.
ELEMENTWISE_OPTIMIZERS = ("adam", "sgd", "lion")
# Names under which Megatron builds a Muon without Megatron-FSDP.
MUON_OPTIMIZERS = ("muon", "dist_muon", "adaptive_muon")

Settings = Mapping[str, Any]


class Unsupported(NamedTuple):
    """One setting that cannot work.

    Args:
        flag: Flag or setting, as the user knows it.
        requested: Names of settings, all of which ask for it; or a function of the settings.
        reason: Why it cannot work.
        instead: Advice.
    """

    flag: str
    requested: str | Callable[[Settings], object]
    reason: str
    instead: str

    def is_requested(self, settings: Settings) -> bool:
        """Return whether settings ask for it; a name that is absent does not."""
        if isinstance(self.requested, str):
            return all(settings.get(name) for name in self.requested.split())
        return bool(self.requested(settings))


def _has_several(settings: Settings, name: str) -> bool:
    # Configurations have fields that are None.
    return (settings.get(name) or 1) > 1


def _has_whole_graph(settings: Settings) -> bool:
    # Names, or lists of names or enums. Megatron translates the older settings after this check.
    keys = "impl modules scope scope_deprecated".split()
    values = [settings.get(f"cuda_graph_{key}") for key in keys]
    return re.search(r"full_iteration\b", str(values)) is not None


def _holds_others(settings: Settings) -> object:
    """Return whether the folder of non-persistent checkpoints holds that of others."""
    folder, others = settings.get("non_persistent_global_ckpt_dir"), settings.get("save")
    return folder and others and Path(others).resolve().is_relative_to(Path(folder).resolve())


def _offloads_nothing(settings: Settings) -> object:
    fraction = settings.get("optimizer_offload_fraction", 1.0)
    return settings.get("optimizer_cpu_offload") and not 0.0 < fraction <= 1.0


# Megatron-FSDP with any optimizer: Adam's weights are clipped too.
FSDP_UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(
        "--qk-clip with fewer query groups than tensor-parallel ranks",
        lambda s: (
            s.get("qk_clip")
            and not s.get("multi_latent_attention")
            # A flag of command lines alone; without it their number of groups means nothing.
            and s.get("group_query_attention", True)
            and s.get("num_query_groups")
            and s["num_query_groups"] < (s.get("tensor_model_parallel_size") or 1)
        ),
        "upstream's clip expects the logits of all heads of a group, and ranks share a group",
        "use no more tensor-parallel ranks than query groups",
    ),
    Unsupported(
        "--qk-clip --attention-output-gate",
        "qk_clip attention_output_gate",
        "upstream's clip leaves the gate out of linear_qkv, and fails",
        "drop one of them",
    ),
    Unsupported(
        "--optimizer-cpu-offload with --optimizer adam or sgd",
        lambda s: s.get("optimizer_cpu_offload") and s.get("optimizer") in ("adam", "sgd"),
        "upstream's step copies shards into whole parameters, and fails",
        "drop it",
    ),
    Unsupported(
        "--qk-clip --experimental-attention-variant dsa",
        lambda s: s.get("qk_clip") and s.get("experimental_attention_variant") == "dsa",
        "upstream has no clip for absorbed multi-latent attention",
        "drop --qk-clip",
    ),
    Unsupported(
        "--defer-embedding-wgrad-compute",
        "defer_embedding_wgrad_compute",
        "Megatron-FSDP reduces the gradient of the output layer before it has been computed",
        "drop it",
    ),
    Unsupported(
        "--async-ckpt-use-cpu-shm",
        "async_ckpt_use_cpu_shm",
        "a thread of the trainer writes, and shares its memory",
        "drop it",
    ),
    Unsupported(
        "--non-persistent-ckpt-type local",
        lambda s: s.get("non_persistent_ckpt_type") not in (None, "global"),
        "upstream's local checkpoints hold its ShardedTensors, and Megatron-FSDP has DTensors",
        "use --non-persistent-ckpt-type global",
    ),
    Unsupported(
        "--non-persistent-global-ckpt-dir that holds the folder of --save",
        _holds_others,
        "all checkpoints below it but the last are deleted",
        "choose a folder for non-persistent checkpoints alone",
    ),
)

# docs/support.md shows the same rows; a test compares them. They see the command line's namespace,
# or the merged configurations of a script on megatron-core, where most keys are absent.
UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(
        "--fp16",
        "fp16",
        "emerging optimizers have no loss scaling",
        "use --bf16",
    ),
    Unsupported(
        "--optimizer-cuda-graph",
        "optimizer_cuda_graph",
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
        "use_layer_wise_distributed_optimizer",
        "use_layer_wise_distributed_optimizer",
        "it assigns whole layers to ranks, and Megatron-FSDP has already sharded their rows",
        "drop it; rows stay sharded under --use-megatron-fsdp",
    ),
    *FSDP_UNSUPPORTED,
    Unsupported(
        "--optimizer-cpu-offload with an --optimizer-offload-fraction not in (0, 1]",
        _offloads_nothing,
        "nothing would be in CPU memory, as with the default of a script",
        "give 1.0, or a share of state and main weights",
    ),
    Unsupported(
        "--optimizer-cpu-offload --megatron-fsdp-version 2",
        lambda s: s.get("optimizer_cpu_offload") and s.get("megatron_fsdp_version") == 2,
        "upstream's optimizer of version 2 refuses it",
        "use version 1",
    ),
    Unsupported(
        "--optimizer-cpu-offload --log-params-norm",
        "optimizer_cpu_offload log_params_norm",
        "the norm reads main weights between steps, on the device",
        "drop one of them",
    ),
    Unsupported(
        "--optimizer-cpu-offload --use-nccl-ub",
        "optimizer_cpu_offload nccl_ub",
        "NCCL's memory pool would keep the memory that main weights leave",
        "drop one of them",
    ),
    Unsupported(
        "ddp_config.megatron_fsdp_use_decoupled_grad",
        "megatron_fsdp_use_decoupled_grad",
        "gradients are then stored in another attribute than Muon and Adam read",
        "leave it False",
    ),
    Unsupported(
        "--muon-fp32-matmul-prec low",
        lambda s: s.get("muon_fp32_matmul_prec") == "low",
        "Megatron offers it, but torch has no such precision",
        "use medium or high",
    ),
    # Of Muon's command lines, it is adapted before.
    Unsupported(
        "--use-precision-aware-optimizer, but for Muon's --exp-avg-dtype",
        "use_precision_aware_optimizer",
        "other optimizers keep their states in float32",
        "drop it",
    ),
    Unsupported(
        "--main-params-dtype or --exp-avg-sq-dtype other than fp32",
        lambda s: any(
            str(s.get(name, "fp32")).removeprefix("torch.") not in ("fp32", "float32")
            for name in ("main_params_dtype", "exp_avg_sq_dtype")
        ),
        "steps read float32 main weights, and the scalar optimizer keeps float32 second moments",
        "leave them out; --exp-avg-dtype bf16 halves Muon's state",
    ),
    # A flag of later releases.
    Unsupported(
        "--muon-use-syrk",
        "muon_use_syrk",
        "the kernel of upstream's Muon saves less than 0.5 % of an iteration here",
        "drop it, or use --muon-fsdp-newton-schulz gram",
    ),
    Unsupported(
        "GTP weight rematerialization",
        lambda s: _has_several(s, "gtp_weight_remat_size"),
        "it shards rows a second time, which Megatron-FSDP does not record",
        "drop it",
    ),
    Unsupported(
        "HSDP without --overlap-grad-reduce",
        lambda s: (
            _has_several(s, "num_distributed_optimizer_instances")
            and not s.get("overlap_grad_reduce")
        ),
        "Megatron-FSDP then never reduces gradients over the outer ranks, and the replicas drift",
        "add --overlap-grad-reduce",
    ),
    Unsupported(
        "--ddp-average-in-collective",
        lambda s: s.get("ddp_average_in_collective") or s.get("average_in_collective"),
        "Megatron-FSDP then drops the scaling of expert gradients, and fails on dense models",
        "drop it; gradients are averaged all the same",
    ),
    Unsupported(
        "--mtp-use-repeated-layer with fused gradient accumulation, under optim_grads and "
        "optim_grads_params",
        lambda s: (
            s.get("mtp_use_repeated_layer")
            and s.get("gradient_accumulation_fusion")
            # One prediction uses the layer once, and there is nothing to drop.
            and _has_several(s, "mtp_num_layers")
            and s.get("data_parallel_sharding_strategy") in ("optim_grads", "optim_grads_params")
        ),
        "Transformer Engine then keeps the gradient of one use of the layer, and drops the others",
        "add --no-gradient-accumulation-fusion",
    ),
    Unsupported(
        "--ckpt-convert-format",
        "ckpt_convert_format",
        "a Megatron-FSDP model writes no other format",
        "drop it",
    ),
    # Megatron's assertions refuse pipeline stages, expert parallelism and tied embeddings.
    Unsupported(
        "--use-torch-fsdp2 with tensor parallelism",
        lambda s: s.get("use_torch_fsdp2") and _has_several(s, "tensor_model_parallel_size"),
        "a checkpoint would keep the shards of one tensor-parallel rank, and lose the others",
        "use --use-megatron-fsdp",
    ),
    Unsupported(
        "--use-torch-fsdp2 --ckpt-format torch_dist",
        lambda s: s.get("use_torch_fsdp2") and s.get("ckpt_format") == "torch_dist",
        "it holds ShardedTensors, and the state of this optimizer is DTensors",
        "use --ckpt-format torch_dcp",
    ),
    Unsupported(
        "--use-torch-fsdp2 --qk-clip",
        "use_torch_fsdp2 qk_clip",
        "upstream clips whole weights",
        "drop it, or use --use-megatron-fsdp",
    ),
    Unsupported(
        "--use-torch-fsdp2 --optimizer-cpu-offload",
        "use_torch_fsdp2 optimizer_cpu_offload",
        "modules gather main weights, and need them on the device",
        "drop it",
    ),
    Unsupported(
        "--use-torch-fsdp2 --calculate-per-token-loss",
        "use_torch_fsdp2 calculate_per_token_loss",
        "upstream does not divide gradients by the number of tokens",
        "drop it",
    ),
)


def raise_where_refused(
    settings: Settings, rows: Sequence[Unsupported] = UNSUPPORTED, more: Sequence[str] = ()
) -> None:
    """Raise all refusals together, if there are any.

    Args:
        settings: Names and values as Megatron's arguments and configurations spell them; a name
            that is absent counts as not requested.
        rows: Table of refusals; ``FSDP_UNSUPPORTED`` with another optimizer than Muon.
        more: Further refusals, a sentence each.

    Raises:
        SettingsError: With all of them.
    """
    refusals = [
        f"{row.flag}: {row.reason}; {row.instead}." for row in rows if row.is_requested(settings)
    ]
    if refusals or more:
        wrapper = "torch-fsdp2" if settings.get("use_torch_fsdp2") else "megatron-fsdp"
        head = f"--optimizer {settings.get('optimizer')} --use-{wrapper} cannot run with:"
        raise SettingsError("\n  ".join([head, *refusals, *more]))


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
