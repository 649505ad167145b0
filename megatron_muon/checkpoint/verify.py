# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read every byte of a checkpoint, and compare checksums.

``torch.save`` writes a CRC-32 of every record. Bytes without a checksum (alignment between records,
time stamps of the archive) are never loaded.
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_muon.checkpoint.folders import CheckpointError
from megatron_muon.checkpoint.storage import (
    Item,
    StoredCheckpoint,
    StoredTensor,
    load_object,
    load_tensor,
)


def find_problems(checkpoint: StoredCheckpoint) -> Iterator[str]:
    """Compare a checkpoint with its table of contents and its checksums.

    Yields:
        One sentence for each problem: chunks that do not tile their tensor, a file that is missing
        or of another length than its items, an item whose bytes have changed or are not the
        expected chunk.

    Memory: twice the largest item.
    """
    yield from find_misfits(checkpoint)
    for item in itertools.chain.from_iterable(checkpoint.items_by_file().values()):
        path = checkpoint.folder / item.file
        if not _is_regular(path):
            continue
        try:
            problem = _item_problem(checkpoint, item)
        except CheckpointError as error:
            problem = str(error)
        if problem:
            yield f"{path}, bytes {item.offset} to {item.offset + item.length}: {problem}"


def find_misfits(
    checkpoint: StoredCheckpoint, share: int = 0, num_shares: int = 1
) -> Iterator[str]:
    """Compare a table of contents with itself and with the lengths of files.

    Args:
        checkpoint: Table of contents.
        share: Index of the share of tensors and files to compare.
        num_shares: Number of shares, which together are all of them.

    Yields:
        One sentence for each problem.
    """
    for key, tensor in list(checkpoint.tensors.items())[share::num_shares]:
        if not _is_tiled(tensor):
            yield f"{key}: expected chunks that tile the shape {tensor.shape}, got others"
    by_file = checkpoint.items_by_file()
    for name in list(by_file)[share::num_shares]:
        yield from _problems_of_file(checkpoint.folder / name, by_file[name])


def _problems_of_file(path: Path, items: Sequence[Item]) -> Iterator[str]:
    """Check that the items of a file are contiguous from its first byte to its last."""
    if not _is_regular(path):
        yield f"{path}: expected a file, got none, or a link or pipe in its place"
        return
    end = 0
    for item in items:
        if item.offset != end:
            yield f"{path}: expected {item.key} at byte {end}, got it at {item.offset}"
        end = item.offset + item.length
    size = path.stat().st_size
    if size != end:
        yield f"{path}: expected {end} bytes, got {size}"


def _is_regular(path: Path) -> bool:
    return os.path.isfile(path) and not os.path.islink(path)


def _item_problem(checkpoint: StoredCheckpoint, item: Item) -> str | None:
    key, data = item.key, checkpoint.read_item(item)
    if item.sizes is None:
        load_object(data, key)
        return None
    found, dtype = load_tensor(data, key), checkpoint.tensors[key].dtype
    if tuple(found.shape) != item.sizes or found.dtype != dtype:
        return (
            f"{key}: expected shape {item.sizes} of {dtype}, got {tuple(found.shape)} of "
            f"{found.dtype}"
        )
    return None


def _is_tiled(tensor: StoredTensor) -> bool:
    """Return whether chunks are inside of the shape, fill it, and do not overlap."""
    # Torch checks the same in a save, by a private function whose result differs by release.
    whole = Item("", "", 0, 0, (0,) * len(tensor.shape), tensor.shape)
    # Boxes fill another one exactly if the corners of all, with alternating signs, cancel.
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, box in [(-1, whole), *((1, chunk) for chunk in tensor.chunks)]:
        sizes = box.sizes or ()
        for ends in itertools.product((0, 1), repeat=len(sizes)):
            axes = itertools.zip_longest(box.offsets, ends, sizes, fillvalue=0)
            corner = tuple(start + end * size for start, end, size in axes)
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())
