# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Symbols of megatron-core that are relied on and not replaced."""

from megatron_muon.patching.patch import Target, names

_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"

# The optimizer calls, inherits or imitates these. A difference there would not fail by itself: it
# would silently train something else.
REQUIREMENTS: tuple[Target, ...] = (
    # Blocks of fused QKV follow this line (plan/layout.py, block_rows).
    Target(
        "megatron.core.optimizer.emerging_optimizers",
        "TensorParallelMuon.orthogonalize",
        parameters=names("self, p, grad, kwargs"),
        source_lines=("num_query_groups = grad_shape[0] // qkv_split_dim",),
    ),
    # The factory converts Muon's flags by it, and adds its own.
    Target(
        "megatron.core.optimizer.emerging_optimizers",
        "_muon_config_to_kwargs",
        parameters=names("config, model_chunks, pg_collection"),
    ),
    # An unknown argument would be ignored, as FSDPZeROTensorParallelMuon replaces the step.
    Target(
        "megatron.core.optimizer.emerging_optimizers",
        "TensorParallelMuon.__init__",
        parameters=names(
            "self, params, lr, momentum, nesterov, weight_decay, use_decoupled_weight_decay, "
            "split_qkv, is_qkv_fn, qkv_split_shapes, fp32_matmul_prec, coefficient_type, "
            "num_ns_steps, scale_mode, extra_scale_factor, pg_collection, tp_mode"
        ),
        # --muon-fsdp-newton-schulz replaces --muon-use-syrk.
        later_parameters=("use_syrk",),
    ),
    # The chained optimizer keeps this order, and clips between the two lines.
    Target(
        "megatron.core.optimizer.optimizer",
        "ChainedOptimizer.step",
        parameters=names("self"),
        source_lines=(
            "found_inf_flag = self.prepare_grads()",
            "update_successful = False if should_skip_update else self.step_with_ready_grads()",
        ),
    ),
    # The chained optimizer installs and gathers the weights of all inner optimizers once.
    Target(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.step_with_ready_grads",
        parameters=names("self"),
        source_lines=("model_chunk.start_param_sync()",),
    ),
    # OuterReductions counts the calls that reduce over HSDP's outer ranks.
    Target(
        f"{_FSDP}.param_and_grad_buffer",
        "GradReducePipeline._bucket_group_gradient_reduce",
        parameters=names("self, bucket_group, async_op, outer_fsdp_group_grad_reduce"),
    ),
    Target(
        f"{_FSDP}.param_and_grad_buffer",
        "GradReducePipeline.reduce_gradients",
        source_lines=("outer_fsdp_group_grad_reduce=outer_fsdp_group_grad_reduce,",),
    ),
    # Gradients that are not fused are added here; after fused ones .grad is deleted.
    Target(
        f"{_FSDP}.megatron_fsdp",
        "MegatronFSDP._register_fsdp_hooks",
        parameters=names("self, root_module"),
        source_lines=(
            "param.main_grad.copy_(to_local_if_dtensor(param.grad))",
            "param.main_grad.add_(to_local_if_dtensor(param.grad))",
            "if param.grad_added_to_main_grad and param.grad is not None:",
        ),
    ),
    Target(
        "megatron.core.tensor_parallel.layers",
        "LinearWithGradAccumulationAndAsyncCommunication.backward",
        parameters=names("ctx, grad_output"),
        source_lines=(
            'if hasattr(weight, "__fsdp_param__"):',
            "weight.main_grad = weight.get_main_grad()",
            "grad_weight = grad_output.t().matmul(total_input)",
        ),
    ),
    Target(
        f"{_FSDP}.megatron_fsdp",
        "MegatronFSDP.finish_grad_sync",
        parameters=names("self, force_all_reduce"),
        source_lines=(
            "self.attach_grad_to_optimizer_state()",
            "self._replace_param_with_distributed_if_needed()",
        ),
    ),
    Target(
        f"{_FSDP}.megatron_fsdp",
        "MegatronFSDP.install_optimized_model_weights",
        parameters=names("self"),
        source_lines=("self.param_and_grad_buffer.copy_main_weights_to_model_weights()",),
    ),
    # Called on a clone of the module with a column of ones as its weight, for a factor per row.
    Target(
        "megatron.core.transformer.attention",
        "SelfAttention.clip_qk",
        parameters=names("self"),
        source_lines=(
            "self.linear_qkv.weight.data.copy_(self._clip_linear_qkv(self.linear_qkv.weight.data))",
        ),
    ),
    Target(
        "megatron.core.transformer.multi_latent_attention",
        "MLASelfAttention.clip_qk",
        parameters=names("self"),
        source_lines=(
            "q_proj_weight.data.copy_(self._clip_q_proj_weight(q_proj_weight.data))",
            "kv_proj_weight.data.copy_(self._clip_kv_proj_weight(kv_proj_weight.data))",
        ),
    ),
    # Plans assume equal ranges of a buffer as shards, in the order of ranks
    # (plan/layout.py, rows_in_buffer).
    Target(
        f"{_FSDP}.param_and_grad_buffer",
        "_get_dp_buffer_shard_bucket_index",
        parameters=names(
            "bucket_index, is_data_distributed, data_parallel_world_size, data_parallel_rank"
        ),
        source_lines=(
            "shard_size = bucket_index.size // data_parallel_world_size",
            "bucket_data_index = shard_size * data_parallel_rank",
        ),
    ),
    # The order under HFSDP (plan/layout.py, holders_of_segments).
    Target(
        f"{_FSDP}.utils",
        "FSDPDistributedIndex.get_logical_hybrid_fsdp_rank",
        parameters=names("self, is_expert_parallel"),
        source_lines=('"(outer_dp inner_dp) -> (inner_dp outer_dp)",',),
    ),
)

