# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Symbols of megatron-core that are relied on and not replaced, with lines of their source.

The optimizer calls, inherits or imitates them. A changed line would not fail by itself: the model
would train differently without an error.
"""

from collections.abc import Mapping

from megatron_muon.mcore.patching import Patch

_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"

_RELIED_ON: Mapping[str, tuple[str, ...]] = {
    # Blocks of fused QKV follow this line (rows/matrices.py).
    "megatron.core.optimizer.emerging_optimizers:TensorParallelMuon.orthogonalize": (
        "num_query_groups = grad_shape[0] // qkv_split_dim",
    ),
    # The chained optimizer keeps this order, and clips between the two lines.
    "megatron.core.optimizer.optimizer:ChainedOptimizer.step": (
        "found_inf_flag = self.prepare_grads()",
        "update_successful = False if should_skip_update else self.step_with_ready_grads()",
    ),
    # The chained optimizer installs and gathers the weights of all inner optimizers once.
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads": (
        "model_chunk.start_param_sync()",
    ),
    # A patch counts the calls that reduce over HSDP's outer ranks.
    f"{_FSDP}.param_and_grad_buffer:GradReducePipeline.reduce_gradients": (
        "outer_fsdp_group_grad_reduce=outer_fsdp_group_grad_reduce,",
    ),
    # Gradients that are not fused are added here; after fused ones .grad is deleted.
    f"{_FSDP}.megatron_fsdp:MegatronFSDP._register_fsdp_hooks": (
        "param.main_grad.copy_(to_local_if_dtensor(param.grad))",
        "param.main_grad.add_(to_local_if_dtensor(param.grad))",
        "if param.grad_added_to_main_grad and param.grad is not None:",
    ),
    (
        "megatron.core.tensor_parallel.layers:"
        "LinearWithGradAccumulationAndAsyncCommunication.backward"
    ): (
        'if hasattr(weight, "__fsdp_param__"):',
        "weight.main_grad = weight.get_main_grad()",
        "grad_weight = grad_output.t().matmul(total_input)",
    ),
    f"{_FSDP}.megatron_fsdp:MegatronFSDP.finish_grad_sync": (
        "self.attach_grad_to_optimizer_state()",
        "self._replace_param_with_distributed_if_needed()",
    ),
    f"{_FSDP}.megatron_fsdp:MegatronFSDP.install_optimized_model_weights": (
        "self.param_and_grad_buffer.copy_main_weights_to_model_weights()",
    ),
    # Called on a clone of the module with a column of ones as its weight, for a factor per row.
    "megatron.core.transformer.attention:SelfAttention.clip_qk": (
        "self.linear_qkv.weight.data.copy_(self._clip_linear_qkv(self.linear_qkv.weight.data))",
    ),
    "megatron.core.transformer.multi_latent_attention:MLASelfAttention.clip_qk": (
        "q_proj_weight.data.copy_(self._clip_q_proj_weight(q_proj_weight.data))",
        "kv_proj_weight.data.copy_(self._clip_kv_proj_weight(kv_proj_weight.data))",
    ),
    # It finds no bias: checkpoint_state.py numbers the biases of grouped experts.
    "megatron.core.transformer.fsdp_dtensor_checkpoint:get_expert_index_from_key": (
        "if 'mlp.experts.linear_fc1.weight' in key or 'mlp.experts.linear_fc2.weight' in key:",
    ),
    # A thread takes the place of the process (async_save.py).
    (
        "megatron.core.dist_checkpointing.strategies.async_utils:"
        "TemporalAsyncCaller.is_current_async_call_done"
    ): ("is_alive = int(self.process.is_alive()) if self.process is not None else 0",),
    "megatron.training.async_utils:get_save_and_finalize_callbacks": (
        "save_fn, preload_fn, save_args = writer.get_save_function_and_args()",
        "save_state_dict_async_finalize(*save_state_dict_ret)",
    ),
    # Plans assume equal ranges of a buffer as shards, in the order of ranks
    # (rows/megatron_fsdp.py).
    f"{_FSDP}.param_and_grad_buffer:_get_dp_buffer_shard_bucket_index": (
        "shard_size = bucket_index.size // data_parallel_world_size",
        "bucket_data_index = shard_size * data_parallel_rank",
    ),
    # The order under HFSDP.
    f"{_FSDP}.utils:FSDPDistributedIndex.get_logical_hybrid_fsdp_rank": (
        '"(outer_dp inner_dp) -> (inner_dp outer_dp)",',
    ),
}

_V2_RELIED_ON: Mapping[str, tuple[str, ...]] = {
    # The chained optimizer casts gradients, and restores them, as this one and its children do.
    "megatron.core.optimizer.fully_sharded_optimizer:FullyShardedOptimizer.step_with_ready_grads": (
        "parameter.grad_dtype = original_grad.dtype",
    ),
    # A mark makes gradients local shards (gradient_repairs.py, count_shards_once).
    "megatron.core.optimizer.optimizer:MegatronOptimizer._filter_grads_for_norm": (
        "grad = param.grad._local_tensor if param.grad is not None else None",
    ),
    # Rows of all ranks (rows/megatron_fsdp.py).
    f"{_FSDP}.experimental.layout:GlobalLayout.get_local_range": (
        "for axis, placement in reversed(tuple(enumerate(placements))):",
        "offset += mesh.get_local_rank(axis) * shard_size",
    ),
    # The count of gradients has this name (gradient_repairs.py, count_each_backward_pass).
    f"{_FSDP}.experimental.module:FsdpModule.pre_forward": ("self._num_ready_grad_parameters = 0",),
    # The callback at the end of a backward pass is found by its name on the context.
    f"{_FSDP}.experimental.module:FsdpModule.pre_backward": (
        "context.register_post_backward_final_callback()",
    ),
    f"{_FSDP}.experimental.parameter_group:"
    "FsdpParameterGroup.sync_model_weight_from_main_weight": (),
    f"{_FSDP}.experimental.parameter_group:FsdpParameterGroup.reduce_partial_gradients": (
        "fsdp_parameter.sharded.grad = self.main_grad.get_dtensor(index)",
    ),
}

RELIED_ON = (
    *(Patch(symbol, "relied on", source_lines=lines) for symbol, lines in _RELIED_ON.items()),
    *(
        Patch(symbol, "relied on", source_lines=lines, applies_to="v2")
        for symbol, lines in _V2_RELIED_ON.items()
    ),
)
