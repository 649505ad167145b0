# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Compare a checkpoint with its table of contents, and its bytes with their checksums."""

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_muon.checkpoint.folders import CheckpointError
from megatron_muon.checkpoint.reading import Box, StoredCheckpoint


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
