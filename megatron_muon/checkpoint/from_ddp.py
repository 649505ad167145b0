# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Convert a checkpoint of Muon under DDP or the layer-wise optimizer for Megatron-FSDP.

============================================================  ====================================
``torch_dist``                                                ``fsdp_dtensor``
============================================================  ====================================
a tensor of all layers, ``decoder.layers.mlp...``             one a layer, ``decoder.layers.0.mlp``
one of all experts, ``mlp.experts.experts.linear_fc1...``     one per expert
gate and up in one ``linear_fc1.weight``                      ``weight_w`` and ``weight_v``
``self_attention.linear_qkv.layer_norm_weight``               ``input_layernorm.weight``, if norms
                                                              are modules of their own
weights of 16 bits and ``optimizer.state.fp32_param``         fp32 ``model``
settings by group, ``common_state``                           those of the run that loads it
============================================================  ====================================

Source: ``megatron/core/dist_checkpointing`` and ``megatron/core/transformer/
fsdp_dtensor_checkpoint.py`` of NVIDIA/Megatron-LM 0.19.2, and checkpoints that both have written.
"""

import argparse
import functools
import itertools
import math
import re
import struct
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_muon.checkpoint.folders import CheckpointError, expecting
from megatron_muon.checkpoint.reading import Item, StoredCheckpoint, StoredObject
from megatron_muon.checkpoint.writing import LazyPlanner

COMMON = "common_state/shard_0_1"
MASTER, STEP = "fp32_param", "step"
MUON, ADAM = {"momentum_buffer"}, {"exp_avg", "exp_avg_sq"}
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)$")
_LAYERS = re.compile(r"((?:.*\.)?layers\.)(?=[^\d.])")
_EXPERTS = ".experts.experts."
GATED = re.compile(
    r"\.mlp\.(?:shared_experts\.|experts\.(?:local_experts\.\d+\.)?)?linear_fc1\.(?:weight|bias)\d*$"
)
# Norms that Transformer Engine fuses into a linear layer, and other modules do not.
OWN_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
# Buffers, which no optimizer steps.
_BUFFERS = ("expert_bias", "local_tokens_per_expert")
_READ_ARGS = {
    *("bf16", "fp16", "swiglu", "transformer_impl", "moe_grouped_gemm", "num_layers", "num_experts")
}
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_INDEX = "\0"  # stands for an index in a name

# Name of a parameter, its index by layer and expert, and 0 or 1 for the half of a gated layer.
type Part = tuple[str, tuple[int, ...], int | None]


def from_ddp(checkpoint: StoredCheckpoint, planner: LazyPlanner) -> dict[str, Any]:
    """Plan a checkpoint for ``--use-megatron-fsdp``, without random states and group settings.

    Args:
        checkpoint: One of the format ``torch_dist``.
        planner: Gets the tensors and objects of the result.

    Returns:
        Values that all ranks share, ``iteration`` and ``args`` among them.

    Raises:
        CheckpointError: A tensor or setting is missing or unknown.
    """
    common = _common(checkpoint)
    args = common["args"]
    weights, states = _by_parameter(checkpoint)
    in_groups, in_state = _steps(checkpoint, common)
    prefix = "optimizer.{}.module.module." + "module." * (args.bf16 or args.fp16)
    state, setting = prefix.format("state"), prefix.format("param_to_group_meta")
    for name, key in weights.items():
        kinds = states[name]
        shape = checkpoint.tensors[key].shape
        parts = [*_parts(name, shape, args)]
        _split(checkpoint, planner, kinds.pop(MASTER, key), parts, "model.module.", "")
        for kind, source in kinds.items():
            _split(checkpoint, planner, source, parts, state, f".{kind}")
        if kinds.keys() != ADAM:
            continue
        # Torch's Adam counts the steps of a parameter, Transformer Engine's those of a group.
        for own, _, _ in parts if in_state else ():
            counter = functools.partial(torch.tensor, in_state[0], dtype=torch.float32)
            planner.add_chunk(f"{state}{own}.{STEP}", (), ((), ()), torch.float32, counter)
        for own, _, _ in _parts(name, shape, args, has_halves=False) if in_groups else ():
            planner.add_object(f"{setting}{own}.{STEP}", in_groups[0])
    planner.add_object("args", argparse.Namespace(**vars(args), ckpt_format="fsdp_dtensor"))
    for key in ("checkpoint_version", "iteration", "num_floating_point_operations_so_far"):
        planner.add_object(key, common.get(key, 0))
    for key, value in common.get("opt_param_scheduler", {}).items():
        planner.add_object(f"opt_param_scheduler.{key}", value)
    return common


def _common(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    stored = checkpoint.read_object(COMMON)
    common = stored[0] if isinstance(stored, list) and stored else {}
    missing = [name for name in ("args", "iteration", "optimizer") if name not in common]
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder}: expected {', '.join(missing)} in {COMMON}, got "
            f"{sorted(common) or 'nothing'}. Save weights and optimizer by Megatron-LM 0.19, "
            "without --no-save-optim."
        )
    return {**common, "args": plain_args(checkpoint, common["args"])}


def plain_args(checkpoint: StoredCheckpoint, args: StoredObject) -> argparse.Namespace:
    """Return arguments without values of Megatron's own classes, and without the format."""
    plain = {
        key: value for key, value in vars(args or argparse.Namespace()).items() if _is_plain(value)
    }
    if missing := sorted(_READ_ARGS - plain.keys()):
        raise CheckpointError(
            f"{checkpoint.folder}: expected the arguments {', '.join(missing)}, got none. "
            "Save it by Megatron-LM 0.19."
        )
    # The second one is of the class that stands in for Namespace.
    for key in ("ckpt_format", "arguments"):
        plain.pop(key, None)
    return argparse.Namespace(**plain)


