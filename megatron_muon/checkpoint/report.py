# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Describe a checkpoint as text: what it holds, and which run saved it."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import torch

from megatron_muon.checkpoint.folders import CheckpointError
from megatron_muon.checkpoint.storage import StoredCheckpoint, StoredTensor, load_tensor

# Wrappers of the model add ``module.``, a different number of times in bf16 and fp32.
_MODEL = re.compile(r"^model\.(?:module\.)*(?P<name>.+)$")
_STATE = re.compile(r"^optimizer\.state\.(?:module\.)*(?P<name>.+)\.(?P<kind>[^.]+)$")
# Arguments of Megatron that describe the ranks that wrote a checkpoint.
_WORLD = {
    "world_size": "ranks",
    "data_parallel_sharding_strategy": "sharding",
    "num_distributed_optimizer_instances": "HSDP instances",
    "outer_dp_sharding_strategy": "outer sharding",
    "tensor_model_parallel_size": "tensor parallel",
    "expert_model_parallel_size": "expert parallel",
    "expert_tensor_parallel_size": "expert tensor parallel",
}


def describe(checkpoint: StoredCheckpoint) -> Iterator[str]:
    """Describe a checkpoint line by line.

    Gated layers are stored in halves, ``weight_w`` and ``weight_v``, experts by their global index.

    Yields:
        Iteration, optimizer, world; a line per parameter with its shape and, for the weight and
        every state, dtype and Frobenius norm in float64; sums.

    Raises:
        CheckpointError: A tensor or object that is described cannot be read.
    """
    args = checkpoint.read_object("args") if "args" in checkpoint.objects else None
    iteration = "iteration" in checkpoint.objects and checkpoint.read_object("iteration")
    yield f"{checkpoint.folder}"
    yield f"  iteration: {iteration or 'unknown'}"
    yield f"  optimizer: {getattr(args, 'optimizer', 'unknown')}; {_describe_state(checkpoint)}"
    world = [
        f"{title} {getattr(args, name)}"
        for name, title in _WORLD.items()
        if getattr(args, name, None) is not None
    ]
    yield f"  saved from: {', '.join(world) or 'unknown'}"
    for name, kinds in sorted(_tensors_by_parameter(checkpoint).items()):
        shape = "x".join(map(str, next(iter(kinds.values()))[1].shape))
        described = [
            f"{kind} {str(tensor.dtype).removeprefix('torch.')} norm "
            f"{_norm(checkpoint, key, tensor):.9g}"
            for kind, (key, tensor) in kinds.items()
        ]
        yield f"  {name}: {shape}; {', '.join(described)}"
    num_bytes: dict[str, int] = defaultdict(int)
    for key, tensor in checkpoint.tensors.items():
        num_bytes[key.partition(".")[0]] += tensor.num_bytes
    yield "  tensor bytes: " + ", ".join(f"{part} {n:,}" for part, n in sorted(num_bytes.items()))
    yield f"  objects: {len(checkpoint.objects)}; files: {len(checkpoint.items_by_file())}"


def _describe_state(checkpoint: StoredCheckpoint) -> str:
    """Return which states an optimizer keeps, and for how many stored parameters."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for key in checkpoint.tensors.keys() | checkpoint.objects.keys():
        if match := _STATE.match(key):
            kinds[match["name"]].add(match["kind"])
    counts = Counter(", ".join(sorted(states)) for states in kinds.values())
    described = [f"{states} for {n} parameters" for states, n in sorted(counts.items())]
    return "; ".join(described) or "no optimizer state"


def _tensors_by_parameter(
    checkpoint: StoredCheckpoint,
) -> dict[str, dict[str, tuple[str, StoredTensor]]]:
    """Return key and tensor of weight and states, by parameter and kind."""
    parameters: dict[str, dict[str, tuple[str, StoredTensor]]] = defaultdict(dict)
    # Keys of the model come before keys of the optimizer.
    for key, tensor in sorted(checkpoint.tensors.items()):
        if match := _MODEL.match(key):
            parameters[match["name"]]["weight"] = key, tensor
        elif match := _STATE.match(key):
            parameters[match["name"]][match["kind"]] = key, tensor
    return parameters


def _norm(checkpoint: StoredCheckpoint, key: str, tensor: StoredTensor) -> float:
    # Chunk by chunk, as the whole tensor may not fit into memory.
    total = 0.0
    for chunk in tensor.chunks:
        values = load_tensor(checkpoint.read_item(chunk), key)
        if tuple(values.shape) != chunk.sizes:
            raise CheckpointError(
                f"{key}: expected a chunk of shape {chunk.sizes}, got {tuple(values.shape)}."
            )
        total += float(values.to(torch.float64).square().sum())
    return math.sqrt(total)
