# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Count what one optimizer step launches on a GPU besides its matrix products, on CPU ranks.

    torchrun --nproc-per-node 2 scripts/cpu_ranks benchmarks/step_cost.py

The model is a GPT of 8 layers of hidden 128 under Megatron-FSDP ``optim_grads_params``: 32
matrices, of which query, key and value are split into three blocks. Muon has Nesterov, weight decay
and gradient clipping, and sends bf16; Lion updates the other parameters. Counted is the second
``optimizer.step()`` of rank 0, as ``counting`` defines operations, bytes and host reads.

"A matrix" divides by the 32 matrices of the model, "an element" by the elements of them that rank 0
holds. Megatron-FSDP is left out, which reduces gradients before the step and gathers parameters
after it.

A CPU goes a GPU's way in four places: the kernel that moves rows runs in Triton's interpreter (a
launch counts as an operation), norms come from one fused call for a list, gradients are clipped as
with Transformer Engine, and the cost model's GPU decides owners and stacks.
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from counting import OperationCounter, uncounted
from gpt_under_fsdp import (
    build_gpt,
    build_muon,
    clip_as_with_transformer_engine,
    norms_as_on_a_gpu,
)

SEQ_LENGTH, VOCAB_SIZE, MICRO_BATCH_SIZE = 32, 64, 4
LAYERS, HIDDEN, HEADS = 8, 128, 4


def build_optimizer(model: Any) -> Any:
    """Build Muon and Lion as on a GPU."""
    from megatron_muon.plan.cost import CostModel

    norms_as_on_a_gpu()
    clip_as_with_transformer_engine()
    # Named rates replace the rates of CPU ranks; the run sets the others.
    others = ("num_ns_steps", "backend", "coefficient_type")
    rates = {k: v for k, v in dataclasses.asdict(CostModel()).items() if k not in others}
    cost_model = ",".join(f"{name}={value}" for name, value in rates.items())
    return build_muon(model, muon_fsdp_cost_model=cost_model)


def run_backward(model: Any, optimizer: Any, seed: int) -> None:
    """Fill the gradients from random tokens."""
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    tokens = torch.randint(VOCAB_SIZE, (MICRO_BATCH_SIZE, SEQ_LENGTH + 1), generator=generator)
    positions = torch.arange(SEQ_LENGTH).expand(MICRO_BATCH_SIZE, -1)
    mask = torch.ones(1, 1, SEQ_LENGTH, SEQ_LENGTH).tril() < 0.5
    model.zero_grad_buffer()
    optimizer.zero_grad()
    model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean().backward()


def count_step() -> dict[str, Any]:
    """Count the second step of this rank."""
    # Before the kernel is imported, which is then interpreted.
    os.environ["TRITON_INTERPRET"] = "1"
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from megatron_muon.runtime import row_moves

    row_moves.uses_kernel = lambda device: True
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = build_gpt(
        VOCAB_SIZE, SEQ_LENGTH, num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS
    )
    optimizer = build_optimizer(model)
    run_backward(model, optimizer, 0)
    optimizer.step()
    run_backward(model, optimizer, 1)
    for owner, name in (
        (model, "finish_grad_sync"),
        (model.module, "install_optimized_model_weights"),
        (model, "start_param_sync"),
    ):
        setattr(owner, name, uncounted(getattr(owner, name)))
    counter = OperationCounter()
    counter.count_row_kernel()
    with counter:
        optimizer.step()
    matrices = [param for muon in optimizer.muon_step.optimizers for param in muon.params]
    counts = ("operations", "num_bytes", "matrix_products", "collectives", "host_reads")
    return {
        "ranks": dist.get_world_size(),
        "matrices": len(matrices),
        "elements": sum(param._local_tensor.numel() for param in matrices),
        **{name: dict(getattr(counter, name).most_common()) for name in counts},
    }


def table(counted: dict[str, Any]) -> str:
    """Return the figures of one number of ranks."""
    matrices, elements = counted["matrices"], counted["elements"]
    total = {name: sum(v.values()) for name, v in counted.items() if isinstance(v, dict)}
    return (
        "| ranks | operations a matrix | matrix products a matrix | collectives "
        "| bytes an element | host reads |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        f"| {counted['ranks']} | {total['operations'] / matrices:.1f} "
        f"| {total['matrix_products'] / matrices:.1f} | {total['collectives']} "
        f"| {total['num_bytes'] / elements:.0f} | {total['host_reads']} |"
    )


def main() -> int:
    """Count, print a table and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts by operation")
    options = parser.parse_args()
    counted = count_step()
    if torch.distributed.get_rank() == 0:
        print(table(counted))
        if options.json is not None:
            options.json.write_text(json.dumps(counted, indent=1) + "\n")
    torch.distributed.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
