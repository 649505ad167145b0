# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Convert checkpoints of Muon between DDP, or the layer-wise optimizer, and Megatron-FSDP.

============================================================  ====================================
``torch_dist``                                                ``fsdp_dtensor``
============================================================  ====================================
a tensor of all layers, ``decoder.layers.mlp...``             one a layer, ``decoder.layers.0.mlp``
one of all experts, ``mlp.experts.experts.linear_fc1...``     one per expert
gate and up in one ``linear_fc1.weight``                      ``weight_w`` and ``weight_v``
``self_attention.linear_qkv.layer_norm_weight``               ``input_layernorm.weight``, if norms
                                                              are separate modules
weights of 16 bits and ``optimizer.state.fp32_param``         fp32 ``model``
settings by group, ``common_state``                           settings by parameter, which DDP takes
                                                              from the loading run instead
============================================================  ====================================

Values are read and converted while they are written: a parameter of one layer at a time.

Source: ``megatron/core/dist_checkpointing``, ``megatron/core/optimizer`` and ``megatron/core/
transformer/fsdp_dtensor_checkpoint.py`` of NVIDIA/Megatron-LM 0.19.2, and checkpoints that they
have written.
"""

import argparse
import functools
import itertools
import re
import struct
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron_muon.checkpoint.reading import (
    Box,
    CheckpointError,
    StoredCheckpoint,
    StoredObject,
    expecting,
    is_tiled,
)

_COMMON = "common_state/shard_0_1"
_COUNTERS = ("checkpoint_version", "iteration", "num_floating_point_operations_so_far")
_MASTER, _STEP = "fp32_param", "step"
_MUON, _ADAM = {"momentum_buffer"}, {"exp_avg", "exp_avg_sq"}
_DDP_WEIGHT = re.compile(r"(?P<name>(?!optimizer\.|chained_).+)$")
_DDP_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>[^.]+)\.(?P<name>.+)$")
_FSDP_WEIGHT = re.compile(r"model\.(?:module\.)+(?P<name>(?!mtp\.).+)$")
_FSDP_STATE = re.compile(r"optimizer\.state\.(?:module\.)+(?P<name>.+)\.(?P<kind>[^.]+)$")
_FSDP_SETTING = re.compile(r"optimizer\.param_to_group_meta\.(?:module\.)+(.+)\.([^.]+)$")
_DDP_LAYERS = re.compile(r"((?:.*\.)?layers\.)(?=[^\d.])")
_FSDP_LAYER = re.compile(r"((?:.*\.)?layers\.)(\d+)\.(.+)$")
_DDP_EXPERTS = ".experts.experts."
_FSDP_EXPERT = re.compile(r"(.*\.experts)\.(?:local_experts\.(\d+)\.)?(.+?)(\d*)$")
_GATED = re.compile(
    r"\.mlp\.(?:shared_experts\.|experts\.(?:local_experts\.\d+\.)?)?linear_fc1\.(?:weight|bias)\d*$"
)
# Norms that Transformer Engine fuses into a linear layer, and other modules do not.
_SEPARATE_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
# Linear layers of Megatron's modules; they save nothing beside their weights.
_WITHOUT_STATE = re.compile(r"(.*\.linear_[^.]+)\.weight$")
# Buffers: no optimizer steps them.
_BUFFERS = ("expert_bias", "local_tokens_per_expert")
_READ_ARGS = {
    *("bf16", "fp16", "swiglu", "transformer_impl", "moe_grouped_gemm", "num_layers", "num_experts")
}
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_INDEX = "\0"  # stands for an index in a name


class Conversion(dcp.DefaultSavePlanner):
    """Plan of a checkpoint; values are read and converted while they are written.

    Args:
        source: Checkpoint to convert.
    """

    def __init__(self, source: StoredCheckpoint) -> None:
        super().__init__(flatten_state_dict=False)
        self.source = source
        # The halves of a gated layer may be in one chunk.
        self._read_chunk = functools.lru_cache(maxsize=1)(source.read_chunk)
        self._items: list[WriteItem] = []
        self._values: dict[MetadataIndex, Callable[[], Any]] = {}

    def copy(
        self,
        source: str,
        source_box: Box,
        target: str,
        shape: tuple[int, ...],
        box: Box,
        dtype: torch.dtype,
    ) -> None:
        """Add a chunk of a tensor, with the elements of a box of the source.

        Args:
            source: Key of a tensor of the source.
            source_box: Box of that tensor; its shape may differ from the chunk's by axes of one.
            target: Key of the new tensor.
            shape: Shape of the whole new tensor.
            box: Position of the chunk in it, and shape of the chunk.
            dtype: Data type of the new tensor.
        """
        self.add_chunk(
            target, shape, box, dtype, lambda: self._read(source, *source_box).view(box[1])
        )

    def add_chunk(
        self,
        key: str,
        shape: tuple[int, ...],
        box: Box,
        dtype: torch.dtype,
        value: Callable[[], torch.Tensor],
    ) -> None:
        """Add a chunk of a tensor, with the elements that a function returns."""
        data = TensorWriteData(
            ChunkStorageMetadata(*map(torch.Size, box)), TensorProperties(dtype), torch.Size(shape)
        )
        item = WriteItem(MetadataIndex(key, box[0]), WriteItemType.SHARD, tensor_data=data)
        self._add(item, lambda: value().to(dtype))

    def add_object(self, key: str, value: Any) -> None:  # noqa: ANN401 - any object is pickled
        """Add a value that is pickled."""
        self._add(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO), lambda: value)

    def _add(self, item: WriteItem, value: Callable[[], Any]) -> None:
        self._items.append(item)
        self._values[item.index] = value

    def _read(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """Read a box of a tensor of the source from all chunks that it overlaps."""
        stored = self.source.tensors[key]
        if any(o + n > m for o, n, m in zip(offsets, sizes, stored.shape, strict=True)):
            raise CheckpointError(f"{key}: expected the shape of its weight, got {stored.shape}.")
        box = torch.empty(sizes, dtype=stored.dtype)
        for item in stored.chunks:
            sides = [*zip(offsets, sizes, item.offsets, item.sizes, strict=True)]
            overlap = [(max(o, p), min(o + n, p + m)) for o, n, p, m in sides]
            if all(start < stop for start, stop in overlap):
                here, there = (
                    tuple(slice(a - o, b - o) for (a, b), o in zip(overlap, first, strict=True))
                    for first in (offsets, item.offsets)
                )
                box[here] = self._read_chunk(item)[there]
        return box

    def create_local_plan(self) -> SavePlan:
        """Return all added items."""
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Check that chunks fill their tensors: torch does not in one process."""
        with expecting("parameters of one shape in all layers and experts", "the result"):
            plans, metadata = super().create_global_plan(all_plans)
            for key, value in metadata.state_dict_metadata.items():
                if isinstance(value, TensorStorageMetadata):
                    boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in value.chunks]
                    if not is_tiled(tuple(value.size), boxes):
                        raise ValueError(f"others for {key}")
        return plans, metadata

    def lookup_object(self, index: MetadataIndex) -> Any:  # noqa: ANN401 - any object is pickled
        """Compute a value."""
        return self._values[index]()

    def write(self, folder: Path) -> None:
        """Write all added items into a new folder, a file per tensor or chunk.

        Memory: the largest parameter, twice, and the largest chunk of the source.
        """
        try:
            with warnings.catch_warnings():
                # Torch says that there is no process group.
                warnings.simplefilter("ignore")
                # Torch keeps all tensors of a file in memory until the file is complete.
                writer = dcp.FileSystemWriter(folder, single_file_per_rank=False)
                dcp.save({}, storage_writer=writer, planner=self, no_dist=True)
        except CheckpointException as error:
            # Torch wraps the errors of all ranks: here there is one.
            ((cause, _),) = error.failures.values()
            raise cause from None


