# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Convert a checkpoint of Megatron-FSDP for Muon under DDP: :mod:`.from_ddp` backwards.

Source: ``megatron/core/dist_checkpointing`` and ``megatron/core/optimizer`` of NVIDIA/Megatron-LM
0.19.2, and checkpoints that they have written.
"""

import argparse
import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from megatron_muon.checkpoint.folders import CheckpointError
from megatron_muon.checkpoint.from_ddp import (
    COMMON,
    GATED,
    MASTER,
    OWN_NORMS,
    STEP,
    plain_args,
    refuse_other_states,
)
from megatron_muon.checkpoint.reading import Item, StoredCheckpoint
from megatron_muon.checkpoint.writing import LazyPlanner

_WEIGHT = re.compile(r"model\.(?:module\.)+(.+)$")
_STATE = re.compile(r"optimizer\.state\.(?:module\.)+(.+)\.([^.]+)$")
_SETTING = re.compile(r"optimizer\.param_to_group_meta\.(?:module\.)+(.+)\.([^.]+)$")
_LAYER = re.compile(r"((?:.*\.)?layers\.)(\d+)\.(.+)$")
# Linear layers of Megatron's own modules, which save nothing else beside their weights.
_WITHOUT_STATE = re.compile(r"(.*\.linear_[^.]+)\.weight$")
_EXPERT = re.compile(r"(.*\.experts)\.(?:local_experts\.(\d+)\.)?(.+?)(\d*)$")


class _Place(NamedTuple):
    """The values of a parameter in a tensor of all layers and experts.

    Args:
        name: Stored name of the tensor.
        indices: Index by layer and expert.
        stack: Number of layers and experts.
        half: 0 for the rows of the gate, 1 for those above it, None for all.
    """

    name: str
    indices: tuple[int, ...]
    stack: tuple[int, ...]
    half: int | None


def to_ddp(checkpoint: StoredCheckpoint, planner: LazyPlanner) -> dict[str, Any]:
    """Plan a checkpoint for ``--optimizer muon`` under DDP, without random states.

    Args:
        checkpoint: One of Megatron-FSDP, of the format ``fsdp_dtensor``.
        planner: Gets the tensors and objects of the result.

    Returns:
        Values that all ranks share, ``iteration`` and ``args`` among them.

    Raises:
        CheckpointError: A tensor or setting is missing or unknown.
    """
    args = plain_args(checkpoint, checkpoint.read_object("args"))
    if args.fp16:
        raise CheckpointError(
            f"{checkpoint.folder}: expected args of a run in fp32 or bf16, got fp16."
        )
    weights, states = _tensors(checkpoint)
    common = _common(checkpoint, states, args)
    params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    for own, key in weights.items():
        place = _place(own, args)
        kinds = {kind: source for kind, source in states.get(own, {}).items() if kind != STEP}
        dtype = params_dtype if kinds else checkpoint.tensors[key].dtype
        _join(checkpoint, planner, key, place.name, place, dtype)
        if args.bf16 and kinds:
            kinds[MASTER] = key
        for kind, source in kinds.items():
            target = f"optimizer.state.{kind}.{place.name}"
            _join(checkpoint, planner, source, target, place, torch.float32)
        is_local = args.transformer_impl == "local" and place.half != 1
        if is_local and (match := _WITHOUT_STATE.match(place.name)):
            shard, num_shards = (
                ".".join(map(str, n)) for n in (place.indices or (0,), place.stack or (1,))
            )
            planner.add_object(f"{match[1]}._extra_state/shard_{shard}_{num_shards}", [None])
    planner.add_object(COMMON, [common])
    return common


def _tensors(checkpoint: StoredCheckpoint) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the keys of weights, and of states by kind, by the name of the parameter."""
    weights: dict[str, str] = {}
    states: dict[str, dict[str, str]] = defaultdict(dict)
    problems = []
    for key in checkpoint.tensors:
        if match := _STATE.match(key):
            states[match[1]][match[2]] = key
        elif (match := _WEIGHT.match(key)) and not match[1].startswith("mtp."):
            weights[match[1]] = key
        elif not key.startswith("rng_state."):
            problems.append(
                f"{key}: expected a weight, but not of multi-token prediction, or a state of an "
                "optimizer, got neither."
            )
    refuse_other_states(weights, states, problems)
    return weights, states


