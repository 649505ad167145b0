# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint of ``torch.distributed.checkpoint`` chunk by chunk, in one process.

``torch.distributed.checkpoint.save`` would need all tensors in memory, and classes of all objects.

Source: ``torch.distributed.checkpoint.filesystem`` and ``.metadata`` of torch 2.15.
"""

import io
import logging
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_muon.checkpoint.folders import METADATA, CheckpointError

logger = logging.getLogger(__name__)

# Files of a few GiB are read in parallel, and are no larger than those that ranks write.
_FILE_BYTES = 4 << 30


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path of a folder beside ``target``, renamed to it unless there is an error.

    Raises:
        CheckpointError: ``target`` exists.
        FileExistsError: It has come to exist meanwhile; it is not replaced.
    """
    if os.path.lexists(target):
        raise CheckpointError(
            f"{target}: expected a path to write to, got one that exists. Choose another one."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.converting-"
    for path in target.parent.iterdir():
        if path.name.startswith(prefix):
            logger.warning(
                "%s: of a conversion that was killed, or runs. Remove it if none runs.", path
            )
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as folder:
        temporary = Path(folder, target.name)
        yield temporary
        for path in Path(folder).rglob("*"):
            _sync(path)
        # A rename alone would replace an empty folder that has appeared meanwhile.
        target.mkdir()
        temporary.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class CheckpointWriter:
    """Writes a checkpoint into a folder that exists; it is finished once :meth:`finish` returns.

    Args:
        folder: An empty folder.

    Memory: the largest chunk, twice.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[Path] = []
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def add_chunk(
        self,
        key: str,
        shape: Sequence[int],
        offsets: Sequence[int],
        chunk: torch.Tensor,
    ) -> None:
        """Write a chunk of a tensor.

        Args:
            key: Key of the tensor.
            shape: Of the whole tensor.
            offsets: Position of the chunk in it.
            chunk: Its elements.
        """
        whole = self._entries.setdefault(
            key, TensorStorageMetadata(TensorProperties(chunk.dtype), torch.Size(shape), [])
        )
        assert isinstance(whole, TensorStorageMetadata), key
        whole.chunks.append(ChunkStorageMetadata(torch.Size(offsets), chunk.shape))
        # A view would be written with all of its storage.
        self._write(MetadataIndex(key, offsets), _archive(chunk.clone()))

    def add_object(self, key: str, value: Any) -> None:  # noqa: ANN401 - whatever is pickled
        """Pickle a value."""
        self._entries[key] = BytesStorageMetadata()
        self._write(MetadataIndex(key), _archive(value))

    def _write(self, index: MetadataIndex, data: bytes) -> None:
        if not self._files or self._files[-1].stat().st_size > _FILE_BYTES:
            self._files.append(self._folder / f"__{len(self._files)}_0.distcp")
        with open(self._files[-1], "ab") as file:
            info = _StorageInfo(self._files[-1].name, file.tell(), len(data))
            file.write(data)
        self._places[index] = info

    def finish(self) -> None:
        """Write the table of contents, last of all files."""
        metadata = Metadata(self._entries, {}, self._places)
        (self._folder / METADATA).write_bytes(pickle.dumps(metadata))


def _archive(value: Any) -> bytes:  # noqa: ANN401 - whatever is pickled
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
