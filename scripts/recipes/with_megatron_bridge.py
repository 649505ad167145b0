# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Pretrain a small Llama-like model with Megatron-Bridge, Megatron-FSDP and Muon.

    torchrun --nproc-per-node 2 scripts/recipes/with_megatron_bridge.py --save FOLDER
    torchrun --nproc-per-node 4 scripts/recipes/with_megatron_bridge.py --load FOLDER --step 3

The second command goes on from the checkpoint of iteration 3, on any number of ranks. Without a
GPU, ``scripts/cpu_ranks`` lets Bridge run on gloo ranks. ``OPTIONS`` such as
``optimizer.muon_fsdp_comm_dtype=fp32`` or ``checkpoint.load_optim=False`` override the
configuration as in Bridge's own scripts.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

IS_ON_CPU = not torch.cuda.is_available()
if IS_ON_CPU:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from cpu_ranks import end_process, megatron_bridge

    megatron_bridge.enable()

from megatron.bridge.models.gpt_provider import local_layer_spec
from megatron.bridge.recipes.gpt.h100.vanilla_gpt import (
    vanilla_gpt_pretrain_1gpu_h100_bf16_config,
)
from megatron.bridge.recipes.utils.optimizer_utils import distributed_muon_with_cosine_annealing
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

# Its import enables the patches, which models are built with.
from megatron_muon.bridge import MuonOptimizerConfig

SEQUENCE, VOCABULARY = 32, 96


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save")
    parser.add_argument("--load")
    parser.add_argument("--step", type=int, help="iteration to load; default: the last")
    parser.add_argument("--optimizer", default="muon", help="a name, such as muon, soap or adam")
    parser.add_argument("--ddp", action="store_true", help="upstream's optimizer, without sharding")
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("options", nargs="*", metavar="OPTIONS")
    return parser.parse_intermixed_args()


def set_model(model: Any, num_experts: int) -> None:
    """Shrink the recipe's GPT to a Llama-like model, with experts or without."""
    model.num_layers, model.hidden_size, model.num_attention_heads = 2, 64, 4
    model.num_query_groups, model.ffn_hidden_size = 2, 128
    model.seq_length = model.max_position_embeddings = SEQUENCE
    model.position_embedding_type, model.normalization = "rope", "RMSNorm"
    model.gated_linear_unit, model.activation_func = True, torch.nn.functional.silu
    model.add_bias_linear = model.share_embeddings_and_output_weights = False
    model.attention_dropout = model.hidden_dropout = 0.0
    if num_experts:
        model.num_moe_experts, model.moe_router_topk, model.moe_ffn_hidden_size = num_experts, 2, 64
        model.moe_token_dispatcher_type, model.moe_grouped_gemm = "alltoall", False
    if IS_ON_CPU:
        model.transformer_layer_spec = local_layer_spec
        model.gradient_accumulation_fusion = model.apply_rope_fusion = False
        model.masked_softmax_fusion = model.persist_layer_norm = False
        model.bias_activation_fusion = model.bias_dropout_fusion = False


def config_of(options: argparse.Namespace) -> ConfigContainer:
    """Return the configuration of a run."""
    cfg = vanilla_gpt_pretrain_1gpu_h100_bf16_config()
    set_model(cfg.model, options.experts)
    cfg.dataset.seq_length, cfg.dataset.num_workers = SEQUENCE, 0
    cfg.tokenizer.vocab_size = VOCABULARY
    cfg.train.train_iters = options.iterations
    cfg.train.global_batch_size, cfg.train.micro_batch_size = 4, 1
    cfg.validation.eval_iters, cfg.validation.eval_interval = 0, 1000
    cfg.logger.log_interval, cfg.logger.tensorboard_dir = 1, None
    cfg.model.pipeline_dtype = torch.float32 if options.fp32 else torch.bfloat16
    if options.fp32:
        cfg.mixed_precision = None
    precision = "32" if options.fp32 else "bf16-mixed"
    # Bridge's own recipe for Muon, whose "dist_muon" means muon under Megatron-FSDP.
    recipe, cfg.scheduler = distributed_muon_with_cosine_annealing(
        precision, max_lr=1e-2, min_lr=1e-3, lr_warmup_iters=1, lr_decay_iters=20
    )
    muon = MuonOptimizerConfig.from_config(recipe, muon_extra_scale_factor=0.2)
    muon.optimizer = options.optimizer
    cfg.optimizer = muon
    cfg.checkpoint.save, cfg.checkpoint.load = options.save, options.load
    cfg.checkpoint.ckpt_step, cfg.checkpoint.save_interval = options.step, 3
    if options.ddp:
        cfg.ddp.use_distributed_optimizer = cfg.optimizer.use_distributed_optimizer = False
        cfg.ddp.overlap_grad_reduce = cfg.ddp.overlap_param_gather = False
        return cfg
    cfg.checkpoint.ckpt_format = "fsdp_dtensor"
    cfg.ddp.use_megatron_fsdp = cfg.dist.use_megatron_fsdp = True
    cfg.ddp.data_parallel_sharding_strategy = "optim_grads_params"
    cfg.ddp.overlap_grad_reduce = cfg.ddp.overlap_param_gather = True
    return cfg


def train() -> None:
    """Train by the command line."""
    options = parse()
    cfg = process_config_with_overrides(config_of(options), cli_overrides=options.options)
    pretrain(cfg, forward_step)


if __name__ == "__main__":
    train()
    if IS_ON_CPU:
        end_process(0)
