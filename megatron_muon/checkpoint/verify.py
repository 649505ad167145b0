# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read every byte of a checkpoint, and compare checksums.

``torch.save`` writes a CRC-32 of every record, which ``torch.load`` does not compare. Bytes without
a checksum (alignment between records, time stamps of the archive) are never loaded.
"""

import io
import math
import zipfile
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


def find_problems(
    checkpoint: StoredCheckpoint, share: int = 0, num_shares: int = 1
) -> Iterator[str]:
    """Compare a checkpoint with its table of contents and its checksums.

    Args:
        checkpoint: Table of contents.
        share: Index of the share of the work to do; all shares together read every byte once.
        num_shares: Number of shares, which have about equally many bytes.

    Yields:
        One sentence for each problem: chunks that do not tile their tensor, a file that is missing
        or of another length than its items, an item whose bytes have changed or are not the
        expected chunk.

    Memory: twice the largest item.
    """
    for key, tensor in list(checkpoint.tensors.items())[share::num_shares]:
        if not _is_tiled(tensor):
            yield f"{key}: expected chunks that tile the shape {tensor.shape}, got others"
    by_file = checkpoint.items_by_file()
    for name in list(by_file)[share::num_shares]:
        yield from _problems_of_file(checkpoint.folder / name, by_file[name])
    # Sorted by length, so that every share has items of all lengths.
    items = [item for of_file in by_file.values() for item in of_file]
    items.sort(key=lambda item: (-item.length, item.file, item.offset))
    for item in items[share::num_shares]:
        path = checkpoint.folder / item.file
        if not path.is_file():
            continue
        try:
            problem = _item_problem(checkpoint, item)
        except CheckpointError as error:
            problem = str(error)
        if problem:
            yield f"{path}, bytes {item.offset} to {item.offset + item.length}: {problem}"


def _problems_of_file(path: Path, items: Sequence[Item]) -> Iterator[str]:
    """Check that the items of a file are contiguous from its first byte to its last."""
    if not path.is_file():
        yield f"{path}: expected a file, got none"
        return
    end = 0
    for item in items:
        if item.offset != end:
            yield f"{path}: expected {item.key} at byte {end}, got it at {item.offset}"
        end = item.offset + item.length
    size = path.stat().st_size
    if size != end:
        yield f"{path}: expected {end} bytes, got {size}"


def _item_problem(checkpoint: StoredCheckpoint, item: Item) -> str | None:
    key, data = item.key, checkpoint.read_item(item)
    try:
        # zipfile skips leading bytes, which no checksum covers.
        if not data.startswith(b"PK"):
            raise zipfile.BadZipFile("bytes before the archive")
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()
    except Exception as error:  # a damaged archive raises anything
        return f"{key}: expected an archive of torch.save, got {type(error).__name__}: {error}"
    if damaged:
        return f"{key}: expected the checksum of its record {damaged}, got another"
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
    if any({len(c.offsets), len(c.sizes or ())} != {len(tensor.shape)} for c in tensor.chunks):
        return False
    if sum(math.prod(c.sizes or ()) for c in tensor.chunks) != math.prod(tensor.shape):
        return False
    boxes = sorted(
        tuple((start, start + size) for start, size in zip(c.offsets, c.sizes or (), strict=True))
        for c in tensor.chunks
    )
    active: list[tuple[tuple[int, int], ...]] = []
    for box in boxes:
        is_inside = all(
            start >= 0 and stop <= bound
            for (start, stop), bound in zip(box, tensor.shape, strict=True)
        )
        # Boxes are sorted by their first row: those that end before it cannot overlap.
        active = [other for other in active if other and other[0][1] > box[0][0]]
        if not is_inside or any(_overlap(box, other) for other in active):
            return False
        active.append(box)
    return True


def _overlap(box: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True))
