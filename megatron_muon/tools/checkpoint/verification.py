# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Compare the bytes of a checkpoint with their checksums."""

from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_muon.mcore.checkpoint_folders import CheckpointError
from megatron_muon.mcore.checkpoint_reading import StoredCheckpoint, find_misfits


def find_problems(checkpoint: StoredCheckpoint) -> list[str]:
    """Compare a checkpoint with its table of contents, and every byte with its checksum.

    ``torch.save`` writes a CRC-32 of every record. Bytes without a checksum (alignment between
    records, time stamps of the archive) are never loaded.

    Returns:
        One sentence per problem: of ``find_misfits()`` or, without any, items with changed bytes or
        another chunk.

    Memory: twice the largest item.
    """
    problems = find_misfits(checkpoint)
    if problems:
        return problems
    sizes = {
        MetadataIndex(key, chunk.offsets): chunk.sizes
        for key, tensor in checkpoint.tensors.items()
        for chunk in tensor.chunks
    }
    for index, info in checkpoint.metadata.storage_data.items():
        try:
            # Headers have no checksum: torch's reader has to take them, too.
            if index in sizes:
                checkpoint.read_chunk(index.fqn, index.offset, sizes[index])
            else:
                checkpoint.read_item(index)
        except CheckpointError as error:
            path = checkpoint.folder / info.relative_path
            problems.append(f"{path}, bytes {info.offset} to {info.offset + info.length}: {error}")
    return problems