def _is_plain(value: object) -> bool:
    """Return whether a value needs no class of Megatron's."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    return type(value) in _PLAIN


def _by_parameter(checkpoint: StoredCheckpoint) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the keys of weights, and of states by kind, by the stored name of the parameter."""
    states: dict[str, dict[str, str]] = defaultdict(dict)
    weights, problems = {}, []
    for key in checkpoint.tensors:
        if match := _STATE.match(key):
            states[match[2]][match[1]] = key
        elif key.startswith(("optimizer.", "chained_")):
            problems.append(
                f"{key}: expected optimizer.state.<name>.<parameter>, got a state that is not "
                "known. Save with --optimizer muon, without a distributed optimizer for Adam."
            )
        else:
            weights[key] = key
    if not any(kinds.keys() >= MUON for kinds in states.values()):
        problems.append(f"{checkpoint.folder}: expected momentum of Muon, got none.")
    refuse_other_states(weights, states, problems)
    return weights, states


def refuse_other_states(
    weights: Mapping[str, str], states: Mapping[str, Mapping[str, str]], problems: list[str]
) -> None:
    """Raise if there are problems, or parameters without state of Muon or Adam."""
    for name in weights.keys() | states.keys():
        kinds = states.get(name, {}).keys() - {MASTER, STEP}
        is_buffer = name.endswith(_BUFFERS) and not kinds
        if name not in weights or not (is_buffer or kinds in (MUON, ADAM)):
            problems.append(
                f"{name}: expected a weight with momentum_buffer of Muon, or "
                f"{', '.join(sorted(ADAM))} of Adam, got "
                f"{', '.join(sorted(kinds)) or 'none of them'}. Only --optimizer muon is converted."
            )
    if problems:
        raise CheckpointError(*sorted(problems), "Nothing was written.")


