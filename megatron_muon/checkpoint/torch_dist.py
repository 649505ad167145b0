# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Turn a checkpoint of Muon under DDP or the layer-wise optimizer into one of Megatron-FSDP.

============================================================  ====================================
``torch_dist``                                                ``fsdp_dtensor``
============================================================  ====================================
a tensor of all layers, ``decoder.layers.mlp...``             one of each, ``decoder.layers.0.mlp``
one of all experts, ``mlp.experts.experts.linear_fc1...``     one of each
gate and up in one ``linear_fc1.weight``                      ``weight_w`` and ``weight_v``
``self_attention.linear_qkv.layer_norm_weight``               ``input_layernorm.weight``, if norms
                                                              are modules of their own
weights of 16 bits and ``optimizer.state.fp32_param``         fp32 ``model``
settings by group, ``common_state``                           by parameter
============================================================  ====================================

Source: ``megatron/core/dist_checkpointing`` and ``megatron/core/transformer/
fsdp_dtensor_checkpoint.py`` of NVIDIA/Megatron-LM 0.19.2, and checkpoints that both have written.
"""

import argparse
import io
import itertools
import re
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_muon.checkpoint.folders import (
    TRACKER,
    CheckpointError,
    expecting,
    iteration_folder,
)
from megatron_muon.checkpoint.storage import (
    StoredCheckpoint,
    StoredObject,
    StoredTensor,
    load_chunk,
)
from megatron_muon.checkpoint.writing import CheckpointWriter

COMMON = "common_state/shard_0_1"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>[^.]+)\.(?P<name>.+)$")
MASTER = "fp32_param"
MUON, ADAM = {"momentum_buffer"}, {"exp_avg", "exp_avg_sq"}
_LAYERS = re.compile(r"((?:.*\.)?layers\.)([^\d.].*)$")
_EXPERTS = ".experts.experts."
GATED = re.compile(
    r"\.mlp\.(?:shared_experts\.|experts\.(?:local_experts\.\d+\.)?)?linear_fc1\.(?:weight|bias)\d*$"
)
# What Transformer Engine fuses into a linear layer, and plain modules do not.
OWN_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
# Buffers, which no optimizer steps.
BUFFERS = ("expert_bias", "local_tokens_per_expert")
READ_ARGS = {"bf16", "fp16", "swiglu", "transformer_impl", "moe_grouped_gemm"}
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


@dataclass(frozen=True)
class _Part:
    """A parameter of Megatron-FSDP, and the box of a stored tensor that is its values."""

    name: str
    index: tuple[int, ...]  # of layer and expert
    rows: range | None  # of a half; None for all

    def shape(self, stored: StoredTensor) -> tuple[int, ...]:
        """Return the shape of the parameter."""
        rest = stored.shape[len(self.index) :]
        return rest if self.rows is None else (len(self.rows), *rest[1:])


def to_fsdp_dtensor(checkpoint: StoredCheckpoint, folder: Path) -> str:
    """Write a checkpoint for ``--use-megatron-fsdp``, without random states.

    Args:
        checkpoint: One of the format ``torch_dist``.
        folder: A ``--save`` folder to make.

    Returns:
        A line that says what was converted.

    Raises:
        CheckpointError: A tensor or setting is missing or unknown.

    Memory: the largest chunk, three times.
    """
    common = _common(checkpoint)
    args = common["args"]
    weights, states = _by_parameter(checkpoint)
    groups = list(itertools.chain(*_values(common["optimizer"], "param_groups")))
    step = _step(checkpoint, common, groups)
    prefix = "module." * (3 if args.bf16 or args.fp16 else 2)
    is_release = checkpoint.folder.name == "release"
    iteration = int(common["iteration"])
    inner = folder / "release" if is_release else iteration_folder(folder, iteration)
    inner.mkdir(parents=True)
    writer = CheckpointWriter(inner)
    num_momentum = 0
    for name, key in weights.items():
        shape = checkpoint.tensors[key].shape
        _split(checkpoint, writer, states[name].get(MASTER, key), "model.module.{}", args)
        kinds = states[name].keys() - {MASTER}
        num_momentum += bool(kinds & MUON)
        for kind in kinds:
            target = f"optimizer.state.{prefix}{{}}.{kind}"
            _split(checkpoint, writer, states[name][kind], target, args)
        if not kinds:
            continue
        for part in _parts(name, shape, args):
            if kinds == ADAM:
                counter = torch.tensor(step, dtype=torch.float32)
                writer.add_chunk(f"optimizer.state.{prefix}{part.name}.step", (), (), counter)
        for part in _parts(name, shape, args, has_halves=False):
            is_vector = len(shape) - len(part.index) == 1
            for setting, value in _settings(groups, part.name, kinds == MUON, is_vector).items():
                key = f"optimizer.param_to_group_meta.{prefix}{part.name}.{setting}"
                writer.add_object(key, value)
    for key, value in _objects(common).items():
        writer.add_object(key, value)
    writer.finish()
    (folder / TRACKER).write_text("release" if is_release else str(iteration))
    return (
        f"iteration {iteration}: {len(weights)} stored weights, {num_momentum} of them with "
        "momentum; load it with --no-load-rng, as random states are left out"
    )


def _common(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    found = checkpoint.read_object(COMMON)
    common = found[0] if isinstance(found, list) and found else {}
    missing = [name for name in ("args", "iteration", "optimizer") if name not in common]
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder}: expected {', '.join(missing)} in {COMMON}, got "
            f"{sorted(common) or 'nothing'}. Save weights and optimizer by Megatron-LM 0.19, "
            "without --no-save-optim."
        )
    args = plain_args(checkpoint, common["args"])
    args.pop("arguments", None)
    return {**common, "args": argparse.Namespace(**args)}


def plain_args(checkpoint: StoredCheckpoint, args: StoredObject) -> dict[str, Any]:
    """Return arguments without values of Megatron's own classes, which only a run imports."""
    plain = {
        key: value for key, value in vars(args or argparse.Namespace()).items() if is_plain(value)
    }
    if missing := sorted(READ_ARGS - plain.keys()):
        raise CheckpointError(
            f"{checkpoint.folder}: expected the arguments {', '.join(missing)}, got none. "
            "Save it by Megatron-LM 0.19."
        )
    return plain


