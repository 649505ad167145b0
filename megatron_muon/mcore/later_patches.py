# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What :func:`megatron_muon.enable` changes of what later releases have, as Megatron-FSDP v2."""

from megatron_muon.mcore import checkpoint_repairs, gradient_repairs, pipeline_repairs, qk_clip
from megatron_muon.mcore.fsdp_model import adapter_module
from megatron_muon.patching.patch import Patch, Target, names

# Applied where they are there. Diffs have none of them.
LATER_PATCHES: tuple[Patch, ...] = (
    Patch(
        Target(
            "megatron.training.checkpointing",
            "handle_mla_down_proj_in_state_dict",
            parameters=names("model, model_state_dict, optimizer_state_dict"),
            source_lines=(
                "model_state_dict[key], model.get_parameter(f'module.{key}'), split_sizes",
                'for subkey in ["exp_avg", "exp_avg_sq"]:',
            ),
        ),
        "checkpoints: split every state of fused latent attention, not Adam's alone",
        checkpoint_repairs.split_fused_latent_states,
    ),
)

# Releases with Megatron-FSDP v2 in Megatron's flags must have all of them.
V2_PATCHES: tuple[Patch, ...] = (
    Patch(
        Target(
            "megatron.core.optimizer.fully_sharded_optimizer",
            "FullyShardedOptimizer.__init__",
            parameters=names("self, optimizer, config, grad_scaler, init_state_fn, model_chunks"),
            source_lines=("super().__init__(optimizer, config, grad_scaler, init_state_fn)",),
        ),
        "v2: gradients count once in norm and zeros, also with expert parallelism",
        gradient_repairs.count_shards_once,
        # Pull request 6489, whose optimizer counts by placements.
        repaired_text="def get_grad_norm(",
    ),
    Patch(
        Target(
            "megatron.core.optimizer.fully_sharded_optimizer",
            "FullyShardedOptimizer._copy_main_params_to_model_params",
            parameters=names("self"),
            source_lines=("sync_model_weights_from_main_weights(self.get_parameters())",),
        ),
        "v2, QK-clip: after a step of Adam clip main weights before compute weights follow them",
        qk_clip.clip_before_install,
    ),
    Patch(
        Target(
            adapter_module(2),
            "FullyShardedDataParallelV2.__init__",
            parameters=names(
                "self, config, ddp_config, module, fsdp_unit_modules, disable_bucketing, device, "
                "pg_collection"
            ),
            source_lines=("super().__init__(config=config, module=module)",),
        ),
        "v2: name parameters without a gradient, which stop the gradients of their module; count "
        "gradients anew in each of two backward passes in a row, as of pipeline stages",
        gradient_repairs.complete_backward_passes,
    ),
    Patch(
        Target(
            adapter_module(2),
            "FullyShardedDataParallelV2._validate_config",
            parameters=names("config, ddp_config, module, pg_collection, disable_bucketing"),
            source_lines=(
                '"pipeline_model_parallel_size",',
                'for group_name in ("tp", "pp", "cp"):',
                "if not any(isinstance(submodule, MoELayer) for submodule in module.modules()):",
                'raise ValueError("MFSDP v2 does not support disabling bucketing.")',
            ),
        ),
        "v2: accept pipeline stages, some without experts, and several on a rank",
        pipeline_repairs.accept_stages,
    ),
    Patch(
        Target(
            "megatron.core.optimizer.fully_sharded_optimizer",
            "FullyShardedOptimizer._validate_config",
            parameters=names("config, model_chunks"),
            source_lines=(
                "if len(model_chunks) != 1:",
                'raise ValueError("MFSDP v2 currently supports exactly one model chunk.")',
            ),
        ),
        "v2: accept several pipeline stages on a rank",
        pipeline_repairs.accept_chunks,
    ),
)
