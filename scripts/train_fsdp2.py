# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Train a small transformer with plain FSDP2: Muon for its matrices, AdamW for the rest, in one.

    torchrun --nproc-per-node 2 scripts/train_fsdp2.py --steps 20 --checkpoint DIR

On GPUs where there are some, otherwise on gloo ranks. Every ``--interval`` steps a checkpoint is
written to a folder of its own in DIR. Another call, on other ranks too, or a restart by
torchrun (``--max-restarts``) resumes from the last complete one. Needs no megatron.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_muon.fsdp2 import MuonAdamW

VOCAB, WIDTH, LENGTH, BATCH = 64, 64, 32, 8


class Model(nn.Module):
    """Predict the next of the numbers of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of ``(batch, length)`` tokens."""
        hidden = self.embedding(tokens[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], hidden.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def batch_of(step: int, num_rows: int, device: torch.device) -> torch.Tensor:
    """Return this rank's rows of a batch: counts in steps of one to four, from anywhere."""
    drawn = torch.Generator().manual_seed(step)
    start = torch.randint(VOCAB, (BATCH, 1), generator=drawn)
    stride = torch.randint(1, 5, (BATCH, 1), generator=drawn)
    rows = (start + stride * torch.arange(LENGTH)) % VOCAB
    return rows.chunk(BATCH // num_rows)[dist.get_rank()].to(device)


def main() -> None:
    """Train, and write checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps in all")
    parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to write to")
    parser.add_argument("--interval", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()
    if options.interval < 1 or BATCH % int(os.environ["WORLD_SIZE"]):
        parser.error(
            f"expected an interval of 1 or more, and a number of ranks that divides {BATCH}"
        )
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    model = Model().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # It splits query, key and value of nn.MultiheadAttention.
    optimizer = MuonAdamW.from_model(model, lr=1e-2, weight_decay=0.1)

    first = 0
    # dcp writes .metadata last: a save that was interrupted has none.
    saved = sorted(options.checkpoint.glob("step_*/.metadata")) if options.checkpoint else []
    if saved:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=saved[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        first = state["step"]
    for step in range(first, options.steps):
        loss = model(batch_of(step, BATCH // dist.get_world_size(), device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {mean.item():.4f}", flush=True)
        is_due = (step + 1) % options.interval == 0 or step + 1 == options.steps
        if options.checkpoint is not None and is_due:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step + 1}
            dcp.save(state, checkpoint_id=options.checkpoint / f"step_{step + 1:06}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
