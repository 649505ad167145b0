# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What a finished checkpoint holds, and in which bytes of which file.

=========  =====================================================================================
key        name of a value: the nested names of the saved dictionary, joined by dots
tensor     a value stored as chunks, which are boxes of the whole
object     any other value, pickled
item       the bytes of a chunk or object: an archive of ``torch.save``, in one of the files
=========  =====================================================================================

Nothing in a checkpoint is trusted. Unpickling never runs code from it: only a few plain values are
built, instances of all other classes become inert. Files are regular ones of its folder, and
numbers are checked before anything is read or allocated by them. Python's unpickler itself is not
bounded: a crafted pickle can use up the memory or end the process.

Source: ``torch.distributed.checkpoint.filesystem`` and ``.metadata`` of torch 2.11.
"""

import io
import itertools
import math
import os
import pickle
import stat
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

import torch

from megatron_muon.checkpoint.folders import METADATA, CheckpointError, expecting

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
    """

    folder: Path
    tensors: dict[str, StoredTensor]
    objects: dict[str, Item]

    def items_by_file(self) -> dict[str, list[Item]]:
        """Return the items of every file, in the order of their bytes."""
        items = [chunk for tensor in self.tensors.values() for chunk in tensor.chunks]
        items = sorted([*items, *self.objects.values()], key=attrgetter("file", "offset"))
        return {name: [*own] for name, own in itertools.groupby(items, attrgetter("file"))}

    def read_item(self, item: Item) -> bytes:
        """Read the bytes of an item, and compare the checksums of its records.

        Raises:
            CheckpointError: The file is missing or too short, or the item has changed.
        """
        path = self.folder / item.file
        with expecting("a regular file, no link or pipe", path), open_regular(path) as file:
            size, end = os.fstat(file.fileno()).st_size, item.offset + item.length
            file.seek(min(item.offset, size))
            # Before anything is allocated.
            found = file.read(item.length) if end <= size else b""
            if len(found) != item.length:
                raise CheckpointError(
                    f"{path}: expected {end} bytes or more, got {size}: the file is truncated."
                )
        with expecting("an archive of torch.save", item.key):
            # zipfile skips leading bytes, which no checksum covers.
            if not found.startswith(b"PK"):
                raise zipfile.BadZipFile("bytes before the archive")
            check_archive(io.BytesIO(found), item.key)
        return found

    def read_object(self, key: str) -> StoredObject:
        """Read an object; None where there is none.

        Raises:
            CheckpointError: It cannot be read.
        """
        if key not in self.objects:
            return None
        data = self.read_item(self.objects[key])
        value = load_object(data, key)
        check_extent(value, len(data), key)
        return value


@contextmanager
def open_regular(path: Path) -> Iterator[IO[bytes]]:
    """Open a file of a checkpoint, which another user may have written.

    A link could have any file of this machine copied, and a pipe or device could block.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("a pipe or device")
        yield file


def check_archive(file: IO[bytes], where: object) -> None:
    """Compare the checksums of an archive of ``torch.save``, which ``torch.load`` does not.

    Raises:
        CheckpointError: A record has changed, or records are compressed or overlap.
    """
    with zipfile.ZipFile(file) as archive:
        num_bytes = sum(record.file_size for record in archive.infolist())
        if num_bytes > file.seek(0, os.SEEK_END):
            raise zipfile.BadZipFile(f"records of {num_bytes} bytes in a smaller archive")
        if damaged := archive.testzip():
            raise CheckpointError(
                f"{where}: expected the checksum of its record {damaged}, got another"
            )


def check_extent(value: StoredObject, num_bytes: int, where: object) -> None:
    """Refuse a value that nobody can walk in time, such as a list that holds itself.

    Raises:
        CheckpointError: It has far more elements than its ``num_bytes`` bytes could.
    """
    waiting, left = [value], num_bytes + 1_000_000
    while waiting:
        inner = waiting.pop()
        inner = vars(inner) if isinstance(inner, _Inert) else inner
        inner = [*inner.values()] if isinstance(inner, dict) else inner
        if isinstance(inner, list | tuple):
            left -= len(inner)
            waiting += inner
        if left < 0:
            raise CheckpointError(
                f"{where}: expected fewer values than bytes, got lists that hold one another or "
                "themselves."
            )


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Refuse a folder that is saved anew while it is read.

    Raises:
        CheckpointError: At the end, some file is not the same as at the beginning.
    """
    before = _stamps(folder)
    yield
    if _stamps(folder) != before:
        raise CheckpointError(
            f"{folder}: expected files that do not change while they are read, got new ones: "
            "another process saves there. Wait until it has ended."
        )


def _stamps(folder: Path) -> set[tuple[Path, int, int, int]]:
    """Return inode, size and time of change of every file."""
    files = filter(Path.is_file, folder.iterdir())
    return {(f, s.st_ino, s.st_size, s.st_mtime_ns) for f in files if (s := f.stat())}


def read_checkpoint(folder: Path) -> StoredCheckpoint:
    """Read the table of contents of a finished checkpoint.

    Args:
        folder: The folder that holds ``.metadata``.

    Raises:
        CheckpointError: ``.metadata`` is missing or damaged.
    """
    path = folder / METADATA
    with expecting("the metadata of torch.distributed.checkpoint", path):
        with open_regular(path) as file:
            metadata = _Unpickler(file).load()
        if type(metadata).__name__ != "Metadata":
            raise TypeError(f"{type(metadata).__name__} in place of Metadata")
        stored = {
            # Hashing what is no text could take for ever.
            (str.__str__(index.fqn), _numbers(getattr(index, "offset", None) or ())): info
            for index, info in metadata.storage_data.items()
        }
        tensors, objects = {}, {}
        for key, value in metadata.state_dict_metadata.items():
            if type(value).__name__ == "TensorStorageMetadata":
                tensors[key] = _stored_tensor(key, value, stored)
            else:
                objects[key] = _item(key, stored[key, ()])
    return StoredCheckpoint(folder, tensors, objects)


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


def load_tensor(data: bytes, key: str) -> torch.Tensor:
    """Read a chunk from the bytes of its item.

    Raises:
        CheckpointError: The bytes are no tensor.
    """
    with expecting("a tensor of torch.save", key):
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        # A view may have any number of elements of one stored one.
        if found.nbytes > len(data):
            raise ValueError(f"{found.nbytes} bytes in an archive of {len(data)}")
        return found


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
    # torch.load would refuse the object or run its code, depending on weights_only.
    with expecting("an archive of torch.save", key), zipfile.ZipFile(io.BytesIO(data)) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        return _Unpickler(io.BytesIO(archive.read(name))).load()


class _Inert:
    """Stands in for an instance of a class that is not imported; keeps what it was given."""

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
