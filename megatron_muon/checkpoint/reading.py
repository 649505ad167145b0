# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read a checkpoint without running code from its files.

======  ==================================================================
key     name of a value: nested names of the saved dictionary, joined by dots
tensor  a value stored as chunks, boxes of the whole
object  any other value, pickled
item    the bytes of a chunk or object: an archive of ``torch.save``, in one of the files
======  ==================================================================

Nothing in a checkpoint is trusted: ``torch.distributed.checkpoint`` would unpickle any object. Here
only a few plain values are built, and instances of all other classes become inert. Files are
regular ones of its folder, and numbers are checked before anything is read or allocated by them.
Python's unpickler itself is not bounded: a crafted pickle can use up the memory or end the process.

Source: ``torch.distributed.checkpoint.filesystem`` and ``.metadata`` of torch 2.15.
"""

import functools
import io
import itertools
import os
import pickle
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from megatron_muon.checkpoint.folders import METADATA, CheckpointError, expecting

# Plain values, or inert stand-ins of other objects.
type StoredObject = Any
# Position in a tensor, and shape.
type Box = tuple[tuple[int, ...], tuple[int, ...]]


class Item(NamedTuple):
    """The stored bytes of an object, or of a chunk of a tensor.

    Args:
        key: Key of the object or tensor.
        file: File name inside of the checkpoint's folder.
        offset: First byte.
        length: Number of bytes.
        offsets: Position of the chunk in its tensor, per dimension; empty for objects.
        sizes: Shape of the chunk; empty for objects.
    """

    key: str
    file: str
    offset: int
    length: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: global shape, dtype, and all chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Item, ...]


@dataclass(frozen=True)
class StoredCheckpoint:
    """A finished checkpoint.

    Args:
        folder: The folder that holds ``.metadata``.
        tensors: Tensors by key.
        objects: Objects by key.
        save_id: Random text that torch writes into every save; empty if the writer did not.
    """

    folder: Path
    tensors: dict[str, StoredTensor]
    objects: dict[str, Item]
    save_id: str = ""

    def items_by_file(self) -> dict[str, list[Item]]:
        """Return the items of every file, in the order of their bytes."""
        items = [chunk for tensor in self.tensors.values() for chunk in tensor.chunks]
        items = sorted([*items, *self.objects.values()], key=attrgetter("file", "offset"))
        return {name: [*group] for name, group in itertools.groupby(items, attrgetter("file"))}

    def read_object(self, key: str) -> StoredObject:
        """Read an object; instances of unknown classes become inert. None without the key.

        Raises:
            CheckpointError: It cannot be read, or has far more elements than bytes.
        """
        if key not in self.objects:
            return None
        data = self._read_item(self.objects[key])
        # torch.load would refuse the object or run its code, depending on weights_only.
        with (
            expecting("an archive of torch.save", key),
            zipfile.ZipFile(io.BytesIO(data)) as archive,
        ):
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            folder = name.removesuffix("data.pkl")
            unpickler = _Unpickler(io.BytesIO(archive.read(name)))
            # Persistent ids are ("storage", class, record, device, number of elements).
            unpickler.storage = functools.cache(
                lambda record: archive.read(f"{folder}data/{record}")
            )
            value = unpickler.load()
            _check_extent(value, len(data))
        return value

    def read_chunk(self, item: Item) -> torch.Tensor:
        """Read a chunk of a tensor.

        Raises:
            CheckpointError: It cannot be read, or differs from the table of contents.
        """
        data, dtype = self._read_item(item), self.tensors[item.key].dtype
        with expecting(f"a tensor of shape {item.sizes} and {dtype}", item.key):
            chunk = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            # A view may have any number of elements of one stored one.
            if chunk.nbytes > len(data):
                raise ValueError(f"{chunk.nbytes} bytes in an archive of {len(data)}")
            # Megatron stores layers without their stacking axis.
            lengths = [n for n in chunk.shape if n != 1]
            if lengths != [n for n in item.sizes if n != 1] or chunk.dtype != dtype:
                raise ValueError(f"{tuple(chunk.shape)} of {chunk.dtype}")
            return chunk.reshape(item.sizes)

    def _read_item(self, item: Item) -> bytes:
        """Read the bytes of an item, and compare the checksums of its records."""
        path = self.folder / item.file
        with expecting("a regular file, no link or pipe", path), _open_regular(path) as file:
            file.seek(item.offset)
            # No more is allocated than the file has.
            data = file.read(min(item.length, os.fstat(file.fileno()).st_size))
        if len(data) != item.length:
            raise CheckpointError(
                f"{path}: expected {item.length} bytes at {item.offset}, got {len(data)}: the file "
                "is truncated."
            )
        with (
            expecting("an archive of torch.save", item.key),
            zipfile.ZipFile(io.BytesIO(data)) as archive,
        ):
            # zipfile skips leading bytes: no checksum covers them.
            num_bytes = sum(record.file_size for record in archive.infolist())
            if not data.startswith(b"PK") or num_bytes > len(data):
                raise zipfile.BadZipFile("bytes before the archive, or records larger than it")
            if damaged := archive.testzip():
                raise CheckpointError(
                    f"{item.key}: expected the checksum of its record {damaged}, got another"
                )
        return data


@contextmanager
def _open_regular(path: Path) -> Iterator[IO[bytes]]:
    """Open a file of a checkpoint, maybe of another user.

    A link could have any file of this machine copied, and a pipe or device could block.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("a pipe or device")
        yield file


