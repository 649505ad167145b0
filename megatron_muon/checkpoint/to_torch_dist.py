# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Turn a checkpoint of Megatron-FSDP into one of Muon under DDP: :mod:`.torch_dist` backwards.

Source: ``megatron/core/dist_checkpointing`` and ``megatron/core/optimizer`` of NVIDIA/Megatron-LM
0.19.2, and checkpoints that they have written.
"""

import argparse
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_muon.checkpoint.folders import TRACKER, CheckpointError, iteration_folder
from megatron_muon.checkpoint.storage import StoredCheckpoint, StoredTensor, load_chunk
from megatron_muon.checkpoint.torch_dist import (
    ADAM,
    COMMON,
    GATED,
    MASTER,
    MUON,
    OWN_NORMS,
    plain_args,
    refuse_other_states,
)
from megatron_muon.checkpoint.writing import CheckpointWriter

_WEIGHT = re.compile(r"model\.(?:module\.)+(.+)$")
_STATE = re.compile(r"optimizer\.state\.(?:module\.)+(.+)\.([^.]+)$")
_SETTING = re.compile(r"optimizer\.param_to_group_meta\.(?:module\.)+(.+)\.([^.]+)$")
_LAYER = re.compile(r"((?:.*\.)?layers\.)(\d+)\.(.+)$")
_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(.+)$")
_GROUPED_EXPERT = re.compile(r"(.*\.experts)\.(linear_fc\d\.(?:weight|bias))(\d+)$")
# Linear layers of Megatron's own modules, which save nothing else beside their weights.
_WITHOUT_STATE = re.compile(r"(.*\.linear_[^.]+)\.weight$")


class _Place(NamedTuple):
    """Where the values of a parameter are in a stored tensor.

    Args:
        indices: Of layer and expert.
        half: 0 for all rows or those of the gate, 1 for those above it.
    """

    indices: tuple[int, ...]
    half: int


@dataclass
class _Stored:
    """A tensor of all layers and experts, and the parameters that it consists of."""

    names: dict[_Place, str] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    num_halves: int = 1


def to_torch_dist(checkpoint: StoredCheckpoint, folder: Path) -> str:
    """Write a checkpoint for ``--optimizer muon`` under DDP, without random states.

    Args:
        checkpoint: One of Megatron-FSDP, of the format ``fsdp_dtensor``.
        folder: A ``--save`` folder to make.

    Returns:
        A line that says what was converted.

    Raises:
        CheckpointError: A tensor or setting is missing or unknown, or layers differ.

    Memory: the largest chunk, three times.
    """
    args = _args(checkpoint)
    weights, states = _tensors(checkpoint)
    stored = _stored(weights, checkpoint, args)
    common = _common(checkpoint, states, args)
    iteration = int(common["iteration"])
    inner = iteration_folder(folder, iteration)
    inner.mkdir(parents=True)
    writer = CheckpointWriter(inner)
    params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    num_momentum = 0
    for name, each in stored.items():
        kinds = states.get(next(iter(each.names.values())), {})
        num_momentum += kinds.keys() == MUON
        dtype = params_dtype if kinds else None
        _join(checkpoint, writer, name, each, {n: weights[n] for n in each.names.values()}, dtype)
        if args.bf16 and kinds:
            key = f"optimizer.state.{MASTER}.{name}"
            _join(checkpoint, writer, key, each, weights, torch.float32)
        for kind in sorted(kinds.keys() - {"step"}):
            keys = {own: states[own][kind] for own in each.names.values()}
            key = f"optimizer.state.{kind}.{name}"
            _join(checkpoint, writer, key, each, keys, torch.float32)
        if args.transformer_impl == "local" and (match := _WITHOUT_STATE.match(name)):
            for key in _shard_keys(f"{match[1]}._extra_state", each.lengths):
                writer.add_object(key, [None])
    writer.add_object(COMMON, [common])
    writer.finish()
    text = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    (inner / "metadata.json").write_text(text)
    (folder / TRACKER).write_text(str(iteration))
    return (
        f"iteration {iteration}: {len(stored)} stored weights, {num_momentum} of them with "
        "momentum; load it with --no-load-rng, as random states are left out"
    )


def _args(checkpoint: StoredCheckpoint) -> argparse.Namespace:
    args = plain_args(checkpoint, checkpoint.read_object("args"))
    if args["fp16"]:
        raise CheckpointError(
            f"{checkpoint.folder}: expected args of a run in fp32 or bf16, got fp16."
        )
    of_fsdp = ("use_megatron_fsdp", "use_distributed_optimizer")
    args |= {"ckpt_format": "torch_dist"} | dict.fromkeys(of_fsdp, False)
    return argparse.Namespace(**args)


def _tensors(checkpoint: StoredCheckpoint) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the keys of weights, and of states by kind, by the name of the parameter."""
    weights: dict[str, str] = {}
    states: dict[str, dict[str, str]] = defaultdict(dict)
    problems = []
    for key in checkpoint.tensors:
        if match := _STATE.match(key):
            states[match[1]][match[2]] = key
        elif match := _WEIGHT.match(key):
            weights[match[1]] = key
        elif not key.startswith("rng_state."):
            problems.append(f"{key}: expected a weight, or a state of an optimizer, got neither.")
    refuse_other_states(weights, states, ADAM | {"step"}, problems)
    return weights, states


