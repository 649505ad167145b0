# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read the values of a checkpoint without running code from its files, and verify them.

A value is a tensor, stored as chunks, or an object. ``torch.save`` has written each of them into an
archive of its own, with a CRC-32 of every record. Objects lose instances of classes that the table
of contents may not name. A crafted pickle can still use up the memory or end the process.
"""

import io
import itertools
import pickle
import types
import zipfile
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from megatron_muon.mcore.checkpoint_folders import CheckpointError, expecting
from megatron_muon.mcore.checkpoint_reading import MetadataUnpickler, StoredCheckpoint

# Position in a tensor, and shape.
type Box = tuple[tuple[int, ...], tuple[int, ...]]


class Inert:
    """Stand-in for a class that is not imported, and for its instances."""

    def __new__(cls, *arguments: object) -> "Inert":
        """Drop arguments."""
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Drop the state."""

    # Pickles fill instances of subclasses of dict and list by these.
    def __setitem__(self, key: object, value: object) -> None:
        """Drop an element."""

    def extend(self, values: object) -> None:
        """Drop elements."""

    append = extend


class _ObjectUnpickler(MetadataUnpickler):
    def find_class(self, module: str, name: str) -> object:
        """Import listed classes; others become inert."""
        try:
            return super().find_class(module, name)
        except pickle.UnpicklingError:
            return Inert


def read_object(checkpoint: StoredCheckpoint, key: str) -> Any:  # noqa: ANN401 - any object
    """Read an object; instances of unknown classes become inert. None without the key.

    Raises:
        CheckpointError: It cannot be read.
    """
    if key not in checkpoint.objects:
        return None
    data = _read_item(checkpoint, MetadataIndex(key))
    with expecting("an archive of torch.save", key):
        module = types.SimpleNamespace(__name__=__name__, Unpickler=_ObjectUnpickler)
        return torch.load(
            io.BytesIO(data), map_location="cpu", pickle_module=module, weights_only=False
        )


def read_chunk(checkpoint: StoredCheckpoint, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
    """Read a chunk of a tensor.

    Raises:
        CheckpointError: It cannot be read, or has another number of elements.
    """
    data = _read_item(checkpoint, MetadataIndex(key, chunk.offsets))
    with expecting(f"a tensor of shape {tuple(chunk.sizes)}", key):
        # Megatron stores layers without their stacking axis.
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True).reshape(
            chunk.sizes
        )


def _read_item(checkpoint: StoredCheckpoint, index: MetadataIndex) -> bytes:
    """Read the archive of a chunk or object, and compare the checksums of its records."""
    with expecting(f"an archive of torch.save in {checkpoint.folder}", index.fqn):
        info = checkpoint.metadata.storage_data[index]
        path = checkpoint.folder / info.relative_path
        # A path that leaves the folder, or a link, would read any file of this machine.
        if path.parent != checkpoint.folder or path.is_symlink() or not path.is_file():
            raise CheckpointError(
                f"{path}: expected a file, got none, or a link or pipe in its place"
            )
        with open(path, "rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            # zipfile skips leading bytes: no checksum covers them.
            num_bytes = sum(record.file_size for record in archive.infolist())
            if not data.startswith(b"PK") or not num_bytes <= len(data) == info.length:
                raise zipfile.BadZipFile("other bytes, or records larger than it")
            if damaged := archive.testzip():
                raise CheckpointError(
                    f"{index.fqn}: expected the checksum of its record {damaged} in "
                    f"{info.relative_path}, got another"
                )
    return data


def find_misfits(checkpoint: StoredCheckpoint) -> list[str]:
    """Return one sentence per tensor that its chunks do not tile."""
    return [
        f"{key}: expected chunks that tile the shape {tuple(tensor.size)}, got others"
        for key, tensor in checkpoint.tensors.items()
        if not is_tiled(tensor.size, [(c.offsets, c.sizes) for c in tensor.chunks])
    ]


def is_tiled(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Return whether boxes as large as a shape together are inside of it, and do not overlap."""
    if len(shape) > 16:  # a box has 2**16 corners
        return False
    # If the corners of all cancel in pairs, the boxes cover every element of the shape an odd
    # number of times, and all others an even number; by their size together, once and never.
    corners: set[tuple[int, ...]] = set()
    for offsets, sizes in [((0,) * len(shape), shape), *boxes]:
        if all(sizes):
            ends = [(o, o + n) for o, n in zip(offsets, sizes, strict=True)]
            corners ^= set(itertools.product(*ends))
    return not corners


def find_problems(checkpoint: StoredCheckpoint) -> list[str]:
    """Compare a checkpoint with its table of contents, and every byte with its checksum.

    Bytes without a checksum (alignment between records, time stamps of the archive) are never
    loaded.

    Returns:
        One sentence per problem: of ``find_misfits()``, files that are missing, items with changed
        bytes or another chunk.

    Memory: twice the largest item.
    """
    problems = find_misfits(checkpoint)
    chunks = [(key, chunk) for key, t in checkpoint.tensors.items() for chunk in t.chunks]
    for key, chunk in [*chunks, *((key, None) for key in checkpoint.objects)]:
        try:
            # Headers have no checksum: torch's reader has to take them, too.
            if chunk is not None:
                read_chunk(checkpoint, key, chunk)
            else:
                _read_item(checkpoint, MetadataIndex(key))
        except CheckpointError as error:
            problems.append(str(error))
    # Items of one file lack the same one.
    return [*dict.fromkeys(problems)]
