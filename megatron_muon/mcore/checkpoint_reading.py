# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read the table of contents of a checkpoint without running code from it.

``torch.distributed.checkpoint`` unpickles any object. Here ``.metadata`` may name torch's own
classes alone. Its values are tensors, stored as chunks, and objects, which are pickled; a crafted
pickle can still use up the memory or end the process.

Source: ``torch.distributed.checkpoint.filesystem`` and ``.metadata`` of torch 2.15.
"""

import functools
import math
import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_muon.mcore.checkpoint_folders import METADATA, expecting

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


def read_checkpoint(folder: Path) -> StoredCheckpoint:
    """Read the table of contents of a finished checkpoint.

    Args:
        folder: The folder that holds ``.metadata``.

    Raises:
        CheckpointError: ``.metadata`` is missing or damaged, or names other classes; or a tensor's
            chunks are not as large as the tensor, and torch would load a part of it.
    """
    path = folder / METADATA
    with expecting("the metadata of torch.distributed.checkpoint", path):
        with open(path, "rb") as file:
            metadata = MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"{type(metadata).__name__} in place of Metadata")
        checkpoint = StoredCheckpoint(folder, metadata)
        for key, tensor in checkpoint.tensors.items():
            if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
                raise ValueError(f"chunks of {key!r} that do not fill it")
    return checkpoint


class MetadataUnpickler(pickle.Unpickler):
    """Unpickler of ``.metadata``."""

    def find_class(self, module: str, name: str) -> object:
        """Import listed classes; refuse all other names."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _IMPORTED.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}, which may run code")
