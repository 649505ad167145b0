# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read the table of contents of a checkpoint without running code from it.

``torch.distributed.checkpoint`` unpickles any object. Here ``.metadata`` may name torch's own
classes alone. Its values are tensors, stored as chunks, and objects, which are pickled; a crafted
pickle can still use up the memory or end the process.

Source: ``torch.distributed.checkpoint.filesystem`` and ``.metadata`` of torch 2.15.
"""

import functools
import itertools
import math
import pickle
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_muon.mcore.checkpoint_folders import METADATA, expecting

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
            metadata = MetadataUnpickler(file).load()
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
    # If the corners of all cancel in pairs, the boxes cover every element of the shape an odd
    # number of times, and all others an even number; by the sum of sizes, once and never.
    corners: set[tuple[int, ...]] = set()
    for offsets, sizes in [((0,) * len(shape), shape), *boxes]:
        if all(sizes):
            ends = [(o, o + n) for o, n in zip(offsets, sizes, strict=True)]
            corners ^= set(itertools.product(*ends))
    return not corners and sum(math.prod(sizes) for _, sizes in boxes) == math.prod(shape)


class MetadataUnpickler(pickle.Unpickler):
    """Unpickler of ``.metadata``."""

    def find_class(self, module: str, name: str) -> object:
        """Import listed classes; refuse all other names."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _IMPORTED.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}, which may run code")
