# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read a checkpoint without running code from its files.

======  ==================================================================
key     name of a value: nested names of the saved dictionary, joined by dots
tensor  a value stored as chunks, boxes of the whole
object  any other value, pickled
item    the bytes of a chunk or object: an archive of ``torch.save``, in one of the files
======  ==================================================================

``torch.distributed.checkpoint`` unpickles any object. Here ``.metadata`` may name torch's own
classes alone, and objects lose instances of all other classes. A crafted pickle can still use up
the memory or end the process.

Source: ``torch.distributed.checkpoint.filesystem`` and ``.metadata`` of torch 2.15.
"""

import functools
import io
import itertools
import pickle
import types
import zipfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_muon.mcore.checkpoint_folders import METADATA, CheckpointError, expecting

# Plain values, or inert stand-ins of other objects.
type StoredObject = Any
# Position in a tensor, and shape.
type Box = tuple[tuple[int, ...], tuple[int, ...]]

_DCP = "torch.distributed.checkpoint."
# Classes and functions that are imported, beside data types. None of them runs code.
_IMPORTED = {
    f"{_DCP}metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    f"{_DCP}filesystem": "_StorageInfo _StoragePrefix",
    # torch_dist stores the plans of all ranks.
    f"{_DCP}planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
    "argparse": "Namespace",
    "collections": "OrderedDict",
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",
    "torch": "Size",
    "torch._utils": "_rebuild_tensor_v2",
    "torch.serialization": "_get_layout",
}


@dataclass(frozen=True)
class StoredCheckpoint:
    """A finished checkpoint.

    Args:
        folder: The folder that holds ``.metadata``.
        metadata: Table of contents.
    """

    folder: Path
    metadata: Metadata

    @functools.cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shape, dtype and chunks of tensors by key."""
        values = self.metadata.state_dict_metadata.items()
        return {key: value for key, value in values if isinstance(value, TensorStorageMetadata)}

    @property
    def objects(self) -> set[str]:
        """Keys of objects."""
        return self.metadata.state_dict_metadata.keys() - self.tensors.keys()

    @property
    def save_id(self) -> str:
        """Random text that torch writes into every save; ``None`` if the writer did not."""
        return str(getattr(self.metadata.storage_meta, "save_id", None))

    def file_sizes(self) -> dict[str, int]:
        """Return the number of bytes that each file has, by name."""
        sizes: dict[str, int] = defaultdict(int)
        for info in self.metadata.storage_data.values():
            sizes[info.relative_path] = max(sizes[info.relative_path], info.offset + info.length)
        return sizes

    def read_object(self, key: str) -> StoredObject:
        """Read an object; instances of unknown classes become inert. None without the key.

        Raises:
            CheckpointError: It cannot be read.
        """
        if key not in self.objects:
            return None
        data = self.read_item(MetadataIndex(key))
        with expecting("an archive of torch.save", key):
            module = types.SimpleNamespace(__name__=__name__, Unpickler=_ObjectUnpickler)
            return torch.load(
                io.BytesIO(data), map_location="cpu", pickle_module=module, weights_only=False
            )

    def read_chunk(
        self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """Read the chunk of a tensor at a position.

        Raises:
            CheckpointError: It cannot be read, or has another number of elements.
        """
        data = self.read_item(MetadataIndex(key, offsets))
        with expecting(f"a tensor of shape {tuple(sizes)}", key):
            chunk = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            # Megatron stores layers without their stacking axis.
            return chunk.reshape(sizes)

    def read_item(self, index: MetadataIndex) -> bytes:
        """Read the bytes of an item, and compare the checksums of its records.

        Raises:
            CheckpointError: They cannot be read, or differ from their checksum.
        """
        with expecting("an archive of torch.save", index.fqn):
            info: _StorageInfo = self.metadata.storage_data[index]
            with open(self.folder / info.relative_path, "rb") as file:
                file.seek(info.offset)
                data = file.read(info.length)
            if len(data) != info.length:
                raise EOFError(f"{len(data)} bytes of {info.length}")
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                # zipfile skips leading bytes: no checksum covers them.
                num_bytes = sum(record.file_size for record in archive.infolist())
                if not data.startswith(b"PK") or num_bytes > len(data):
                    raise zipfile.BadZipFile("bytes before the archive, or records larger than it")
                if damaged := archive.testzip():
                    raise CheckpointError(
                        f"{index.fqn}: expected the checksum of its record {damaged}, got another"
                    )
        return data


def read_checkpoint(folder: Path) -> StoredCheckpoint:
    """Read the table of contents of a finished checkpoint.

    Args:
        folder: The folder that holds ``.metadata``.

    Raises:
        CheckpointError: ``.metadata`` is missing or damaged, or names other classes.
    """
    path = folder / METADATA
    with expecting("the metadata of torch.distributed.checkpoint", path):
        with open(path, "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"{type(metadata).__name__} in place of Metadata")
    return StoredCheckpoint(folder, metadata)


def find_misfits(checkpoint: StoredCheckpoint, share: int = 0, num_shares: int = 1) -> list[str]:
    """Compare a table of contents with itself and with the lengths of files.

    Args:
        checkpoint: Table of contents.
        share: Index of the share of tensors and files to compare.
        num_shares: Number of shares.

    Returns:
        One sentence per problem: chunks that do not tile their tensor, a file that is missing
        or of another length than its items.
    """
    problems = [
        f"{key}: expected chunks that tile the shape {tuple(tensor.size)}, got others"
        for key, tensor in [*checkpoint.tensors.items()][share::num_shares]
        if not is_tiled(tensor.size, [(c.offsets, c.sizes) for c in tensor.chunks])
    ]
    for name, end in [*checkpoint.file_sizes().items()][share::num_shares]:
        path = checkpoint.folder / name
        # A path that leaves the folder, or a link, would read any file of this machine.
        if Path(name).name != name or path.is_symlink() or not path.is_file():
            problems.append(f"{path}: expected a file, got none, or a link or pipe in its place")
        elif (size := path.stat().st_size) != end:
            problems.append(f"{path}: expected {end} bytes, got {size}")
    return problems


def is_tiled(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Return whether boxes are inside of a shape, fill it, and do not overlap."""
    if len(shape) > 16:  # a box has 2**16 corners
        return False
    # Boxes fill another one exactly if the corners of all, with alternating signs, cancel.
    corners: Counter[tuple[int, ...]] = Counter()
    whole = ((0,) * len(shape), shape)
    for sign, (offsets, sizes) in [(-1, whole), *((1, box) for box in boxes)]:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return False
        for ends in itertools.product((0, 1), repeat=len(shape)):
            corner = tuple(o + end * n for o, end, n in zip(offsets, ends, sizes, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        """Import listed classes; refuse all other names."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _IMPORTED.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}, which may run code")


class _ObjectUnpickler(_Unpickler):
    def find_class(self, module: str, name: str) -> object:
        """Import listed classes; instances of others become inert."""
        try:
            return super().find_class(module, name)
        except pickle.UnpicklingError:
            return _Inert


class _Inert:
    """Stand-in for an instance of a class that is not imported."""

    def __new__(cls, *arguments: object) -> "_Inert":
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None: ...

    # Pickles fill instances of subclasses of dict and list by these.
    def __setitem__(self, key: object, value: object) -> None: ...

    def extend(self, values: object) -> None:
        """Drop elements."""

    append = extend