def _check_extent(value: StoredObject, num_bytes: int) -> None:
    """Refuse a value without an end, such as a list that holds itself."""
    waiting, left = [value], num_bytes + 1_000_000
    while waiting:
        inner = waiting.pop()
        inner = vars(inner) if isinstance(inner, _Inert) else inner
        inner = [*inner.values()] if isinstance(inner, dict) else inner
        if isinstance(inner, list | tuple):
            left -= len(inner)
            waiting += inner
        if left < 0:
            raise ValueError("lists that hold one another or themselves")


def read_checkpoint(folder: Path) -> StoredCheckpoint:
    """Read the table of contents of a finished checkpoint.

    Args:
        folder: The folder that holds ``.metadata``.

    Raises:
        CheckpointError: ``.metadata`` is missing or damaged.
    """
    path = folder / METADATA
    with expecting("the metadata of torch.distributed.checkpoint", path):
        with _open_regular(path) as file:
            metadata = _Unpickler(file).load()
        if type(metadata).__name__ != "Metadata":
            raise TypeError(f"{type(metadata).__name__} in place of Metadata")
        stored = {
            # Hashing anything but text could take for ever.
            (str.__str__(index.fqn), _numbers(getattr(index, "offset", None) or ())): info
            for index, info in metadata.storage_data.items()
        }
        tensors, objects = {}, {}
        for key, value in metadata.state_dict_metadata.items():
            if type(value).__name__ == "TensorStorageMetadata":
                tensors[key] = _stored_tensor(key, value, stored)
            else:
                objects[key] = _item(key, stored[key, ()])
        save_id = getattr(getattr(metadata, "storage_meta", None), "save_id", None)
    return StoredCheckpoint(folder, tensors, objects, save_id if isinstance(save_id, str) else "")


def _numbers(values: Iterable[object]) -> tuple[int, ...]:
    """Return the plain numbers of a shape or position."""
    numbers: tuple[Any, ...] = tuple(values)
    # They are not printed, as they could be of any length.
    if len(numbers) > 16 or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("numbers that are negative, no integers, or of more than 16 dimensions")
    return numbers


def _stored_tensor(
    key: str, value: StoredObject, stored: dict[tuple[str, tuple[int, ...]], StoredObject]
) -> StoredTensor:
    chunks = []
    for chunk in value.chunks:
        offsets = _numbers(chunk.offsets)
        # Tensors that are not sharded are stored without an offset.
        info = stored[key, offsets] if (key, offsets) in stored else stored[key, ()]
        chunks.append(_item(key, info, offsets, _numbers(chunk.sizes)))
    dtype = value.properties.state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{type(dtype).__name__} in place of a dtype")
    return StoredTensor(_numbers(value.size), dtype, tuple(chunks))


def _item(key: str, info: StoredObject, *chunk: tuple[int, ...]) -> Item:
    # A path that leaves the folder would read any file of this machine.
    name = info.relative_path
    if Path(name).name != name:
        raise ValueError(f"{name} in place of a file of the folder")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{key} transformed")
    offset, length = _numbers((info.offset, info.length))
    return Item(key, name, offset, length, *chunk)


class _Inert:
    """Stand-in for an instance of a class that is not imported; keeps its arguments."""

    def __new__(cls, *arguments: object) -> "_Inert":
        inert = super().__new__(cls)
        inert.arguments = arguments  # type: ignore[attr-defined]
        return inert

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})

    # Pickles fill instances of subclasses of dict and list by these.
    def __setitem__(self, key: object, value: object) -> None: ...

    def append(self, value: object) -> None:
        """Drop an element."""

    def extend(self, values: object) -> None:
        """Drop elements."""


# Imported names. A pickle could set attributes of an ordinary class, torch's metadata included;
# these classes are immutable and only make plain values.
_DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64"
_PLAIN: dict[str, set[str]] = {
    "builtins": {"set", "frozenset"},
    "collections": {"OrderedDict"},
    "torch": {"Size", *_DTYPES.split()},
}


class _Unpickler(pickle.Unpickler):
    """Unpickle plain values; tensors become inert, with the bytes of their storage."""

    storage: Callable[[str], bytes]

    def find_class(self, module: str, name: str) -> object:
        """Import plain values only; other classes become inert."""
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        return type(name, (_Inert,), {"__module__": module})

    def persistent_load(self, pid: tuple[Any, ...]) -> bytes:
        """Return the bytes of a tensor's storage."""
        return self.storage(pid[2])
