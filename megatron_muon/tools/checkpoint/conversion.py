# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Convert checkpoints of Muon between DDP, or the layer-wise optimizer, and Megatron-FSDP.

=====================================================  ===========================================
``torch_dist``                                         ``fsdp_dtensor``
=====================================================  ===========================================
tensors of all layers and experts                      a tensor per parameter (``names.py``)
weights of 16 bits and ``optimizer.state.fp32_param``  fp32 ``model``
settings by group, ``common_state``                    settings by parameter, which DDP takes from
                                                       the loading run instead
=====================================================  ===========================================

Values are read and converted while they are written: a parameter of one layer at a time.

Source: ``megatron/core/dist_checkpointing``, ``megatron/core/optimizer`` and ``megatron/core/
transformer/fsdp_dtensor_checkpoint.py`` of NVIDIA/Megatron-LM 0.19.2, and checkpoints that they
have written.
"""

import argparse
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_muon.mcore.checkpoint_folders import CheckpointError
from megatron_muon.mcore.checkpoint_reading import StoredCheckpoint
from megatron_muon.tools.checkpoint.names import HALVES, parts_of, place_of, whole_box
from megatron_muon.tools.checkpoint.reading import Inert, read_object
from megatron_muon.tools.checkpoint.writing import LazyTensor, read

_COMMON = "common_state/shard_0_1"
_COUNTERS = ("checkpoint_version", "iteration", "num_floating_point_operations_so_far")
_WEIGHT, _MASTER, _STEP = "weight", "fp32_param", "step"
_MUON, _ADAM = {"momentum_buffer"}, {"exp_avg", "exp_avg_sq"}
# States, and weights, by format.
_DDP = (
    re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>[^.]+)\.(?P<name>.+)$"),
    re.compile(r"(?P<name>(?!optimizer\.|chained_).+)$"),
)
_FSDP = (
    re.compile(r"optimizer\.state\.(?:module\.)+(?P<name>.+)\.(?P<kind>[^.]+)$"),
    re.compile(r"model\.(?:module\.)+(?P<name>(?!mtp\.).+)$"),
)
_FSDP_SETTING = re.compile(r"optimizer\.param_to_group_meta\.(?:module\.)+(.+)\.[^.]+$")
# Linear layers of Megatron's modules; they save nothing beside their weights.
_WITHOUT_STATE = re.compile(r"(.*\.linear_[^.]+)\.weight$")
# Buffers: no optimizer steps them.
_BUFFERS = ("expert_bias", "local_tokens_per_expert")
_READ_ARGS = {
    *("bf16", "fp16", "swiglu", "transformer_impl", "moe_grouped_gemm", "num_layers", "num_experts")
}


def from_ddp(checkpoint: StoredCheckpoint) -> tuple[dict[str, Any], int]:
    """Plan a checkpoint for ``--use-megatron-fsdp``, without random states and group settings.

    Args:
        checkpoint: Checkpoint of the format ``torch_dist``.

    Returns:
        Tensors and objects by key, and the iteration.

    Raises:
        CheckpointError: A tensor or setting is missing or unknown.
    """
    common, args = _common_of_ddp(checkpoint)
    parameters = _by_parameter(checkpoint, _DDP)
    num_steps, is_by_group = _adam_steps(checkpoint, common)
    prefix = "optimizer.{}.module.module." + "module." * (args.bf16 or args.fp16)
    state, setting = prefix.format("state"), prefix.format("param_to_group_meta")
    values: dict[str, Any] = {}
    for name, keys in parameters.items():
        weight = keys.pop(_WEIGHT)
        for own_name, shape in parts_of(name, checkpoint.tensors[weight].size, args):
            _, box, _ = place_of(own_name, shape, args)
            for kind, source in ({_MASTER: weight} | keys).items():
                target = f"{state}{own_name}.{kind}"
                if kind == _MASTER:
                    target = f"model.module.{own_name}"
                tensor = values[target] = LazyTensor(shape, torch.float32)
                tensor.add(whole_box(shape), checkpoint, source, box)
            # Torch's Adam counts steps by parameter, Transformer Engine's by parameter group, and
            # group settings are not split.
            if keys.keys() >= _ADAM and is_by_group:
                for half in HALVES:
                    own_name = own_name.removesuffix(half)
                values[f"{setting}{own_name}.{_STEP}"] = num_steps
            elif keys.keys() >= _ADAM:
                values[f"{state}{own_name}.{_STEP}"] = torch.tensor(num_steps)
    values["args"] = argparse.Namespace(**vars(args), ckpt_format="fsdp_dtensor")
    values |= {key: common.get(key, 0) for key in _COUNTERS}
    schedule = common.get("opt_param_scheduler", {})
    values |= {f"opt_param_scheduler.{key}": value for key, value in schedule.items()}
    return values, int(common["iteration"])


def to_ddp(checkpoint: StoredCheckpoint) -> tuple[dict[str, Any], int]:
    """Plan a checkpoint for ``--optimizer muon`` under DDP, without random states.

    Args:
        checkpoint: Checkpoint of Megatron-FSDP, of the format ``fsdp_dtensor``.

    Returns:
        Tensors and objects by key, and the iteration.

    Raises:
        CheckpointError: A tensor or setting is missing or unknown.
    """
    args = _plain_args(checkpoint, read_object(checkpoint, "args"))
    if args.fp16:
        raise CheckpointError(
            f"{checkpoint.folder}: expected args of a run in fp32 or bf16, got fp16."
        )
    parameters = _by_parameter(checkpoint, _FSDP)
    counters = {keys.pop(_STEP) for keys in parameters.values() if _STEP in keys}
    common = _common_for_ddp(checkpoint, counters, args)
    values: dict[str, Any] = {_COMMON: [common]}
    for name, keys in parameters.items():
        key = keys.pop(_WEIGHT)
        weight = checkpoint.tensors[key]
        stacked, box, shape = place_of(name, weight.size, args)
        # Buffers keep their type.
        dtype = weight.properties.dtype
        if args.bf16 and keys:
            keys[_MASTER], dtype = key, torch.bfloat16
        states = {f"optimizer.state.{kind}.{stacked}": keys[kind] for kind in keys}
        for target, source in {stacked: key, **states}.items():
            tensor = LazyTensor(shape, dtype if target == stacked else torch.float32)
            tensor = values.setdefault(target, tensor)
            tensor.add(box, checkpoint, source, whole_box(weight.size))
        if args.transformer_impl == "local" and (match := _WITHOUT_STATE.match(stacked)):
            # By layer and expert.
            num_axes = len(shape) - len(weight.size)
            shard, num_shards = (
                ".".join(map(str, numbers[:num_axes] or (default,)))
                for numbers, default in ((box[0], 0), (shape, 1))
            )
            values[f"{match[1]}._extra_state/shard_{shard}_{num_shards}"] = [None]
    return values, int(common["iteration"])


def _by_parameter(
    checkpoint: StoredCheckpoint, patterns: Sequence[re.Pattern[str]]
) -> dict[str, dict[str, str]]:
    """Return the keys of weight and states by kind, by the stored name of the parameter.

    Raises:
        CheckpointError: A tensor is unknown, or a parameter has no state of Muon or Adam.
    """
    parameters: dict[str, dict[str, str]] = defaultdict(dict)
    problems = []
    for key in checkpoint.tensors:
        match = next(filter(None, (pattern.match(key) for pattern in patterns)), None)
        if match is not None:
            parameters[match["name"]][match.groupdict().get("kind", _WEIGHT)] = key
        elif not key.startswith("rng_state."):
            problems.append(
                f"{key}: expected a weight, but not of multi-token prediction, or a state of a "
                "parameter, got neither. Save with --optimizer muon, without a distributed "
                "optimizer for Adam."
            )
    has_muon = False
    for name, keys in parameters.items():
        kinds = keys.keys() - {_WEIGHT, _MASTER, _STEP}
        has_muon |= kinds == _MUON
        is_buffer = name.endswith(_BUFFERS) and not kinds
        shapes = {checkpoint.tensors[key].size for kind, key in keys.items() if kind != _STEP}
        if _WEIGHT not in keys or not (is_buffer or kinds in (_MUON, _ADAM)) or len(shapes) > 1:
            problems.append(
                f"{name}: expected a weight with momentum_buffer of Muon, or "
                f"{', '.join(sorted(_ADAM))} of Adam, of one shape, got "
                f"{', '.join(sorted(kinds)) or 'none of them'} and {sorted(map(tuple, shapes))}. "
                "Only --optimizer muon is converted."
            )
    if not has_muon:
        problems.append(f"{checkpoint.folder}: expected momentum of Muon, got none.")
    if problems:
        raise CheckpointError(*sorted(problems), "Nothing was written.")
    return parameters


def _plain_args(checkpoint: StoredCheckpoint, args: object) -> argparse.Namespace:
    """Return arguments without instances of Megatron's classes, and without the format."""
    # In the pickle of every stand-in.
    stand_in = Inert.__module__.encode()
    plain = {
        key: value
        for key, value in vars(args or argparse.Namespace()).items()
        if key != "ckpt_format" and stand_in not in pickle.dumps(value)
    }
    if missing := sorted(_READ_ARGS - plain.keys()):
        raise CheckpointError(
            f"{checkpoint.folder}: expected the arguments {', '.join(missing)}, got none. "
            "Save it by Megatron-LM 0.19."
        )
    return argparse.Namespace(**plain)


