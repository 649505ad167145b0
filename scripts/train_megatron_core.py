# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT with Muon under Megatron-FSDP on megatron-core alone, no megatron.training.

    .venv/bin/torchrun --nproc-per-node 2 scripts/train_megatron_core.py

Only the lines that mention megatron_muon are specific to it. Each token of the data follows from
the one before it, which the model learns in seconds. The script uses GPUs if there are any,
otherwise CPU ranks over gloo.
"""

import argparse
import os

import cpu_ranks
import torch

import megatron_muon

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Before megatron is imported.
    cpu_ranks.enable()

# ruff: noqa: E402
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides
from megatron.core.transformer import TransformerConfig

VOCAB_SIZE, SEQ_LENGTH, MICRO_BATCH_SIZE = 64, 32, 8


def build_model() -> FullyShardedDataParallel:
    """Build the model and let Megatron-FSDP shard it, ZeRO-3, over all ranks."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=SEQ_LENGTH,
        share_embeddings_and_output_weights=False,
    )
    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        gradient_reduce_div_fusion=DEVICE == "cuda",
    )
    return FullyShardedDataParallel(config, ddp_config, gpt.to(DEVICE))


def next_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels, int64 ``(batch, seq)``: each label is ``5 * token + 3``, modulo."""
    tokens = torch.randint(VOCAB_SIZE, (MICRO_BATCH_SIZE, 1), generator=generator)
    for _ in range(SEQ_LENGTH):
        tokens = torch.cat([tokens, (5 * tokens[:, -1:] + 3) % VOCAB_SIZE], dim=1)
    return tokens[:, :-1].to(DEVICE), tokens[:, 1:].to(DEVICE)


def main() -> None:
    """Train, and print the mean loss of all ranks every tenth step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)

    # Before the model is wrapped: some patches repair Megatron-FSDP's gradients.
    megatron_muon.enable()
    model = build_model()
    optimizer_config = OptimizerConfig(
        optimizer="muon", lr=0.01, weight_decay=0.1, clip_grad=1.0, use_distributed_optimizer=True
    )
    # Settings of this package are attributes, with the names of the flags.
    optimizer_config.muon_fsdp_comm_dtype = "bf16"
    # get_megatron_optimizer(optimizer_config, [model]) builds the same.
    optimizer = megatron_muon.build_megatron_fsdp_emerging_optimizer(
        optimizer_config, [model], get_standard_config_overrides(optimizer_config)
    )

    generator = torch.Generator(device="cpu").manual_seed(dist.get_rank())
    positions = torch.arange(SEQ_LENGTH, device=DEVICE).expand(MICRO_BATCH_SIZE, -1)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH, device=DEVICE).tril() < 0.5
    for step in range(1, options.steps + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        tokens, labels = next_batch(generator)
        loss = model(tokens, positions, mask, labels=labels).float().mean()
        loss.backward()
        _, grad_norm, _ = optimizer.step()
        if step == 1 or step % 10 == 0 or step == options.steps:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                loss_of_all = mean.item() / dist.get_world_size()
                print(f"step {step:3d}  loss {loss_of_all:.4f}  grad norm {float(grad_norm):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