def _place(name: str, args: argparse.Namespace) -> tuple[str, _Place, bool]:
    """Return the stored name of a parameter, its place, and whether it is a half."""
    index: list[int] = []
    is_half = name.endswith(("_w", "_v")) and bool(GATED.search(name[:-2]))
    half = int(is_half and name.endswith("_v"))
    name = name[:-2] if is_half else name
    if match := _LAYER.match(name):
        index.append(int(match[2]))
        own = match[3]
        if args.transformer_impl == "local":
            for fused, plain in OWN_NORMS.items():
                own = fused + own.removeprefix(plain) if own.startswith(plain) else own
        name = match[1] + own
    if match := _EXPERT.match(name):
        index.append(int(match[2]))
        name = f"{match[1]}.experts.{match[3]}"
    elif match := _GROUPED_EXPERT.match(name):
        index.append(int(match[3]))
        name = f"{match[1]}.experts.{match[2]}"
    return name, _Place(tuple(index), half), is_half


def _stored(
    weights: Mapping[str, str], checkpoint: StoredCheckpoint, args: argparse.Namespace
) -> dict[str, _Stored]:
    """Return the stored tensors by name, each of the same parameters in all layers."""
    stored: dict[str, _Stored] = defaultdict(_Stored)
    for own in weights:
        name, place, is_half = _place(own, args)
        stored[name].names[place] = own
        stored[name].num_halves = 1 + is_half
    num_layers: dict[str, set[int]] = defaultdict(set)
    problems = []
    for name, each in stored.items():
        indices = [place.indices for place in each.names]
        each.lengths = tuple(1 + max(axis) for axis in zip(*indices, strict=True))
        expected = itertools.product(*map(range, (*each.lengths, each.num_halves)))
        is_complete = {(*p.indices, p.half) for p in each.names} == set(expected)
        shapes = {checkpoint.tensors[weights[own]].shape for own in each.names.values()}
        if not is_complete or len(shapes) > 1 or name.startswith("mtp."):
            problems.append(
                f"{name}: expected it in all layers with one shape, got shapes {sorted(shapes)} of "
                f"{len(each.names)} parameters. Models whose layers differ are not converted."
            )
        if each.lengths and "layers." in name:
            num_layers[name.partition("layers.")[0]].add(each.lengths[0])
    problems += [
        f"{prefix}layers: expected the same parameters in all layers, got some in the first "
        f"{min(numbers)} of {max(numbers)} alone. Models whose layers differ are not converted."
        for prefix, numbers in num_layers.items()
        if len(numbers) > 1
    ]
    if problems:
        raise CheckpointError(*sorted(problems), "Nothing was written.")
    return stored