def _common_of_ddp(checkpoint: StoredCheckpoint) -> tuple[dict[str, Any], argparse.Namespace]:
    """Return the values that all ranks of DDP share, and their arguments."""
    (common,) = read_object(checkpoint, _COMMON) or [{}]
    missing = [name for name in ("args", "iteration", "optimizer") if name not in common]
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder}: expected {', '.join(missing)} in {_COMMON}, got "
            f"{sorted(common) or 'nothing'}. Save weights and optimizer by Megatron-LM 0.19, "
            "without --no-save-optim."
        )
    return common, _plain_args(checkpoint, common["args"])


def _adam_steps(checkpoint: StoredCheckpoint, common: Mapping[str, Any]) -> tuple[float, bool]:
    """Return how often Adam has stepped, and whether groups count it, or parameters."""
    in_groups, in_state = (
        set(map(float, _nested(common["optimizer"], name))) for name in (_STEP, "common_step")
    )
    counts = [*in_groups, *in_state]
    if len(counts) != 1:
        raise CheckpointError(
            f"{checkpoint.folder}: expected one step count of Adam for all parameters, got "
            f"{sorted(counts) or 'none'}. Save all parameters by one run of --optimizer muon."
        )
    return counts[0], bool(in_groups)


def _nested(values: object, name: str) -> Iterator[Any]:
    """Yield the values of a name in dictionaries and lists, at any depth."""
    if isinstance(values, Mapping):
        if name in values:
            yield values[name]
        values = [*values.values()]
    for inner in values if isinstance(values, list) else ():
        yield from _nested(inner, name)


