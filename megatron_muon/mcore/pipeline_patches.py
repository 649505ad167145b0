# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What :func:`megatron_muon.enable` changes for pipeline stages under Megatron-FSDP."""

from megatron_muon.mcore import checkpoint_state, pipeline_repairs
from megatron_muon.mcore.fsdp_model import adapter_module
from megatron_muon.patching.patch import Patch, Target, names

_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"

PIPELINE_PATCHES: tuple[Patch, ...] = (
    # Where a mesh of the job's ranks is made: a pipeline stage has some of them.
    *(
        Patch(
            Target(
                adapter_module(1),
                name,
                parameters=names(parameters),
                source_lines=("torch.arange(world_size),", "return dp_tp_meshes[0]"),
            ),
            f"pipeline stages: a mesh has the ranks of one stage{why}",
            pipeline_repairs.mesh_of_stage,
            tree_line=tree_line,
        )
        for name, parameters, why, tree_line in (
            (
                "_get_dp_tp_mesh",
                "dp_cp_group, tp_group, ep_size",
                "",
                "# megatron-muon 0011: a pipeline stage has some of the ranks.",
            ),
            (
                "_get_hsdp_tp_mesh",
                "outer_fsdp_dp_group, dp_cp_group, tp_group, ep_size",
                ", under HSDP too",
                "# megatron-muon 0011: also under HSDP.",
            ),
        )
    ),
    Patch(
        Target(
            f"{_FSDP}.param_and_grad_buffer",
            "make_fsdp_dtensor",
            parameters=names(
                "local_tensor, param, dist_index, is_sharded_param, is_expert_param, run_check, "
                "update_uneven_dtensor_chunk_meta, force_sync_tp_duplicated_param"
            ),
            source_lines=("run_check=run_check,",),
        ),
        "pipeline stages with tensor parallelism: nothing is compared with ranks of other stages",
        pipeline_repairs.check_within_stage,
        tree_line="# megatron-muon 0011: torch compares tensors of all ranks of the job.",
    ),
    Patch(
        Target(
            f"{_FSDP}.megatron_fsdp",
            "MegatronFSDP._init_fsdp_param_and_grad_buffer",
            parameters=names("self"),
            source_lines=(
                "suggested_communication_unit_size = total_param_elements // total_fsdp_module * 2",
            ),
        ),
        "pipeline stages: one without a layer has no unit of Megatron-FSDP",
        pipeline_repairs.size_without_units,
        tree_line="# megatron-muon 0012: a pipeline stage may have no layer.",
    ),
    Patch(
        Target(
            "megatron.core.pipeline_parallel.schedules",
            "deallocate_output_tensor",
            parameters=names("out, deallocate_pipeline_outputs"),
            source_lines=(
                'assert out._base is None, "counter-productive to free a view of another tensor."',
                "out.data = torch.empty((1,), device=out.device, dtype=out.dtype)",
            ),
        ),
        "pipeline stages: free outputs, which are views under Megatron-FSDP",
        pipeline_repairs.free_views,
        tree_line="# megatron-muon 0012: hooks of Megatron-FSDP return a view of the output.",
    ),
    Patch(
        Target(
            "megatron.core.distributed.finalize_model_grads",
            "_allreduce_embedding_grad",
            parameters=names("model, embd_group, pp_group, weight_getter, skip_if_none, config"),
            source_lines=("torch.distributed.all_reduce(grad, group=embd_group)",),
        ),
        "pipeline stages: tied embeddings, whose shards differ between first and last stage",
        pipeline_repairs.sum_whole_gradients,
        tree_line="return sum_tied_gradient(model, embd_group, pp_group, weight_getter)",
    ),
    Patch(
        Target(
            "megatron.core.optimizer.distrib_optimizer",
            "DistributedOptimizer._param_name",
            parameters=names("self, param"),
            source_lines=(
                'if not hasattr(self, "param_to_name"):',
                "name_to_param = handle_experts_in_state_dict(name_to_param, num_experts)",
            ),
        ),
        "checkpoints: layers of pipeline stages have names of their own",
        checkpoint_state.name_across_stages,
        tree_line="@name_across_stages",
    ),
)