def _by_parameter(checkpoint: StoredCheckpoint) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the keys of weights, and of states by kind, by the stored name of the parameter."""
    states: dict[str, dict[str, str]] = defaultdict(dict)
    weights, problems = {}, []
    for key in checkpoint.tensors:
        if match := _STATE.match(key):
            states[match["name"]][match["kind"]] = key
        elif key.startswith(("optimizer.", "chained_")):
            problems.append(
                f"{key}: expected optimizer.state.<name>.<parameter>, got a state that is not "
                "known. Save with --optimizer muon, without a distributed optimizer for Adam."
            )
        else:
            weights[key] = key
    if not any(kinds.keys() >= MUON for kinds in states.values()):
        problems.append(f"{checkpoint.folder}: expected momentum of Muon, got none.")
    refuse_other_states(weights, states, ADAM, problems)
    return weights, states


def refuse_other_states(
    weights: Mapping[str, str],
    states: Mapping[str, Mapping[str, str]],
    adam: set[str],
    problems: list[str],
) -> None:
    """Raise if there are problems, or parameters without state of Muon or Adam."""
    for name in weights.keys() | states.keys():
        kinds = states[name].keys() - {MASTER}
        is_buffer = name.endswith(BUFFERS) and not kinds
        if name not in weights or not (is_buffer or kinds in (MUON, adam)):
            problems.append(
                f"{name}: expected a weight with momentum_buffer of Muon, or "
                f"{', '.join(sorted(adam))} of Adam, got "
                f"{', '.join(sorted(kinds)) or 'none of them'}. Only --optimizer muon is converted."
            )
    if problems:
        raise CheckpointError(*sorted(problems), "Nothing was written.")


def _parts(
    name: str, shape: Sequence[int], args: argparse.Namespace, *, has_halves: bool = True
) -> Iterator[_Part]:
    """Yield the parameters of Megatron-FSDP that a stored tensor holds."""
    named: list[tuple[str, tuple[int, ...]]] = [(name, ())]
    if match := _LAYERS.match(name):
        named = [(f"{match[1]}{layer}.{match[2]}", (layer,)) for layer in range(shape[0])]
    if _EXPERTS in name:
        axis = len(named[0][1])
        named = [
            (_expert_name(each, expert, bool(args.moe_grouped_gemm)), (*index, expert))
            for each, index in named
            for expert in range(shape[axis])
        ]
    for each, index in named:
        own = each
        if args.transformer_impl == "local":
            for fused, plain in OWN_NORMS.items():
                own = own.replace(fused, plain)
        if has_halves and args.swiglu and GATED.search(own):
            half = shape[len(index)] // 2
            yield _Part(f"{own}_w", index, range(half))
            yield _Part(f"{own}_v", index, range(half, 2 * half))
        else:
            yield _Part(own, index, None)


def _expert_name(name: str, expert: int, is_grouped: bool) -> str:
    if is_grouped:
        return name.replace(_EXPERTS, ".experts.") + str(expert)
    return name.replace(_EXPERTS, f".experts.local_experts.{expert}.")


def _split(
    checkpoint: StoredCheckpoint,
    writer: CheckpointWriter,
    key: str,
    target: str,
    args: argparse.Namespace,
) -> None:
    """Write what a stored tensor holds of each parameter; the braces of ``target`` are its name."""
    stored = checkpoint.tensors[key]
    match = _STATE.match(key)
    parts = list(_parts(match["name"] if match else key, stored.shape, args))
    for item in stored.chunks:
        chunk = load_chunk(checkpoint, item).to(torch.float32)
        for part in parts:
            depth = len(part.index)
            first = tuple(i - o for i, o in zip(part.index, item.offsets, strict=False))
            if any(not 0 <= f < n for f, n in zip(first, chunk.shape, strict=False)):
                continue
            own, begin = chunk[first], item.offsets[depth:]
            if part.rows is not None:
                start = max(part.rows.start, begin[0])
                stop = min(part.rows.stop, begin[0] + own.shape[0])
                if stop <= start:
                    continue
                own = own[start - begin[0] : stop - begin[0]]
                begin = (start - part.rows.start, *begin[1:])
            writer.add_chunk(target.format(part.name), part.shape(stored), begin, own)


def _values(nested: object, name: str) -> Iterator[Any]:
    """Yield the values of a name in the state of an optimizer, or of several that are chained."""
    if isinstance(nested, Mapping):
        if name in nested:
            yield nested[name]
        for each in nested.values():
            yield from _values(each, name)


def _settings(
    groups: Sequence[Mapping[str, Any]], name: str, is_muon: bool, is_vector: bool
) -> dict[str, Any]:
    """Return the settings of the group that a parameter is most likely in.

    Groups are stored without names. What a load takes from them, learning rate and weight decay,
    the schedule computes again from the multipliers of the run's own groups.
    """
    own = [group for group in groups if is_muon == ("betas" not in group)]
    if not own:
        raise CheckpointError(f"{name}: expected a group of its optimizer, got none.")
    is_expert = ".experts." in name
    is_end = "embedding" in name or "output_layer" in name

    def unlikely(group: Mapping[str, Any]) -> int:
        """Count what does not fit the parameter."""
        has_decay = group.get("wd_mult", 1.0) != 0.0
        return (
            2 * (bool(group.get("is_expert_parallel")) != is_expert)
            + (bool(group.get("is_decoupled_lr")) != is_end)
            + 2 * (has_decay == (is_vector or name.endswith("bias")))
        )

    chosen = min(own, key=unlikely)
    return {key: value for key, value in chosen.items() if key != "params" and is_plain(value)}


def is_plain(value: object) -> bool:
    """Return whether a value needs no class of Megatron's."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(is_plain(k) and is_plain(v) for k, v in value.items())
    return type(value) in _PLAIN


