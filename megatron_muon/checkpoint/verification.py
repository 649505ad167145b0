# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Compare a checkpoint with its table of contents, and its bytes with their checksums."""

import itertools
import os
from collections import Counter
from collections.abc import Sequence

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
    for item in itertools.chain.from_iterable(checkpoint.items_by_file().values()):
        try:
            if item.key in checkpoint.tensors:
                checkpoint.read_chunk(item)
            else:
                checkpoint.read_object(item.key)
        except CheckpointError as error:
            path = checkpoint.folder / item.file
            problems.append(f"{path}, bytes {item.offset} to {item.offset + item.length}: {error}")
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
        f"{key}: expected chunks that tile the shape {tensor.shape}, got others"
        for key, tensor in [*checkpoint.tensors.items()][share::num_shares]
        if not is_tiled(tensor.shape, [(item.offsets, item.sizes) for item in tensor.chunks])
    ]
    for name, items in [*checkpoint.items_by_file().items()][share::num_shares]:
        path, end = checkpoint.folder / name, 0
        if not os.path.isfile(path) or path.is_symlink():
            problems.append(f"{path}: expected a file, got none, or a link or pipe in its place")
            continue
        for item in items:
            if item.offset != end:
                problems.append(f"{path}: expected {item.key} at byte {end}, got {item.offset}")
            end = item.offset + item.length
        size = path.stat().st_size
        if size != end:
            problems.append(f"{path}: expected {end} bytes, got {size}")
    return problems


def is_tiled(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Return whether boxes are inside of a shape, fill it, and do not overlap."""
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
