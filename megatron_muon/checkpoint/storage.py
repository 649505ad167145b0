# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What a finished checkpoint holds, and in which bytes of which file.

=========  =====================================================================================
key        name of a value: the nested names of the saved dictionary, joined by dots
tensor     a value that is cut into chunks, each a box of the whole
object     any other value, pickled
item       the bytes of a chunk or object: an archive of ``torch.save``, in one of the files
=========  =====================================================================================

Unpickling never runs code from the checkpoint: names that are not on a short list become inert.

Source: ``torch.distributed.checkpoint.filesystem`` and ``.metadata`` of torch 2.11.
"""

import io
import math
import pickle
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_muon.checkpoint.folders import METADATA, CheckpointError

# What a checkpoint's writer pickled.
type StoredObject = Any


@dataclass(frozen=True)
class Item:
    """Bytes of one file.

    Args:
        file: Name inside of the checkpoint's folder.
        offset: First byte.
        length: Number of bytes.
    """

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor.

    Args:
        offsets: Where it begins, one number a dimension.
        sizes: How far it goes.
        item: Where it is stored.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Args:
        shape: Shape of the whole, global to all ranks.
        dtype: Of its elements.
        chunks: All its boxes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredCheckpoint:
    """A finished checkpoint.

    Args:
        folder: The folder that holds ``.metadata``.
        tensors: By key.
        objects: By key.
    """

    folder: Path
    tensors: dict[str, StoredTensor]
    objects: dict[str, Item]

    @property
    def keys(self) -> set[str]:
        """Keys of tensors and objects."""
        return self.tensors.keys() | self.objects.keys()

    def items_by_file(self) -> dict[str, list[tuple[str, Item, Chunk | None]]]:
        """Give what each file holds: key, item, and the chunk where it is of a tensor; in order."""
        by_file: dict[str, list[tuple[str, Item, Chunk | None]]] = {}
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                by_file.setdefault(chunk.item.file, []).append((key, chunk.item, chunk))
        for key, item in self.objects.items():
            by_file.setdefault(item.file, []).append((key, item, None))
        return {
            file: sorted(by_file[file], key=lambda entry: entry[1].offset)
            for file in sorted(by_file)
        }

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
        """Read an object; instances of unknown classes become namespaces.

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
        if not isinstance(metadata, Metadata):
            raise TypeError(f"{type(metadata).__name__} in place of Metadata")
        items: dict[str, dict[tuple[int, ...], Item]] = {}
        for index, info in metadata.storage_data.items():
            offsets = tuple(index.offset or ())
            items.setdefault(index.fqn, {})[offsets] = Item(
                info.relative_path, info.offset, info.length
            )
        tensors, objects = {}, {}
        for key, value in metadata.state_dict_metadata.items():
            if isinstance(value, TensorStorageMetadata):
                tensors[key] = _stored_tensor(value, items[key])
            else:
                objects[key] = items[key][()]
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises anything
        raise CheckpointError(
            f"{path}: expected the metadata of torch.distributed.checkpoint, got "
            f"{type(error).__name__}: {error}."
        ) from error
    return StoredCheckpoint(folder, tensors, objects)


def _stored_tensor(
    value: TensorStorageMetadata, items: dict[tuple[int, ...], Item]
) -> StoredTensor:
    # Tensors that are not sharded are stored without an offset.
    chunks = tuple(
        Chunk(offsets, tuple(chunk.sizes), items[offsets] if offsets in items else items[()])
        for chunk in value.chunks
        for offsets in [tuple(chunk.offsets)]
    )
    return StoredTensor(tuple(value.size), value.properties.dtype, chunks)


def load_tensor(data: bytes, key: str) -> torch.Tensor:
    """Read a chunk from the bytes of its item.

    Raises:
        CheckpointError: The bytes are no tensor.
    """
    return _load(key, lambda: torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def load_object(data: bytes, key: str) -> StoredObject:
    """Read an object from the bytes of its item; instances of unknown classes become namespaces.

    Raises:
        CheckpointError: The bytes are no archive of ``torch.save``.
    """
    return _load(
        key,
        lambda: torch.load(
            io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=_INERT_PICKLE
        ),
    )


def _load[T](key: str, load: Callable[[], T]) -> T:
    try:
        return load()
    except Exception as error:  # noqa: BLE001 - a damaged archive raises anything
        raise CheckpointError(
            f"{key}: expected an archive of torch.save, got {type(error).__name__}: {error}."
        ) from error


class _Inert(types.SimpleNamespace):
    """Stands in for an instance of a class that is not imported."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.arguments = args

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


# What makes plain values: metadata, tensors, numpy's random state.
_DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64"
_STORAGES = "Bool Byte Char Short Int Long Half BFloat16 Float Double"
_ALLOWED: dict[str, set[str]] = {
    "_codecs": {"encode"},
    "argparse": {"Namespace"},
    "builtins": {"set", "frozenset", "bytearray", "complex", "slice", "range"},
    "collections": {"OrderedDict", "defaultdict"},
    "numpy": {"dtype", "ndarray"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "torch": {
        "Size",
        "device",
        *_DTYPES.split(),
        *(f"{name}Storage" for name in _STORAGES.split()),
    },
    "torch._utils": {"_rebuild_tensor_v2"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "ChunkStorageMetadata"),
        *("TensorStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.serialization": {"_get_layout"},
    "torch.storage": {"UntypedStorage"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        return type(name, (_Inert,), {"__module__": module})


_INERT_PICKLE = types.ModuleType("inert_pickle")
_INERT_PICKLE.Unpickler = _Unpickler  # type: ignore[attr-defined]
_INERT_PICKLE.load = pickle.load  # type: ignore[attr-defined]