def _parts(
    name: str, shape: Sequence[int], args: argparse.Namespace, *, has_halves: bool = True
) -> Iterator[Part]:
    """Yield the parameters of Megatron-FSDP that a stored tensor holds."""
    name = _LAYERS.sub(rf"\1{_INDEX}.", name)
    if args.moe_grouped_gemm and _EXPERTS in name:
        name = name.replace(_EXPERTS, ".experts.") + _INDEX
    name = name.replace(_EXPERTS, f".experts.local_experts.{_INDEX}.")
    for fused, own in OWN_NORMS.items() if args.transformer_impl == "local" else ():
        name = name.replace(fused, own)
    is_gated = has_halves and args.swiglu and GATED.search(name.replace(_INDEX, "0"))
    for index in itertools.product(*map(range, shape[: name.count(_INDEX)])):
        own = name
        for position in index:
            own = own.replace(_INDEX, str(position), 1)
        if is_gated:
            yield from ((f"{own}_w", index, 0), (f"{own}_v", index, 1))
        else:
            yield own, index, None


def _split(
    checkpoint: StoredCheckpoint,
    planner: LazyPlanner,
    key: str,
    parts: Sequence[Part],
    prefix: str,
    suffix: str,
) -> None:
    """Write the values of each parameter that a stored tensor holds, under its own key."""
    stored = checkpoint.tensors[key]
    depth = len(parts[0][1])
    by_index: dict[tuple[int, ...], list[tuple[str, int | None]]] = defaultdict(list)
    for name, index, half in parts:
        by_index[index].append((name, half))
    # The halves of a gated layer are in one chunk.
    read = functools.lru_cache(maxsize=1)(checkpoint.read_chunk)
    for item in stored.chunks:
        stacked = [range(o, o + n) for o, n in zip(item.offsets, item.sizes[:depth], strict=False)]
        for index in itertools.product(*stacked):
            place = tuple(i - o for i, o in zip(index, item.offsets, strict=False))
            for name, half in by_index[index]:
                shape, offsets, sizes = (n[depth:] for n in (stored.shape, *item[-2:]))
                rows: slice | types.EllipsisType = ...
                if half is not None:
                    shape, offsets, sizes, rows = _half(half, shape, offsets, sizes)
                if math.prod(sizes):
                    value = functools.partial(_values, read, item, (*place, rows))
                    target = f"{prefix}{name}{suffix}"
                    planner.add_chunk(target, shape, (offsets, sizes), torch.float32, value)


def _half(
    half: int, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], slice]:
    """Return shape, position and size of a half in a chunk of a gated layer, and its rows in it."""
    num_rows, first = shape[0] // 2, offsets[0]
    start, stop = (min(max(first, n * num_rows), first + sizes[0]) for n in (half, half + 1))
    return (
        (num_rows, *shape[1:]),
        (start - half * num_rows, *offsets[1:]),
        (stop - start, *sizes[1:]),
        slice(start - first, stop - first),
    )


def _values(
    read: Callable[[Item], torch.Tensor], item: Item, place: tuple[Any, ...]
) -> torch.Tensor:
    return read(item)[place].float()


def _steps(
    checkpoint: StoredCheckpoint, common: Mapping[str, Any]
) -> tuple[list[float], list[float]]:
    """Return how often Adam has stepped, by groups and by parameters: one of the two is empty."""
    optimizer = common["optimizer"]
    groups = itertools.chain(*_nested(optimizer, "param_groups"))
    in_groups = {float(group[STEP]) for group in groups if STEP in group}
    in_state = {_scalar(counter) for counter in _nested(optimizer, "common_step")}
    if len(in_groups) + len(in_state) != 1:
        raise CheckpointError(
            f"{checkpoint.folder}: expected one step count of Adam for all parameters, got "
            f"{sorted(in_groups | in_state) or 'none'}. Save all parameters by one run of "
            "--optimizer muon."
        )
    return [*in_groups], [*in_state]


def _nested(values: object, name: str) -> Iterator[Any]:
    """Yield the values of a name in the state of an optimizer, or of several that are chained."""
    if isinstance(values, Mapping):
        if name in values:
            yield values[name]
        for inner in values.values():
            yield from _nested(inner, name)


def _scalar(value: StoredObject) -> float:
    """Return the value of a float32 scalar, which has been unpickled without torch."""
    if isinstance(value, int | float):
        return float(value)
    with expecting("common_step as a float32 tensor of Megatron-LM 0.19", COMMON):
        storage, offset = value.arguments[:2]
        return float(struct.unpack_from("<f", storage, 4 * offset)[0])
