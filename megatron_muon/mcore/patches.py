# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Patches that ``megatron_muon.enable()`` applies to megatron-core."""

from megatron_muon.mcore import (
    arguments,
    async_save,
    bridge_trainer,
    checkpoint_load,
    checkpoint_repairs,
    checkpoint_save,
    checkpoint_state,
    chunk_offsets,
    factory,
    gradient_repairs,
    non_persistent,
    options,
    pipeline_repairs,
    qk_clip,
    torch_fsdp2,
)
from megatron_muon.mcore.fsdp_model import adapter_module
from megatron_muon.mcore.patching import Patch
from megatron_muon.mcore.relied_on import RELIED_ON

_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_BRIDGE = "megatron.bridge.training"

# The source lines of a target are the lines its wrapper relies on: not the whole function, so that
# unrelated edits upstream refuse nothing. Order: flags, factory, gradients, stages, checkpoints.
PATCHES: tuple[Patch, ...] = (
    Patch(
        "megatron.training.arguments:add_megatron_arguments",
        "add the flags of this package",
        arguments.add_arguments,
    ),
    Patch(
        "megatron.training.arguments:validate_args",
        "accept --optimizer muon under FSDP, refuse what cannot work with it",
        arguments.validate,
    ),
    Patch(
        "megatron.core.parallel_state:initialize_model_parallel",
        "compare releases and flags of all ranks before anything depends on them",
        arguments.compare_flags,
    ),
    Patch(
        "megatron.training.training:get_megatron_optimizer_config",
        "carry the flags of this package into the configuration of the optimizer",
        options.carry_flags,
    ),
    # Looked up by its module's global name at each call, so replacing the attribute is enough.
    Patch(
        "megatron.core.optimizer:_get_megatron_emerging_optimizer",
        "build Muon over row shards for sharded models; under DDP, honour flags for blocks",
        factory.choose_builder,
        source_lines=(
            "config_overrides.update(default_param_overrides)",
            "if 'experts' in name and 'shared' not in name:",
            "if 'linear_qkv.weight' in name and len(param.shape) == 2:",
            "all_param_groups = _get_param_groups(model_chunks, config, config_overrides)",
        ),
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params",
        "QK-clip: after a step of Adam clip main weights before they are installed",
        qk_clip.clip_before_install,
        source_lines=("model_chunk.param_and_grad_buffer.copy_main_weights_to_model_weights()",),
    ),
    Patch(
        "megatron.core.optimizer.qk_clip:clip_qk",
        "QK-clip: return the largest logit of a model whose step has clipped it",
        qk_clip.max_attention_logit,
        source_lines=(
            "for transformer_layer in model_chunk.module.module.decoder.layers:",
            "transformer_layer.self_attention.clip_qk()",
        ),
    ),
    # Adam hides this and the two that follow: its update hardly changes when gradients are scaled.
    Patch(
        f"{_FSDP}.param_and_grad_buffer:_create_hfsdp_helper_buffer",
        "HFSDP: keep the gradient scaling factor, without which gradients are dp times too large",
        gradient_repairs.keep_gradient_scaling_factor,
        source_lines=("helper_buffer = DataParallelBuffer(", "return helper_buffer"),
    ),
    Patch(
        f"{_FSDP}.param_and_grad_buffer:DataParallelBuffer.__init__",
        "gradients over a group of one rank: scale each microbatch once, not again with the next",
        gradient_repairs.scale_each_microbatch_once,
        # The patch above copies the attribute that this line sets.
        source_lines=("self.gradient_scaling_factor = gradient_scaling_factor",),
    ),
    Patch(
        f"{_FSDP}.param_and_grad_buffer:GradReducePipeline._bucket_group_gradient_reduce",
        "HSDP: count reductions over the outer ranks, which must be one a step",
        gradient_repairs.count_outer_reductions,
        source_lines=("if outer_fsdp_group_grad_reduce:",),
    ),
    Patch(
        "megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
        "HFSDP: reduce the gradient norm over all instances, which hold different shards",
        gradient_repairs.reduce_grad_norm_over_instances,
        # Upstream's group is one instance; the wrapper replaces the group that this line sets.
        source_lines=("setattr(optimizer, 'grad_stats_parallel_group', intra_dist_opt_group)",),
    ),
    Patch(
        f"{_FSDP}.megatron_fsdp:MegatronFSDP.all_gather_and_wait_parameters_ready",
        "fused accumulation, optim: Transformer Engine adds microbatches, and overwrites none",
        gradient_repairs.overwrite_only_buckets,
        source_lines=(
            'if self.data_parallel_sharding_strategy == "no_shard":',
            "param.overwrite_main_grad = True",
        ),
        # Pull request 6357.
        repaired_text="param.overwrite_main_grad = self.data_parallel_sharding_strategy in [",
    ),
    Patch(
        "megatron.core.transformer.moe.experts:TEGroupedMLP._ensure_main_grad",
        "fused accumulation, optim: grouped experts keep the mark that Megatron-FSDP sets",
        gradient_repairs.keep_mark_of_grouped_experts,
        source_lines=(
            'if hasattr(param, "overwrite_main_grad"):',
            "param.overwrite_main_grad = True",
        ),
    ),
    Patch(
        "megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.forward",
        "fused accumulation in Megatron's own linear, as the output layer: only where main_grad "
        "holds nothing",
        gradient_repairs.fuse_only_into_buckets,
        source_lines=("ctx.gradient_accumulation_fusion = gradient_accumulation_fusion",),
    ),
    Patch(
        "megatron.core.distributed.torch_fully_sharded_data_parallel:fully_shard",
        "--use-torch-fsdp2: shards of a bf16 model are its float32 main weights",
        torch_fsdp2.keep_main_weights,
    ),
    # Where a mesh of the job's ranks is made: a pipeline stage has some of them.
    *(
        Patch(
            f"{adapter_module(1)}:{name}",
            f"pipeline stages: a mesh has the ranks of one stage{why}",
            pipeline_repairs.mesh_of_stage,
            source_lines=("torch.arange(world_size),", "return dp_tp_meshes[0]"),
        )
        for name, why in (("_get_dp_tp_mesh", ""), ("_get_hsdp_tp_mesh", ", under HSDP too"))
    ),
    Patch(
        f"{_FSDP}.param_and_grad_buffer:make_fsdp_dtensor",
        "pipeline stages with tensor parallelism: nothing is compared with ranks of other stages",
        pipeline_repairs.check_within_stage,
        source_lines=("run_check=run_check,",),
    ),
    Patch(
        f"{_FSDP}.megatron_fsdp:MegatronFSDP._init_fsdp_param_and_grad_buffer",
        "pipeline stages: one without a layer has no unit of Megatron-FSDP",
        pipeline_repairs.size_without_units,
        source_lines=(
            "suggested_communication_unit_size = total_param_elements // total_fsdp_module * 2",
        ),
    ),
    Patch(
        "megatron.core.pipeline_parallel.schedules:deallocate_output_tensor",
        "pipeline stages: free outputs, which are views under Megatron-FSDP",
        pipeline_repairs.free_views,
        source_lines=(
            'assert out._base is None, "counter-productive to free a view of another tensor."',
            "out.data = torch.empty((1,), device=out.device, dtype=out.dtype)",
        ),
    ),
    Patch(
        "megatron.core.distributed.finalize_model_grads:_allreduce_embedding_grad",
        "pipeline stages: tied embeddings, whose shards differ between first and last stage",
        pipeline_repairs.sum_whole_gradients,
        source_lines=("torch.distributed.all_reduce(grad, group=embd_group)",),
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._param_name",
        "checkpoints: layers of pipeline stages have names of their own",
        checkpoint_state.name_across_stages,
        source_lines=(
            'if not hasattr(self, "param_to_name"):',
            "name_to_param = handle_experts_in_state_dict(name_to_param, num_experts)",
        ),
    ),
    Patch(
        "megatron.core.transformer.fsdp_dtensor_checkpoint:handle_swiglu_in_state_dict",
        "checkpoints: split every state of a gated layer, not Adam's alone, also in fp32 and HFSDP",
        checkpoint_repairs.split_every_state,
        source_lines=(
            "fsdp_slice = dist_param.megatron_fsdp_slice",
            'for subkey in ["exp_avg", "exp_avg_sq"]:',
            'model_state_dict[f"{key}_w"] = weight_w',
        ),
    ),
    Patch(
        "megatron.core.transformer.fsdp_dtensor_checkpoint:handle_gdn_in_state_dict",
        "checkpoints: split every state of gated delta nets, not Adam's alone",
        checkpoint_repairs.split_every_state,
        source_lines=("if rel == 'in_proj.weight':",),
    ),
    Patch(
        "megatron.core.transformer.fsdp_dtensor_checkpoint:make_fsdp_dtensor",
        "checkpoints: gated layers of no_shard are whole on every rank",
        checkpoint_repairs.keep_replicas_whole,
        source_lines=(
            "param, dist_index, is_sharded_param=is_sharded_param, is_expert_param=is_expert_param",
        ),
    ),
    Patch(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.sharded_param_state_fsdp_dtensor",
        "checkpoints: Adam has state for empty shards too, without which saving hangs, and loading "
        "steps nothing",
        checkpoint_repairs.complete_adam_state,
        source_lines=("self._init_optimizer_states_with_dummy_values()",),
    ),
    Patch(
        "megatron.training.checkpointing:_load_base_checkpoint",
        "checkpoints: refuse one that is unfinished, of another format or damaged, on all ranks",
        checkpoint_load.find_before_loading,
        source_lines=(
            "state_dict = preprocess_fsdp_dtensor_state_dict(args, state_dict, model[0])",
            "state_dict=state_dict, storage_reader=fs_storage_reader, planner=planner",
        ),
    ),
    Patch(
        "megatron.training.checkpointing:generate_state_dict",
        "checkpoints: interleaved stages, which have several chunks on a rank",
        checkpoint_load.keep_chunks,
        source_lines=("key = f'model{i}'",),
    ),
    Patch(
        f"{_FSDP}.uneven_dtensor:preprocess_state_dict_for_uneven_dtensor",
        "checkpoints: gather the offsets of all shards together, not of each tensor",
        chunk_offsets.place_together,
        source_lines=(
            "for key_chain in sorted(visit_dtensor):",
            "update_uneven_dtensor_chunk_metadata(dtensor)",
        ),
    ),
    Patch(
        "megatron.training.checkpointing:preprocess_fsdp_dtensor_state_dict",
        "checkpoints: compare names and shapes before anything is loaded",
        checkpoint_load.rename_and_compare,
        source_lines=("preprocess_state_dict_for_uneven_dtensor(state_dict)",),
    ),
    Patch(
        "megatron.training.checkpointing:save_checkpoint",
        "checkpoints: one that is saved again is replaced in one step, after an earlier save",
        checkpoint_save.save_after_earlier,
        source_lines=(
            "fs_storage_writer = torch.distributed.checkpoint.FileSystemWriter(checkpoint_name)",
            "fs_storage_writer, save_state_dict_ret, args.async_strategy",
            "async_save_request.add_finalize_fn(iter_finalize_fn)",
        ),
    ),
    checkpoint_save.WRITER,
    *(
        Patch(
            f"megatron.training.{module}:get_async_strategy",
            "checkpoints: --async-save writes in a thread",
            async_save.write_by_thread,
        )
        for module in ("checkpointing", "async_utils")
    ),
    *(
        Patch(
            f"megatron.training.checkpointing:{name}",
            "checkpoints: from --load or the non-persistent one, whichever is newer",
            non_persistent.load_newer,
            source_lines=("load_dir = getattr(args, load_arg)",),
        )
        for name in ("load_checkpoint", "load_args_from_checkpoint")
    ),
    Patch(
        "megatron.training.checkpointing:cleanup_old_non_persistent_checkpoint",
        "checkpoints: the last finished non-persistent one stays until the next is finished",
        non_persistent.keep_tracked,
        source_lines=("rm_iter_ckpts = sorted_iter_ckpts[:-leave_ckpt_num]",),
    ),
    Patch(
        "megatron.training.checkpointing:_async_delete_checkpoint_impl",
        "checkpoints: a non-persistent save deletes none that is tracked",
        non_persistent.delete_untracked,
        source_lines=("save_path, iteration=iteration_to_delete, return_base_dir=True",),
    ),
    Patch(
        "megatron.core.msc_utils:MaybeMultiStorageClient.__getattr__",
        "checkpoints: the tracker is replaced in one step",
        checkpoint_save.write_tracker_in_one_step,
        source_lines=('if name == "open":',),
    ),
    Patch(
        "megatron.core.transformer.fsdp_dtensor_checkpoint:handle_mla_down_proj_in_state_dict",
        "checkpoints: split every state of fused latent attention, not Adam's alone",
        checkpoint_repairs.split_every_state,
        source_lines=(
            "model_state_dict[key], model.get_parameter(f'module.{key}'), split_sizes",
            'for subkey in ["exp_avg", "exp_avg_sq"]:',
        ),
        applies_to="later",
    ),
    # Megatron-FSDP v2.
    Patch(
        "megatron.core.optimizer.fully_sharded_optimizer:FullyShardedOptimizer.__init__",
        "v2: gradients count once in norm and zeros, also with expert parallelism",
        gradient_repairs.count_shards_once,
        source_lines=("super().__init__(optimizer, config, grad_scaler, init_state_fn)",),
        # Pull request 6489, whose optimizer counts by placements.
        repaired_text="def get_grad_norm(",
        applies_to="v2",
    ),
    Patch(
        "megatron.core.optimizer.fully_sharded_optimizer:FullyShardedOptimizer._copy_main_params_to_model_params",
        "v2, QK-clip: after a step of Adam clip main weights before compute weights follow them",
        qk_clip.clip_before_install,
        source_lines=("sync_model_weights_from_main_weights(self.get_parameters())",),
        applies_to="v2",
    ),
    Patch(
        f"{_FSDP}.experimental.module:FsdpContext.register_post_backward_final_callback",
        "v2: count gradients anew in each of two backward passes in a row, as of pipeline stages",
        gradient_repairs.count_each_backward_pass,
        applies_to="v2",
    ),
    Patch(
        f"{adapter_module(2)}:FullyShardedDataParallelV2._validate_config",
        "v2: accept pipeline stages, some without experts, and several on a rank",
        pipeline_repairs.accept_stages,
        source_lines=(
            '"pipeline_model_parallel_size",',
            'for group_name in ("tp", "pp", "cp"):',
            "if not any(isinstance(submodule, MoELayer) for submodule in module.modules()):",
            'raise ValueError("MFSDP v2 does not support disabling bucketing.")',
        ),
        applies_to="v2",
    ),
    Patch(
        "megatron.core.optimizer.fully_sharded_optimizer:FullyShardedOptimizer._validate_config",
        "v2: accept several pipeline stages on a rank",
        pipeline_repairs.accept_chunks,
        source_lines=(
            "if len(model_chunks) != 1:",
            'raise ValueError("MFSDP v2 currently supports exactly one model chunk.")',
        ),
        applies_to="v2",
    ),
    # Megatron-Bridge.
    Patch(
        f"{_BRIDGE}.checkpointing:generate_state_dict",
        "Bridge, checkpoints: interleaved stages, which have several chunks on a rank",
        checkpoint_load.keep_chunks,
        source_lines=(
            "_generate_model_state_dict(model, model_sd_kwargs, ckpt_cfg.ckpt_format, "
            "pg_collection=pg_collection)",
        ),
    ),
    Patch(
        f"{_BRIDGE}.checkpointing:preprocess_fsdp_dtensor_state_dict",
        "Bridge, checkpoints: layers of pipeline stages have names of their own; compare names and "
        "shapes before anything is loaded",
        checkpoint_load.rename_and_compare,
        source_lines=("preprocess_state_dict_for_uneven_dtensor(state_dict)",),
    ),
    Patch(
        f"{_BRIDGE}.checkpointing:load_fsdp_dtensor_checkpoint",
        "Bridge, checkpoints: refuse one that is damaged or lacks optimizer state, on all ranks",
        bridge_trainer.compare_before_loading,
        source_lines=(
            "state_dict = preprocess_fsdp_dtensor_state_dict(cfg, state_dict, model[0])",
            "return state_dict, checkpoint_name, release, CheckpointType.FSDP_DTENSOR",
        ),
    ),
    Patch(
        f"{_BRIDGE}.checkpointing:_create_fsdp_dtensor_storage_writer",
        "Bridge, checkpoints: one that is saved again is replaced in one step",
        checkpoint_save.replace_in_one_step,
        source_lines=("return torch.distributed.checkpoint.FileSystemWriter(checkpoint_path)",),
    ),
    Patch(
        f"{_BRIDGE}.setup:_update_model_config_funcs",
        "Bridge, pipeline stages: dist.align_grad_reduce is off under Megatron-FSDP",
        bridge_trainer.leave_stages_unaligned,
        source_lines=("align_grad_reduce: bool = True,", "if align_grad_reduce:"),
    ),
    Patch(
        f"{_BRIDGE}.train:train",
        "Bridge: refuse settings of checkpoints that cannot work, and write metrics",
        bridge_trainer.check_before_training,
        source_lines=("optimizer: MegatronOptimizer,", "global_state: GlobalState,"),
    ),
    *RELIED_ON,
)
