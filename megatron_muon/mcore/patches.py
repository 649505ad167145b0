# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What :func:`megatron_muon.enable` changes in megatron-core, and what it relies on."""

import functools
from collections.abc import Callable
from typing import Any

from megatron_muon.mcore import (
    arguments,
    checkpoint_load,
    checkpoint_repairs,
    checkpoint_save,
    fused_gradient_repairs,
    gradient_repairs,
    qk_clip,
)
from megatron_muon.mcore.factory import build_megatron_fsdp_emerging_optimizer
from megatron_muon.mcore.fsdp_model import is_megatron_fsdp
from megatron_muon.mcore.pipeline_patches import PIPELINE_PATCHES
from megatron_muon.mcore.unsharded import asks_for_more, build_with_flags
from megatron_muon.patching.patch import Patch, Target, names

_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"


def _route(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_get_megatron_emerging_optimizer`` to build ours for Megatron-FSDP models."""

    @functools.wraps(original)
    def _get_megatron_emerging_optimizer(
        config: Any,
        model_chunks: list[Any],
        config_overrides: dict[Any, Any] | None = None,
        pg_collection: Any = None,
    ) -> Any:
        if is_megatron_fsdp(model_chunks):
            return build_megatron_fsdp_emerging_optimizer(
                config, model_chunks, config_overrides, pg_collection
            )
        if asks_for_more(config):
            return build_with_flags(original, config, model_chunks, config_overrides, pg_collection)
        return original(config, model_chunks, config_overrides, pg_collection)

    return _get_megatron_emerging_optimizer


# The source lines of a target are those that its wrapper relies on: not the whole function, so that
# unrelated edits upstream refuse nothing. Order: flags, factory, gradients, stages, checkpoints.
PATCHES: tuple[Patch, ...] = (
    Patch(
        Target(
            "megatron.training.arguments",
            "add_megatron_arguments",
            parameters=names("parser"),
            # The flags stand beside Megatron's own Muon flags, which this line adds.
            source_lines=("parser = _add_regularization_args(parser)", "return parser"),
        ),
        "add the flags of this package",
        arguments.add_arguments,
        tree_line="parser = muon_arguments.add_flags(parser)",
    ),
    Patch(
        Target(
            "megatron.training.arguments",
            "validate_args",
            parameters=names("args, defaults"),
            source_lines=(
                "assert args.optimizer in ('sgd', 'adam'), \\",
                'assert not args.use_megatron_fsdp, "Emerging optimizer does not support '
                'Megatron-FSDP for now."',
                "args.use_layer_wise_distributed_optimizer = False",
                "args.use_distributed_optimizer = True",
            ),
        ),
        "accept --optimizer muon --use-megatron-fsdp, refuse what cannot work with it",
        arguments.validate,
        tree_line="muon_arguments.check(args)",
    ),
    # Megatron reads this file in place of the command line, so the checks of flags never run.
    Patch(
        Target(
            "megatron.training.yaml_arguments",
            "load_yaml",
            parameters=names("yaml_path"),
            source_lines=("config_namespace.yaml_cfg = yaml_path",),
        ),
        "refuse Muon with Megatron-FSDP from --yaml-cfg, which skips the checks of flags",
        arguments.refuse_yaml,
        tree_line="check_yaml(config_namespace, yaml_path)",
    ),
    # Looked up by its module's global name at each call, so replacing the attribute is enough.
    Patch(
        Target(
            "megatron.core.optimizer",
            "_get_megatron_emerging_optimizer",
            parameters=names("config, model_chunks, config_overrides, pg_collection"),
            source_lines=(
                "config_overrides.update(default_param_overrides)",
                "if 'experts' in name and 'shared' not in name:",
                "if 'linear_qkv.weight' in name and len(param.shape) == 2:",
                "all_param_groups = _get_param_groups(model_chunks, config, config_overrides)",
            ),
        ),
        "build Muon over row shards for Megatron-FSDP models; under DDP, honour flags for blocks",
        _route,
        tree_line="if is_megatron_fsdp(model_chunks):",
    ),
    Patch(
        Target(
            "megatron.core.optimizer.distrib_optimizer",
            "DistributedOptimizer._copy_main_params_to_model_params",
            parameters=names("self"),
            source_lines=(
                "model_chunk.param_and_grad_buffer.copy_main_weights_to_model_weights()",
            ),
        ),
        "QK-clip: after a step of Adam clip main weights before they are installed",
        qk_clip.clip_before_install,
        tree_line="clip_row_shards(model_chunk.module)",
    ),
    # The training loop imported the function by name: its copy has to be replaced as well.
    *(
        Patch(
            Target(
                module,
                "clip_qk",
                parameters=names("model, log_max_only"),
                source_lines=(
                    "for transformer_layer in model_chunk.module.module.decoder.layers:",
                    "transformer_layer.self_attention.clip_qk()",
                ),
            ),
            f"QK-clip: return the largest logit of a model whose step has clipped it{why}",
            qk_clip.max_attention_logit,
            tree_line="return largest_logit(model, log_max_only)",
            tree_module="megatron.core.optimizer.qk_clip",
        )
        for module, why in (
            ("megatron.core.optimizer.qk_clip", ""),
            ("megatron.training.training", ", to the training loop"),
        )
    ),
    # Adam hides this and the two that follow: its update hardly changes when gradients are scaled.
    Patch(
        Target(
            f"{_FSDP}.param_and_grad_buffer",
            "_create_hfsdp_helper_buffer",
            parameters=names("dp_buffer, inner_dp_group, is_data_distributed"),
            source_lines=("helper_buffer = DataParallelBuffer(", "return helper_buffer"),
        ),
        "HFSDP: keep the gradient scaling factor, without which gradients are dp times too large",
        gradient_repairs.keep_gradient_scaling_factor,
        tree_line="# megatron-muon 0002: gradients are reduced through this buffer.",
    ),
    Patch(
        Target(
            f"{_FSDP}.param_and_grad_buffer",
            "DataParallelBuffer.__init__",
            parameters=names(
                "self, ddp_config, params, is_data_distributed, bucket_id, dtype, device, "
                "data_parallel_group, dp_rank, temporary_bucket_allocator, is_transpose_buffer, "
                "gradient_scaling_factor, chunk_size_factor, mem_alloc_context, item_index_map, "
                "bucket_index, shard_bucket_index"
            ),
            # The patch above copies the attribute that this line sets.
            source_lines=("self.gradient_scaling_factor = gradient_scaling_factor",),
        ),
        "gradients over a group of one rank: scale each microbatch once, not again with the next",
        gradient_repairs.scale_each_microbatch_once,
        tree_line="# megatron-muon 0003: also over one rank, see above.",
    ),
    Patch(
        Target(
            "megatron.core.optimizer",
            "_get_megatron_optimizer_based_on_param_groups",
            parameters=names(
                "config, model_chunks, param_groups, per_model_buffers, model_parallel_group, "
                "data_parallel_group, data_parallel_group_gloo, data_parallel_group_idx, "
                "intra_dist_opt_group, distributed_optimizer_instance_id, pg_collection, "
                "skip_megatron_wrapping"
            ),
            # Upstream's group is one instance; the wrapper replaces what this line has set.
            source_lines=("setattr(optimizer, 'grad_stats_parallel_group', intra_dist_opt_group)",),
        ),
        "HFSDP: reduce the gradient norm over all instances, which hold different shards",
        gradient_repairs.reduce_grad_norm_over_instances,
        tree_line="# megatron-muon 0004: instances of HFSDP hold different shards of gradients.",
    ),
    Patch(
        Target(
            f"{_FSDP}.megatron_fsdp",
            "MegatronFSDP.all_gather_and_wait_parameters_ready",
            parameters=names("self, params, prefetch, prefetch_order, wait_bucket_ready, bwd"),
            source_lines=(
                'if self.data_parallel_sharding_strategy == "no_shard":',
                "param.overwrite_main_grad = True",
            ),
        ),
        "fused accumulation, optim: Transformer Engine adds microbatches, and overwrites none",
        fused_gradient_repairs.overwrite_only_buckets,
        # Pull request 6357.
        repaired_text="param.overwrite_main_grad = self.data_parallel_sharding_strategy in [",
        tree_line="# megatron-muon 0009: under optim the buffer holds earlier microbatches.",
    ),
    Patch(
        Target(
            "megatron.core.transformer.moe.experts",
            "TEGroupedMLP._ensure_main_grad",
            parameters=names("linear_module"),
            source_lines=(
                'if hasattr(param, "overwrite_main_grad"):',
                "param.overwrite_main_grad = True",
            ),
        ),
        "fused accumulation, optim: grouped experts keep what Megatron-FSDP says of main_grad",
        fused_gradient_repairs.keep_mark_of_grouped_experts,
        tree_line="# megatron-muon 0009: Megatron-FSDP has said whether main_grad is overwritten.",
    ),
    Patch(
        Target(
            "megatron.core.tensor_parallel.layers",
            "LinearWithGradAccumulationAndAsyncCommunication.forward",
            parameters=names(
                "ctx, input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, "
                "sequence_parallel, grad_output_buffer, wgrad_deferral_limit, tp_group, "
                "gtp_remat_size"
            ),
            source_lines=("ctx.gradient_accumulation_fusion = gradient_accumulation_fusion",),
            later_parameters=("output_dtype",),
        ),
        "fused accumulation in Megatron's own linear, as the output layer: only where main_grad "
        "holds nothing",
        fused_gradient_repairs.fuse_only_into_buckets,
        tree_line="# megatron-muon 0009: backward overwrites main_grad, which may hold gradients.",
    ),
    *PIPELINE_PATCHES,
    Patch(
        Target(
            "megatron.training.checkpointing",
            "handle_swiglu_in_state_dict",
            parameters=names("model, model_state_dict, optimizer_state_dict"),
            source_lines=(
                "fsdp_slice = dist_param.megatron_fsdp_slice",
                'for subkey in ["exp_avg", "exp_avg_sq"]:',
                'model_state_dict[f"{key}_w"] = weight_w',
            ),
        ),
        "checkpoints: split every state of a gated layer, not Adam's alone, also in fp32 and HFSDP",
        checkpoint_repairs.split_every_state,
        tree_line="handle_swiglu_in_state_dict = split_every_state(handle_swiglu_in_state_dict)",
    ),
    Patch(
        Target(
            "megatron.core.transformer.fsdp_dtensor_checkpoint",
            "make_fsdp_dtensor",
            parameters=names(
                "local_tensor, param, dist_index, is_sharded_param, is_expert_param, run_check, "
                "update_uneven_dtensor_chunk_meta, force_sync_tp_duplicated_param"
            ),
            source_lines=(
                "param, dist_index, is_sharded_param=is_sharded_param, "
                "is_expert_param=is_expert_param",
            ),
        ),
        "checkpoints: gated layers of no_shard are whole on every rank",
        checkpoint_repairs.keep_replicas_whole,
        tree_line="# megatron-muon 0005: gated layers of no_shard are whole on every rank.",
    ),
    Patch(
        Target(
            "megatron.core.optimizer.distrib_optimizer",
            "DistributedOptimizer.sharded_param_state_fsdp_dtensor",
            parameters=names("self, is_loading"),
            source_lines=("self._init_optimizer_states_with_dummy_values()",),
        ),
        "checkpoints: Adam has state for empty shards too, without which saving hangs, and loading "
        "steps nothing",
        checkpoint_repairs.complete_adam_state,
        tree_line="complete_state(self)",
    ),
    Patch(
        Target(
            "megatron.training.checkpointing",
            "_load_base_checkpoint",
            parameters=names(
                "load_dir, args, rank0, sharded_state_dict, checkpointing_context, dp_cp_group, "
                "expt_dp_group, gpt_compat_layer_maps"
            ),
            source_lines=(
                "state_dict = preprocess_fsdp_dtensor_state_dict(args, state_dict, model[0])",
                "state_dict=state_dict, storage_reader=fs_storage_reader, planner=planner",
            ),
        ),
        "checkpoints: refuse one that is unfinished, of another format or damaged, on all ranks",
        checkpoint_load.find_before_loading,
        tree_line="@find_before_loading",
    ),
    Patch(
        Target(
            "megatron.training.checkpointing",
            "preprocess_fsdp_dtensor_state_dict",
            parameters=names("args, raw_state_dict, model"),
            source_lines=("preprocess_state_dict_for_uneven_dtensor(state_dict)",),
        ),
        "checkpoints: compare names and shapes before anything is loaded",
        checkpoint_load.compare_before_loading,
        tree_line="@compare_before_loading",
    ),
    Patch(
        Target(
            "megatron.training.checkpointing",
            "get_load_checkpoint_path_by_args",
            parameters=names("args, load_arg"),
            source_lines=("load_dir = getattr(args, load_arg)",),
        ),
        "checkpoints: --pretrained-checkpoint without --load",
        checkpoint_load.find_pretrained,
        tree_line="# megatron-muon 0007: --pretrained-checkpoint without --load.",
    ),
    # The training loop imported the function by name: its copy has to be replaced as well.
    *(
        Patch(
            Target(
                module,
                "save_checkpoint",
                source_lines=(
                    "fs_storage_writer = torch.distributed.checkpoint.FileSystemWriter("
                    "checkpoint_name)",
                ),
            ),
            f"checkpoints: one that is saved again{why} is replaced in one step",
            checkpoint_save.replace_in_one_step,
            tree_line="@replace_in_one_step",
            tree_module="megatron.training.checkpointing",
        )
        for module, why in (
            ("megatron.training.checkpointing", ""),
            ("megatron.training.training", " by the training loop"),
        )
    ),
    Patch(
        Target(
            "megatron.core.msc_utils",
            "MaybeMultiStorageClient.__getattr__",
            parameters=names("self, name"),
            source_lines=('if name == "open":',),
        ),
        "checkpoints: the tracker is replaced in one step",
        checkpoint_save.write_tracker_in_one_step,
        tree_line="return open_in_one_step",
    ),
)