def _join(
    checkpoint: StoredCheckpoint,
    writer: CheckpointWriter,
    key: str,
    stored: _Stored,
    keys: Mapping[str, str],
    dtype: torch.dtype | None,
) -> None:
    """Write the values of parameters as one tensor.

    Args:
        checkpoint: What is read.
        writer: What writes it.
        key: Of the tensor.
        stored: Its parameters.
        keys: Of the values, by parameter.
        dtype: Of the tensor; None for that of the values.
    """
    for place, own in stored.names.items():
        part: StoredTensor = checkpoint.tensors[keys[own]]
        shape = list(part.shape)
        first_row = place.half * shape[0] if shape else 0
        if shape:
            shape[0] *= stored.num_halves
        for item in part.chunks:
            chunk = load_chunk(checkpoint, item)
            chunk = chunk.reshape((1,) * len(place.indices) + tuple(chunk.shape))
            offsets = list(item.offsets)
            if offsets:
                offsets[0] += first_row
            writer.add_chunk(
                key,
                (*stored.lengths, *shape),
                (*place.indices, *offsets),
                chunk.to(dtype or chunk.dtype),
            )


def _shard_keys(key: str, lengths: tuple[int, ...]) -> Iterator[str]:
    """Yield the keys of an object that each layer and expert has."""
    sizes = ".".join(map(str, lengths)) or "1"
    for index in itertools.product(*map(range, lengths or (1,))):
        yield f"{key}/shard_{'.'.join(map(str, index))}_{sizes}"


def _common(
    checkpoint: StoredCheckpoint, states: Mapping[str, Mapping[str, str]], args: argparse.Namespace
) -> dict[str, Any]:
    """Return what all ranks load alike, settings of parameter groups included."""
    settings: dict[str, dict[str, Any]] = defaultdict(dict)
    scheduler = {}
    for key in checkpoint.objects:
        if match := _SETTING.match(key):
            settings[match[1]][match[2]] = checkpoint.read_object(key)
        elif key.startswith("opt_param_scheduler."):
            scheduler[key.removeprefix("opt_param_scheduler.")] = checkpoint.read_object(key)
    # Upstream chains an optimizer for each, in this order, and finds groups by their settings.
    chained: dict[tuple[bool, bool], dict[str, dict[str, Any]]] = defaultdict(dict)
    for group in settings.values():
        kind = ("betas" in group, bool(group.get("is_expert_parallel")))
        chained[kind][repr(sorted(group.items(), key=str))] = group
    counters = {
        float(load_chunk(checkpoint, checkpoint.tensors[kinds["step"]].chunks[0]))
        for kinds in states.values()
        if "step" in kinds
    }
    if len(counters) > 1 or not any(not is_adam for is_adam, _ in chained):
        raise CheckpointError(
            f"{checkpoint.folder}: expected settings of Muon, and one step count of Adam, got "
            f"groups of {len(chained)} optimizers and counts {sorted(counters)}. Save all "
            "parameters by one run of --optimizer muon."
        )
    optimizers: dict[int, Any] = {}
    for number, kind in enumerate(sorted(chained)):
        state: dict[str, Any] = {"param_groups": list(chained[kind].values())}
        if kind[0] and counters:
            state["state"] = {"common_step": torch.tensor(next(iter(counters)))}
        optimizers[number] = {"optimizer": state} if args.bf16 else state
    names = ("checkpoint_version", "iteration", "num_floating_point_operations_so_far")
    return {
        "args": args,
        **{key: checkpoint.read_object(key) for key in names if key in checkpoint.objects},
        "optimizer": optimizers if len(optimizers) > 1 else optimizers[0],
        "opt_param_scheduler": scheduler,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