def _objects(common: Mapping[str, Any]) -> dict[str, Any]:
    args = argparse.Namespace(**{**vars(common["args"]), "ckpt_format": "fsdp_dtensor"})
    objects: dict[str, Any] = {"args": args}
    for key in ("checkpoint_version", "iteration", "num_floating_point_operations_so_far"):
        objects[key] = common.get(key, 0)
    for key, value in common.get("opt_param_scheduler", {}).items():
        objects[f"opt_param_scheduler.{key}"] = value
    return objects


def _step(
    checkpoint: StoredCheckpoint, common: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> float:
    """Return how often Adam has stepped."""
    found = {float(group["step"]) for group in groups if "step" in group}
    for counter in _values(common["optimizer"], "common_step"):
        found.add(_scalar(checkpoint, counter))
    if len(found) != 1:
        raise CheckpointError(
            f"{checkpoint.folder}: expected one step count of Adam for all parameters, got "
            f"{sorted(found) or 'none'}. Save all parameters by one run of --optimizer muon."
        )
    return found.pop()


def _scalar(checkpoint: StoredCheckpoint, value: StoredObject) -> float:
    """Return the value of a float32 scalar, whose bytes unpickling has left out."""
    if isinstance(value, int | float):
        return float(value)
    with expecting("common_step as a float32 tensor of Megatron-LM 0.19", COMMON):
        storage, offset = value.arguments[:2]
        _, kind, record, _, _ = storage.arguments[0]
        data = checkpoint.read_item(checkpoint.objects[COMMON])
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            name = next(n for n in archive.namelist() if n.endswith(f"/data/{record}"))
            assert kind.__name__ == "FloatStorage"
            return float(struct.unpack_from("<f", archive.read(name), 4 * offset)[0])