def _place(name: str, args: argparse.Namespace) -> _Place:
    indices, stack = list[int](), list[int]()
    half = None
    if name.endswith(("_w", "_v")) and GATED.search(name[:-2]):
        name, half = name[:-2], int(name.endswith("_v"))
    if match := _LAYER.match(name):
        indices.append(int(match[2]))
        stack.append(args.num_layers)
        name = match[3]
        for fused, own in OWN_NORMS.items() if args.transformer_impl == "local" else ():
            name = fused + name.removeprefix(own) if name.startswith(own) else name
        name = match[1] + name
    if match := _EXPERT.match(name):
        indices.append(int(match[2] or match[4]))
        stack.append(args.num_experts)
        name = f"{match[1]}.experts.{match[3]}"
    return _Place(name, tuple(indices), tuple(stack), half)


def _join(
    checkpoint: StoredCheckpoint,
    planner: LazyPlanner,
    key: str,
    target: str,
    place: _Place,
    dtype: torch.dtype,
) -> None:
    """Write the values of a parameter as a part of a tensor.

    Args:
        checkpoint: Checkpoint that holds the values.
        planner: Gets the chunks.
        key: Key of the values.
        target: Key of the tensor.
        place: Position of the values in the tensor.
        dtype: Data type of the tensor.
    """
    stored = checkpoint.tensors[key]
    shape = stored.shape
    first_row = (place.half or 0) * shape[0] if shape else 0
    if place.half is not None:
        shape = (2 * shape[0], *shape[1:])
    for item in stored.chunks:
        offsets = (first_row + item.offsets[0], *item.offsets[1:]) if shape else ()
        sizes = (*(1 for _ in place.indices), *item.sizes)
        box = ((*place.indices, *offsets), sizes)
        value = functools.partial(_values, checkpoint, item, sizes, dtype)
        planner.add_chunk(target, (*place.stack, *shape), box, dtype, value)


def _values(
    checkpoint: StoredCheckpoint, item: Item, sizes: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return checkpoint.read_chunk(item).reshape(sizes).to(dtype)


def _common(
    checkpoint: StoredCheckpoint, states: Mapping[str, Mapping[str, str]], args: argparse.Namespace
) -> dict[str, Any]:
    """Return the values that all ranks share, settings of parameter groups included."""
    settings: dict[str, dict[str, Any]] = defaultdict(dict)
    scheduler = {}
    for key in checkpoint.objects:
        if match := _SETTING.match(key):
            settings[match[1]][match[2]] = checkpoint.read_object(key)
        elif key.startswith("opt_param_scheduler."):
            scheduler[key.removeprefix("opt_param_scheduler.")] = checkpoint.read_object(key)
    # Upstream chains an optimizer per kind, in this order, and finds groups by their settings.
    chained: dict[tuple[bool, bool], dict[str, dict[str, Any]]] = defaultdict(dict)
    for group in settings.values():
        kind = ("betas" in group, bool(group.get("is_expert_parallel")))
        chained[kind][repr(sorted(group.items(), key=str))] = group
    # Transformer Engine's Adam counts steps in its groups.
    counters = {
        float(checkpoint.read_chunk(checkpoint.tensors[kinds[STEP]].chunks[0]))
        for kinds in states.values()
        if STEP in kinds
    }
    if len(counters) > 1 or not any(not is_adam for is_adam, _ in chained):
        raise CheckpointError(
            f"{checkpoint.folder}: expected settings of Muon, and one step count of Adam, got "
            f"groups of {len(chained)} optimizers and counts {sorted(counters)}. Save all "
            "parameters by one run of --optimizer muon."
        )
    optimizers: dict[int, Any] = {}
    for number, kind in enumerate(sorted(chained)):
        state: dict[str, Any] = {"param_groups": [*chained[kind].values()]}
        if kind[0] and counters:
            state["state"] = {"common_step": torch.tensor(next(iter(counters)))}
        optimizers[number] = {"optimizer": state} if args.bf16 else state
    names = ("checkpoint_version", "iteration", "num_floating_point_operations_so_far")
    of_fsdp = ("use_megatron_fsdp", "use_distributed_optimizer")
    own_args = {**vars(args), **dict.fromkeys(of_fsdp, False), "ckpt_format": "torch_dist"}
    return {
        "args": argparse.Namespace(**own_args),
        **{key: checkpoint.read_object(key) for key in names if key in checkpoint.objects},
        "optimizer": optimizers if len(optimizers) > 1 else optimizers[0],
        "opt_param_scheduler": scheduler,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
