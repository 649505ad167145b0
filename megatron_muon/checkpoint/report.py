# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Describe a checkpoint as text: what it holds, and which run saved it."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import torch

from megatron_muon.checkpoint.storage import StoredCheckpoint, StoredTensor, load_chunk

# Wrappers of the model add ``module.``, a different number of times in bf16 and fp32.
_KEY = re.compile(
    r"(?s)(?:model|(optimizer\.state))\.(?:module\.)*+(?P<name>.+?)(?(1)\.(?P<kind>[^.]+))\Z"
)
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
    args = checkpoint.read_object("args")
    yield f"{checkpoint.folder}"
    yield f"  iteration: {_scalar(checkpoint.read_object('iteration')) or 'unknown'}"
    optimizer = _scalar(getattr(args, "optimizer", None)) or "unknown"
    parameters = _by_parameter(checkpoint)
    states = (", ".join(sorted(kinds.keys() - {"weight"})) for kinds in parameters.values())
    counts = [
        f"{kinds} for {n} parameters" for kinds, n in sorted(Counter(states).items()) if kinds
    ]
    yield f"  optimizer: {optimizer}; {'; '.join(counts) or 'no optimizer state'}"
    world = [
        f"{title} {value}"
        for name, title in _WORLD.items()
        if (value := _scalar(getattr(args, name, None))) is not None
    ]
    yield f"  saved from: {', '.join(world) or 'unknown'}"
    for name, kinds in sorted(parameters.items()):
        tensors = {kind: tensor for kind, tensor in kinds.items() if tensor}
        described = [
            f"{kind} {str(tensor.dtype).removeprefix('torch.')} norm "
            f"{_norm(checkpoint, tensor):.9g}"
            for kind, tensor in tensors.items()
        ]
        if described:
            shape = "x".join(map(str, next(iter(tensors.values())).shape))
            yield f"  {name}: {shape}; {', '.join(described)}"
    num_bytes: dict[str, int] = defaultdict(int)
    for key, tensor in checkpoint.tensors.items():
        num_bytes[key.partition(".")[0]] += tensor.num_bytes
    yield "  tensor bytes: " + ", ".join(f"{part} {n:,}" for part, n in sorted(num_bytes.items()))
    yield f"  objects: {len(checkpoint.objects)}; files: {len(checkpoint.items_by_file())}"


def _scalar(value: object) -> int | str | None:
    """Return a number or text, and None for what may be too long to print."""
    return value if isinstance(value, int | str) else None


def _by_parameter(checkpoint: StoredCheckpoint) -> dict[str, dict[str, StoredTensor | None]]:
    """Return weight and states by parameter and kind; None for a state that is no tensor."""
    parameters: dict[str, dict[str, StoredTensor | None]] = defaultdict(dict)
    # Keys of the model come before keys of the optimizer.
    for key in sorted(checkpoint.tensors.keys() | checkpoint.objects.keys()):
        if match := _KEY.match(key):
            parameters[match["name"]][match["kind"] or "weight"] = checkpoint.tensors.get(key)
    return parameters


def _norm(checkpoint: StoredCheckpoint, tensor: StoredTensor) -> float:
    # Chunk by chunk, as the whole tensor may not fit into memory.
    chunks = (load_chunk(checkpoint, chunk).to(torch.float64) for chunk in tensor.chunks)
    return math.sqrt(sum(float(values.square().sum()) for values in chunks))
