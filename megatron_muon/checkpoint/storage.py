# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What a finished checkpoint holds, and in which bytes of which file.

=========  =====================================================================================
key        name of a value: the nested names of the saved dictionary, joined by dots
tensor     a value stored as chunks, which are boxes of the whole
object     any other value, pickled
item       the bytes of a chunk or object: an archive of ``torch.save``, in one of the files
=========  =====================================================================================

Unpickling never runs code from the checkpoint: only a few plain values are built, instances of all
other classes become inert.

Source: ``torch.distributed.checkpoint.filesystem`` and ``.metadata`` of torch 2.11.
"""

import io
import math
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_muon.checkpoint.folders import METADATA, CheckpointError

# Plain values, or inert stand-ins of other objects.
type StoredObject = Any


@dataclass(frozen=True)
class Item:
    """The stored bytes of an object, or of a chunk of a tensor.

    Args:
        key: Key of the object or tensor.
        file: File name inside of the checkpoint's folder.
        offset: First byte.
        length: Number of bytes.
        offsets: Position of the chunk in its tensor, per dimension; empty for objects.
        sizes: Shape of the chunk; None for objects.
    """

    key: str
    file: str
    offset: int
    length: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: global shape, dtype, and all chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Item, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredCheckpoint:
    """A finished checkpoint.

    Args:
        folder: The folder that holds ``.metadata``.
        tensors: By key.
        objects: By key.
        paths: The nested names of each key, if the writer kept them.
    """

    folder: Path
    tensors: dict[str, StoredTensor]
    objects: dict[str, Item]
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)

    def items_by_file(self) -> dict[str, list[Item]]:
        """Return the items of every file, in the order of their bytes."""
        items = [chunk for tensor in self.tensors.values() for chunk in tensor.chunks]
        by_file: dict[str, list[Item]] = {}
        for item in sorted([*items, *self.objects.values()], key=lambda i: (i.file, i.offset)):
            by_file.setdefault(item.file, []).append(item)
        return by_file

    def read_item(self, item: Item) -> bytes:
        """Read the bytes of an item.

        Raises:
            CheckpointError: The file is missing or too short.
        """
        path = self.folder / item.file
        try:
            with open(path, "rb") as file:
                file.seek(item.offset)
                found = file.read(item.length)
        except OSError as error:
            raise CheckpointError(f"{path}: expected a readable file, got {error}.") from error
        if len(found) != item.length:
            raise CheckpointError(
                f"{path}: expected {item.offset + item.length} bytes or more, got "
                f"{path.stat().st_size}: the file is truncated."
            )
        return found

    def read_object(self, key: str) -> StoredObject:
        """Read an object.

        Raises:
            CheckpointError: It cannot be read.
        """
        return load_object(self.read_item(self.objects[key]), key)


def read_checkpoint(folder: Path) -> StoredCheckpoint:
    """Read the table of contents of a finished checkpoint.

    Args:
        folder: The folder that holds ``.metadata``.

    Raises:
        CheckpointError: ``.metadata`` is missing or damaged.
    """
    path = folder / METADATA
    try:
        with open(path, "rb") as file:
            metadata = _Unpickler(file).load()
        if type(metadata).__name__ != "Metadata":
            raise TypeError(f"{type(metadata).__name__} in place of Metadata")
        stored = {
            (index.fqn, tuple(getattr(index, "offset", None) or ())): info
            for index, info in metadata.storage_data.items()
        }
        tensors, objects = {}, {}
        for key, value in metadata.state_dict_metadata.items():
            if type(value).__name__ == "TensorStorageMetadata":
                tensors[key] = _stored_tensor(key, value, stored)
            else:
                objects[key] = _item(key, stored[key, ()])
        paths = getattr(metadata, "planner_data", None)
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"{path}: expected the metadata of torch.distributed.checkpoint, got "
            f"{type(error).__name__}: {error}."
        ) from error
    return StoredCheckpoint(folder, tensors, objects, paths if isinstance(paths, dict) else {})


def _stored_tensor(
    key: str, value: StoredObject, stored: dict[tuple[str, tuple[int, ...]], StoredObject]
) -> StoredTensor:
    chunks = []
    for chunk in value.chunks:
        offsets = tuple(chunk.offsets)
        # Tensors that are not sharded are stored without an offset.
        info = stored[key, offsets] if (key, offsets) in stored else stored[key, ()]
        chunks.append(_item(key, info, offsets, tuple(chunk.sizes)))
    dtype = value.properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype} in place of a dtype")
    return StoredTensor(tuple(value.size), dtype, tuple(chunks))


def _item(key: str, info: StoredObject, *chunk: tuple[int, ...]) -> Item:
    # A path that leaves the folder would read any file of this machine.
    if Path(info.relative_path).name != info.relative_path or min(info.offset, info.length) < 0:
        raise ValueError(f"bytes {info.offset}, {info.length} of {info.relative_path}")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{key} transformed by {info.transform_descriptors}")
    return Item(key, info.relative_path, info.offset, info.length, *chunk)


def load_tensor(data: bytes, key: str) -> torch.Tensor:
    """Read a chunk from the bytes of its item.

    Raises:
        CheckpointError: The bytes are no tensor.
    """
    return _load(key, lambda: torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def load_chunk(checkpoint: StoredCheckpoint, item: Item) -> torch.Tensor:
    """Read a chunk in the shape that the table of contents says.

    Raises:
        CheckpointError: It cannot be read, or has another number of elements.
    """
    found = load_tensor(checkpoint.read_item(item), item.key)
    sizes = item.sizes or ()
    if found.numel() != math.prod(sizes):
        raise CheckpointError(
            f"{item.key}: expected a chunk of shape {sizes}, got {tuple(found.shape)}. Verify "
            "the checkpoint."
        )
    # Megatron stores layers without the axis by which it stacks them.
    return found.reshape(sizes)


def load_object(data: bytes, key: str) -> StoredObject:
    """Read an object from the bytes of its item; instances of unknown classes become inert.

    Raises:
        CheckpointError: The bytes are no archive of ``torch.save``.
    """

    def load() -> StoredObject:
        """Unpickle the object; its torch part is never executed."""
        # torch.load would refuse the object or run its code, depending on weights_only.
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            return _Unpickler(io.BytesIO(archive.read(name))).load()

    return _load(key, load)


def _load[T](key: str, load: Callable[[], T]) -> T:
    try:
        return load()
    except Exception as error:  # a damaged archive raises anything
        raise CheckpointError(
            f"{key}: expected an archive of torch.save, got {type(error).__name__}: {error}."
        ) from error


class _Inert:
    """Stands in for an instance of a class that is not imported; keeps what it was given."""

    def __new__(cls, *arguments: object) -> "_Inert":
        inert = super().__new__(cls)
        inert.arguments = arguments
        return inert

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    # Pickles fill instances of subclasses of dict and list by these.
    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, value: object) -> None:
        """Drop an element."""

    def extend(self, values: object) -> None:
        """Drop elements."""


# Names that are imported. A pickle could set attributes of an ordinary class, those of torch's
# metadata included; these can neither be changed nor do anything but make a plain value.
_DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64"
_PLAIN: dict[str, set[str]] = {
    "builtins": {"set", "frozenset"},
    "collections": {"OrderedDict"},
    "torch": {"Size", *_DTYPES.split()},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        """Import plain values only; anything else that a pickle names becomes inert."""
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        return type(name, (_Inert,), {"__module__": module})

    def persistent_load(self, pid: object) -> object:
        """Leave out the bytes of a tensor inside of an object."""
        return _Inert(pid)