# Of Megatron-FSDP v2 through flags: where a release has the first, the others are relied on.
V2_FLAG = Target("megatron.core.distributed", "DistributedDataParallelConfig.megatron_fsdp_version")
V2_REQUIREMENTS: tuple[Target, ...] = (
    # The chained optimizer casts gradients, and gives them back, as this one and its children do.
    Target(
        "megatron.core.optimizer.fully_sharded_optimizer",
        "FullyShardedOptimizer.step_with_ready_grads",
        parameters=names("self"),
        source_lines=("parameter.grad_dtype = original_grad.dtype",),
    ),
    # A mark makes gradients local shards (gradient_repairs.py, count_shards_once).
    Target(
        "megatron.core.optimizer.optimizer",
        "MegatronOptimizer._filter_grads_for_norm",
        source_lines=("grad = param.grad._local_tensor if param.grad is not None else None",),
    ),
    # Rows of all ranks (plan/layout.py, holders_of_segments).
    Target(
        f"{_FSDP}.experimental.layout",
        "GlobalLayout.get_local_range",
        source_lines=(
            "for axis, placement in reversed(tuple(enumerate(placements))):",
            "offset += mesh.get_local_rank(axis) * shard_size",
        ),
    ),
    # The count of gradients has this name (gradient_repairs.py, complete_backward_passes).
    Target(
        f"{_FSDP}.experimental.module",
        "FsdpModule.pre_forward",
        source_lines=("self._num_ready_grad_parameters = 0",),
    ),
    # The callback at the end of a backward pass is found by its name on the context.
    Target(
        f"{_FSDP}.experimental.module",
        "FsdpModule.pre_backward",
        source_lines=("context.register_post_backward_final_callback()",),
    ),
    Target(
        f"{_FSDP}.experimental.parameter_group",
        "FsdpParameterGroup.sync_model_weight_from_main_weight",
        parameters=names("self"),
    ),
    Target(
        f"{_FSDP}.experimental.parameter_group",
        "FsdpParameterGroup.reduce_partial_gradients",
        source_lines=("fsdp_parameter.sharded.grad = self.main_grad.get_dtensor(index)",),
    ),
)
