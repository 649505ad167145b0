# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Convert saved state between this package's Muon and that of others.

=============================  ====================================================================
``fsdp2 torch dion xtuner``    optimizer state in a folder of ``torch.distributed.checkpoint``, with
                               the keys of its ``state_dict`` module below any prefix, or in a file
                               of ``torch.save``
``torch_dist fsdp_dtensor``    whole checkpoints of Megatron-LM (:mod:`.torch_dist`,
                               :mod:`.to_torch_dist`)
=============================  ====================================================================

Nothing of a checkpoint is executed, and nothing is left where a conversion fails.
"""

import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_muon.checkpoint.folders import CheckpointError, expecting, find_checkpoint
from megatron_muon.checkpoint.optimizers import COPY, OPTIMIZERS, Change, find_changes
from megatron_muon.checkpoint.storage import (
    StoredCheckpoint,
    check_archive,
    check_extent,
    load_chunk,
    read_checkpoint,
    unchanged,
)
from megatron_muon.checkpoint.to_torch_dist import to_torch_dist
from megatron_muon.checkpoint.torch_dist import to_fsdp_dtensor
from megatron_muon.checkpoint.verify import find_misfits
from megatron_muon.checkpoint.writing import CheckpointWriter, replacing

FORMATS = ("torch_dist", "fsdp_dtensor")
# Of the state of one optimizer or several, such as "optimizer.".
_PREFIX = re.compile(r"((?:[^.]+\.)*?)param_groups\.")


def convert(
    path: Path,
    target: Path,
    source: str,
    destination: str,
    *,
    momentum: float | None = None,
    iteration: int | None = None,
) -> str:
    """Convert a checkpoint.

    Args:
        path: A folder of one checkpoint, a ``--save`` folder of Megatron, or a file of
            ``torch.save``.
        target: Path of the result, a folder or file like ``path``; must not exist.
        source: What wrote it: an optimizer of :data:`.OPTIMIZERS`, or a format.
        destination: What will read it.
        momentum: Weight of the past, for groups of parameters that do not have it.
        iteration: Of a ``--save`` folder; None for the tracker's.

    Returns:
        A line that says what was converted.

    Raises:
        CheckpointError: Something is missing, unknown or damaged, ``target`` exists, or another
            process saves the checkpoint meanwhile.

    Memory: for folders the largest chunk, three times; for files the whole file, twice.
    """
    others = {*OPTIMIZERS} - {"fsdp2"}
    pair = {source, destination}
    if pair != {*FORMATS} and not ("fsdp2" in pair and pair & others):
        raise CheckpointError(
            f"--from {source} --to {destination}: expected fsdp2 and one of "
            f"{', '.join(sorted(others))}, or torch_dist and fsdp_dtensor. Choose what wrote the "
            "checkpoint and what will read it."
        )
    if destination == "xtuner":
        raise CheckpointError(
            "--to xtuner: expected an optimizer that loads momentum before its first step, got "
            "xtuner's, which has none to load into until then. Start it from zero momentum."
        )
    is_format = source in FORMATS

    def change(keys: list[str], read: Callable[[str], Any]) -> dict[str, Change]:
        """Return the changes of the state of one optimizer."""
        return find_changes(keys, read, source, destination, momentum)

    with expecting(f"to convert it for {destination}", path):
        if is_format or not path.is_file():
            path = find_checkpoint(path, iteration, source if is_format else FORMATS[1])
        with replacing(target) as temporary, unchanged(path):
            if path.is_file():
                number = _convert_file(path, temporary, change)
            else:
                stored = read_checkpoint(path)
                for problem in find_misfits(stored):
                    raise CheckpointError(problem)
                if is_format:
                    write = to_fsdp_dtensor if source == "torch_dist" else to_torch_dist
                    return write(stored, temporary)
                temporary.mkdir()
                number = _convert_folder(stored, CheckpointWriter(temporary), change)
    return f"{target}: momentum of {number} parameters of {source} converted for {destination}"


type _Change = Callable[[list[str], Callable[[str], Any]], dict[str, Change]]


def _num_momentum(changes: Mapping[str, Change], where: Path) -> int:
    """Count momentum of Muon; that of AdamW is called so on one side only."""
    names = {each.momentum for each in OPTIMIZERS.values()}
    number = sum(
        key.startswith("state.") and {_last(key), _last(each.key)} <= names
        for key, each in changes.items()
    )
    if not number:
        raise CheckpointError(
            f"{where}: expected momentum of Muon, got none. Convert the state of the whole "
            "optimizer, saved after a step."
        )
    return number


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _scaled(values: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 1.0:
        return values
    # Rounded once, to float32 where momentum was of less.
    dtype = torch.promote_types(values.dtype, torch.float32)
    return (values.to(torch.float64) * factor).to(dtype)


def _convert_folder(checkpoint: StoredCheckpoint, writer: CheckpointWriter, change: _Change) -> int:
    """Copy a checkpoint chunk by chunk, with the state of its optimizers converted."""
    keys = [*checkpoint.tensors, *checkpoint.objects]
    prefixes = {match[1] for key in keys if (match := _PREFIX.match(key))}
    if not prefixes:
        raise CheckpointError(
            f"{checkpoint.folder}: expected keys state.* and param_groups.* of an optimizer, below "
            f"any prefix, got {', '.join(sorted(keys)[:3])}. Save the optimizer by "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict."
        )
    taken: set[str] = set()
    changes: dict[str, Change] = {}
    number = 0
    for prefix in prefixes:
        own = [
            key.removeprefix(prefix)
            for key in keys
            if key.startswith((f"{prefix}state.", f"{prefix}param_groups."))
        ]
        taken.update(prefix + key for key in own)

        def read(key: str, prefix: str = prefix) -> Any:  # noqa: ANN401 - a setting
            """Return a setting or step counter."""
            if prefix + key in checkpoint.objects:
                return checkpoint.read_object(prefix + key)
            return load_chunk(checkpoint, checkpoint.tensors[prefix + key].chunks[0]).item()

        found = change(own, read)
        number += _num_momentum(found, checkpoint.folder)
        for key, each in found.items():
            changes[prefix + key] = Change(prefix + each.key, each.factor, each.value)
    paths = {}
    for key, each in ({key: Change(key) for key in keys if key not in taken} | changes).items():
        _write(checkpoint, writer, key, each)
        if each.key in checkpoint.paths:
            path = checkpoint.paths[each.key]
            paths[key] = path if key == each.key else _path(path, key)
    writer.finish(paths)
    return number


def _write(checkpoint: StoredCheckpoint, writer: CheckpointWriter, key: str, each: Change) -> None:
    if isinstance(each.value, torch.Tensor):
        writer.add_chunk(key, each.value.shape, [0] * each.value.ndim, each.value)
    elif each.value is not COPY:
        writer.add_object(key, each.value)
    elif each.key in checkpoint.objects:
        writer.add_stored(key, checkpoint.read_item(checkpoint.objects[each.key]))
    else:
        tensor = checkpoint.tensors[each.key]
        for item in tensor.chunks:
            chunk = _scaled(load_chunk(checkpoint, item), each.factor)
            writer.add_chunk(key, tensor.shape, item.offsets, chunk)


def _path(like: tuple[str | int, ...], key: str) -> tuple[str | int, ...]:
    """Return the nested names of a key, whose last name alone differs from those of another."""
    name = _last(key)
    # A flattened state has one name of several parts.
    before = str(like[-1]).rpartition(".")
    return (*like[:-1], f"{before[0]}.{name}" if before[0] else name)


def _convert_file(path: Path, target: Path, change: _Change) -> int:
    with expecting("a file of torch.save that weights_only=True reads", path):
        if zipfile.is_zipfile(path):  # not the format of torch before 1.6
            with open(path, "rb") as file:
                check_archive(file, path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        check_extent(content, path.stat().st_size, path)
    number = 0
    for state_dict in _optimizer_states(content):
        ids = {str(name): name for name in state_dict.get("state", {})}
        flat = dict(_flattened(state_dict))
        changes = change(list(flat), flat.__getitem__)
        number += _num_momentum(changes, path)
        is_nested = isinstance(state_dict.get("param_groups"), list)
        groups: list[dict[str, Any]] = [{} for _ in state_dict["param_groups"]] if is_nested else []
        state_dict.clear()
        if is_nested:
            state_dict |= {"state": {}, "param_groups": groups}
        for key, each in changes.items():
            value = flat[each.key] if each.value is COPY else each.value
            if isinstance(value, torch.Tensor):
                value = _scaled(value, each.factor)
            part, _, rest = key.partition(".")
            name, _, kind = rest.rpartition(".")
            if not is_nested:
                state_dict[key] = value
            elif part == "state":
                state_dict["state"].setdefault(ids[name], {})[kind] = value
            else:
                groups[int(name)][kind] = value
    if not number:
        raise CheckpointError(
            f"{path}: expected a state dict of an optimizer, with state and param_groups, got "
            f"{type(content).__name__}. Save optimizer.state_dict(), by itself or in a dictionary."
        )
    torch.save(content, target)
    return number


def _optimizer_states(value: object) -> Iterator[dict[str, Any]]:
    """Yield the state dicts of optimizers, nested or flattened, wherever they are."""
    if isinstance(value, dict):
        if "param_groups" in value or any(str(key).startswith("param_groups.") for key in value):
            yield value
        else:
            for each in value.values():
                yield from _optimizer_states(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _optimizer_states(each)


def _flattened(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in state_dict.items():
        if key == "state":
            for name, states in value.items():
                yield from ((f"state.{name}.{kind}", each) for kind, each in states.items())
        elif key == "param_groups":
            for number, group in enumerate(value):
                yield from ((f"param_groups.{number}.{name}", v) for name, v in group.items())
        else:
            yield key, value