def _common_for_ddp(
    checkpoint: StoredCheckpoint, counters: Iterable[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Return the common values of a DDP checkpoint, settings of parameter groups included."""
    settings: dict[str, dict[str, Any]] = defaultdict(dict)
    objects: dict[str, dict[str, Any]] = defaultdict(dict)
    for key in checkpoint.objects:
        part, _, name = key.rpartition(".")
        if match := _FSDP_SETTING.match(key):
            settings[match[1]][name] = read_object(checkpoint, key)
        elif key in _COUNTERS or part == "opt_param_scheduler":
            objects[part][name] = read_object(checkpoint, key)
    # Upstream chains an optimizer per kind, in this order, and finds groups by their settings.
    groups = {repr(sorted(group.items(), key=str)): group for group in settings.values()}
    chained: dict[tuple[bool, bool], list[dict[str, Any]]] = defaultdict(list)
    for group in groups.values():
        chained["betas" in group, bool(group.get("is_expert_parallel"))].append(group)
    # Transformer Engine's Adam counts steps in its groups.
    counts = {float(read(checkpoint, key, whole_box(()))) for key in counters}
    if len(counts) > 1 or all(is_adam for is_adam, _ in chained):
        raise CheckpointError(
            f"{checkpoint.folder}: expected settings of Muon, and one step count of Adam, got "
            f"groups of {len(chained)} optimizers and counts {sorted(counts)}. Save all "
            "parameters by one run of --optimizer muon."
        )
    optimizers: list[Any] = []
    for kind in sorted(chained):
        state: dict[str, Any] = {"param_groups": chained[kind]}
        if kind[0] and counts:
            state["state"] = {"common_step": torch.tensor(max(counts))}
        optimizers.append({"optimizer": state} if args.bf16 else state)
    fsdp_flags = ("use_megatron_fsdp", "use_distributed_optimizer")
    ddp_args = {**vars(args), **dict.fromkeys(fsdp_flags, False), "ckpt_format": "torch_dist"}
    return {
        "args": argparse.Namespace(**ddp_args),
        **objects[""],
        "optimizer": dict(enumerate(optimizers)) if len(optimizers) > 1 else optimizers[0],
        "opt_param_scheduler": objects["opt_param_scheduler"],
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