class _Part(NamedTuple):
    """A parameter of Megatron-FSDP in the tensor of all layers and experts that DDP stores.

    Args:
        name: Name of the parameter under Megatron-FSDP.
        stacked: Name of the tensor under DDP.
        indices: Index by layer and expert.
        half: 0 for the rows of the gate, 1 for the rows of up, None for all.
    """

    name: str
    stacked: str
    indices: tuple[int, ...]
    half: int | None

    def box(self, shape: tuple[int, ...]) -> Box:
        """Return the box of a parameter of this shape in the stacked tensor."""
        rows = ((self.half or 0) * shape[0], *(0 for _ in shape[1:])) if shape else ()
        return (*self.indices, *rows), (*(1 for _ in self.indices), *shape)


def from_ddp(conversion: Conversion) -> dict[str, Any]:
    """Plan a checkpoint for ``--use-megatron-fsdp``, without random states and group settings.

    Args:
        conversion: Conversion of a checkpoint of the format ``torch_dist``.

    Returns:
        Values that all ranks share, ``iteration`` and ``args`` among them.

    Raises:
        CheckpointError: A tensor or setting is missing or unknown.
    """
    checkpoint = conversion.source
    common = _common_of_ddp(checkpoint)
    args = common["args"]
    weights, states = _by_parameter(checkpoint, _DDP_WEIGHT, _DDP_STATE)
    num_steps, is_by_group = _adam_steps(checkpoint, common)
    prefix = "optimizer.{}.module.module." + "module." * (args.bf16 or args.fp16)
    state, setting = prefix.format("state"), prefix.format("param_to_group_meta")
    for name, key in weights.items():
        kinds = states[name]
        shape = checkpoint.tensors[key].shape
        parts = [*_parts(name, shape, args)]
        sources = {"model.module.{}": kinds.pop(_MASTER, key)} | {
            f"{state}{{}}.{kind}": source for kind, source in kinds.items()
        }
        for (target, source), part in itertools.product(sources.items(), parts):
            part_shape = checkpoint.tensors[source].shape[len(part.indices) :]
            if part.half is not None:
                part_shape = (part_shape[0] // 2, *part_shape[1:])
            target_key, whole = target.format(part.name), _whole(part_shape)
            conversion.copy(
                source, part.box(part_shape), target_key, part_shape, whole, torch.float32
            )
        if kinds.keys() != _ADAM:
            continue
        # Torch's Adam counts steps by parameter, Transformer Engine's by parameter group, and group
        # settings are not split.
        for part in _parts(name, shape, args, has_halves=not is_by_group):
            if is_by_group:
                conversion.add_object(f"{setting}{part.name}.{_STEP}", num_steps)
            else:
                key, counter = f"{state}{part.name}.{_STEP}", torch.tensor(num_steps)
                conversion.add_chunk(key, (), _whole(()), torch.float32, counter.clone)
    conversion.add_object("args", argparse.Namespace(**vars(args), ckpt_format="fsdp_dtensor"))
    for key in _COUNTERS:
        conversion.add_object(key, common.get(key, 0))
    for key, value in common.get("opt_param_scheduler", {}).items():
        conversion.add_object(f"opt_param_scheduler.{key}", value)
    return common


def to_ddp(conversion: Conversion) -> dict[str, Any]:
    """Plan a checkpoint for ``--optimizer muon`` under DDP, without random states.

    Args:
        conversion: Conversion of a checkpoint of Megatron-FSDP, of the format ``fsdp_dtensor``.

    Returns:
        Values that all ranks share, ``iteration`` and ``args`` among them.

    Raises:
        CheckpointError: A tensor or setting is missing or unknown.
    """
    checkpoint = conversion.source
    args = _plain_args(checkpoint, checkpoint.read_object("args"))
    if args.fp16:
        raise CheckpointError(
            f"{checkpoint.folder}: expected args of a run in fp32 or bf16, got fp16."
        )
    weights, states = _by_parameter(checkpoint, _FSDP_WEIGHT, _FSDP_STATE)
    common = _common_for_ddp(checkpoint, states, args)
    params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    for name, key in weights.items():
        part, stack = _part(name, args)
        kinds = {kind: source for kind, source in states.get(name, {}).items() if kind != _STEP}
        # Buffers keep their type.
        own_dtype = params_dtype if kinds else checkpoint.tensors[key].dtype
        if args.bf16 and kinds:
            kinds[_MASTER] = key
        targets = [(part.stacked, key, own_dtype)] + [
            (f"optimizer.state.{kind}.{part.stacked}", source, torch.float32)
            for kind, source in kinds.items()
        ]
        for target, source, dtype in targets:
            part_shape = checkpoint.tensors[source].shape
            shape = part_shape if part.half is None else (2 * part_shape[0], *part_shape[1:])
            whole, box = _whole(part_shape), part.box(part_shape)
            conversion.copy(source, whole, target, (*stack, *shape), box, dtype)
        is_local = args.transformer_impl == "local" and part.half != 1
        if is_local and (match := _WITHOUT_STATE.match(part.stacked)):
            shard, num_shards = (
                ".".join(map(str, n)) for n in (part.indices or (0,), stack or (1,))
            )
            conversion.add_object(f"{match[1]}._extra_state/shard_{shard}_{num_shards}", [None])
    conversion.add_object(_COMMON, [common])
    return common


def _whole(shape: tuple[int, ...]) -> Box:
    return (0,) * len(shape), shape


def _parts(
    stacked: str, shape: tuple[int, ...], args: argparse.Namespace, *, has_halves: bool = True
) -> Iterator[_Part]:
    """Yield the parameters of Megatron-FSDP that a tensor of DDP holds."""
    name = _DDP_LAYERS.sub(rf"\1{_INDEX}.", stacked)
    if args.moe_grouped_gemm and _DDP_EXPERTS in name:
        name = name.replace(_DDP_EXPERTS, ".experts.") + _INDEX
    name = name.replace(_DDP_EXPERTS, f".experts.local_experts.{_INDEX}.")
    for fused, separate in _SEPARATE_NORMS.items() if args.transformer_impl == "local" else ():
        name = name.replace(fused, separate)
    is_gated = has_halves and args.swiglu and _GATED.search(name.replace(_INDEX, "0"))
    for indices in itertools.product(*map(range, shape[: name.count(_INDEX)])):
        indexed = name
        for index in indices:
            indexed = indexed.replace(_INDEX, str(index), 1)
        for suffix, half in (("_w", 0), ("_v", 1)) if is_gated else (("", None),):
            yield _Part(indexed + suffix, stacked, indices, half)


def _part(name: str, args: argparse.Namespace) -> tuple[_Part, tuple[int, ...]]:
    """Return the place of a parameter of Megatron-FSDP, and the numbers of layers and experts."""
    indices, stack = list[int](), list[int]()
    stacked, half = name, None
    if name.endswith(("_w", "_v")) and _GATED.search(name[:-2]):
        stacked, half = name[:-2], int(name.endswith("_v"))
    if match := _FSDP_LAYER.match(stacked):
        indices.append(int(match[2]))
        stack.append(args.num_layers)
        stacked = match[3]
        for fused, separate in _SEPARATE_NORMS.items() if args.transformer_impl == "local" else ():
            if stacked.startswith(separate):
                stacked = fused + stacked.removeprefix(separate)
        stacked = match[1] + stacked
    if match := _FSDP_EXPERT.match(stacked):
        indices.append(int(match[2] or match[4]))
        stack.append(args.num_experts)
        stacked = f"{match[1]}.experts.{match[3]}"
    return _Part(name, stacked, tuple(indices), half), tuple(stack)


def _by_parameter(
    checkpoint: StoredCheckpoint, weight: re.Pattern[str], state: re.Pattern[str]
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the keys of weights, and of states by kind, by the stored name of the parameter.

    Raises:
        CheckpointError: A tensor is unknown, or a parameter has no state of Muon or Adam.
    """
    weights: dict[str, str] = {}
    states: dict[str, dict[str, str]] = defaultdict(dict)
    problems = []
    for key in checkpoint.tensors:
        if match := state.match(key):
            states[match["name"]][match["kind"]] = key
        elif match := weight.match(key):
            weights[match["name"]] = key
        elif not key.startswith("rng_state."):
            problems.append(
                f"{key}: expected a weight, but not of multi-token prediction, or a state of a "
                "parameter, got neither. Save with --optimizer muon, without a distributed "
                "optimizer for Adam."
            )
    kinds_of = {name: states[name].keys() - {_MASTER, _STEP} for name in {*weights, *states}}
    if _MUON not in kinds_of.values():
        problems.append(f"{checkpoint.folder}: expected momentum of Muon, got none.")
    for name, kinds in kinds_of.items():
        is_buffer = name.endswith(_BUFFERS) and not kinds
        if name not in weights or not (is_buffer or kinds in (_MUON, _ADAM)):
            problems.append(
                f"{name}: expected a weight with momentum_buffer of Muon, or "
                f"{', '.join(sorted(_ADAM))} of Adam, got "
                f"{', '.join(sorted(kinds)) or 'none of them'}. Only --optimizer muon is converted."
            )
    if problems:
        raise CheckpointError(*sorted(problems), "Nothing was written.")
    return weights, states


def _plain_args(checkpoint: StoredCheckpoint, args: StoredObject) -> argparse.Namespace:
    """Return arguments without instances of Megatron's classes, and without the format."""
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


def _common_of_ddp(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    """Return the values that all ranks of DDP share."""
    stored = checkpoint.read_object(_COMMON)
    common = stored[0] if isinstance(stored, list) and stored else {}
    missing = [name for name in ("args", "iteration", "optimizer") if name not in common]
    if missing:
        raise CheckpointError(
            f"{checkpoint.folder}: expected {', '.join(missing)} in {_COMMON}, got "
            f"{sorted(common) or 'nothing'}. Save weights and optimizer by Megatron-LM 0.19, "
            "without --no-save-optim."
        )
    return {**common, "args": _plain_args(checkpoint, common["args"])}


def _adam_steps(checkpoint: StoredCheckpoint, common: Mapping[str, Any]) -> tuple[float, bool]:
    """Return how often Adam has stepped, and whether groups count it, or parameters."""
    optimizer = common["optimizer"]
    groups = itertools.chain(*_nested(optimizer, "param_groups"))
    in_groups = {float(group[_STEP]) for group in groups if _STEP in group}
    in_state = {_scalar(counter) for counter in _nested(optimizer, "common_step")}
    counts = [*in_groups, *in_state]
    if len(counts) != 1:
        raise CheckpointError(
            f"{checkpoint.folder}: expected one step count of Adam for all parameters, got "
            f"{sorted(counts) or 'none'}. Save all parameters by one run of --optimizer muon."
        )
    return counts[0], bool(in_groups)


def _nested(values: object, name: str) -> Iterator[Any]:
    """Yield the values of a name in the state of an optimizer, or of several that are chained."""
    if isinstance(values, Mapping):
        if name in values:
            yield values[name]
        for inner in values.values():
            yield from _nested(inner, name)


def _scalar(value: StoredObject) -> float:
    """Return the value of a float32 scalar, unpickled without torch."""
    if isinstance(value, int | float):
        return float(value)
    with expecting("common_step as a float32 tensor of Megatron-LM 0.19", _COMMON):
        storage, offset = value.arguments[:2]
        return float(struct.unpack_from("<f", storage, 4 * offset)[0])


def _common_for_ddp(
    checkpoint: StoredCheckpoint, states: Mapping[str, Mapping[str, str]], args: argparse.Namespace
) -> dict[str, Any]:
    """Return the common values of a DDP checkpoint, settings of parameter groups included."""
    settings: dict[str, dict[str, Any]] = defaultdict(dict)
    scheduler = {}
    for key in checkpoint.objects:
        if match := _FSDP_SETTING.match(key):
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
        float(checkpoint.read_chunk(checkpoint.tensors[kinds[_STEP]].chunks[0]))
        for kinds in states.values()
        if _STEP in kinds
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
    fsdp_flags = ("use_megatron_fsdp", "use_distributed_optimizer")
    ddp_args = {**vars(args), **dict.fromkeys(fsdp_flags, False), "ckpt_format": "torch_dist"}
    return {
        "args": argparse.Namespace(**ddp_args),
        **{key: checkpoint.read_object(key) for key in _COUNTERS if key in checkpoint.objects},
        "optimizer": optimizers if len(optimizers) > 1 else optimizers[0],
        "opt_param_scheduler": scheduler,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
