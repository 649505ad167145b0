# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read every byte of a checkpoint.

``torch.save`` writes a CRC-32 of each record, which ``torch.load`` does not look at; here it is
compared. What no checksum covers (alignment between records, time stamps of the archive) holds
nothing that is loaded.
"""

import io
import math
import zipfile
from collections.abc import Iterator, Sequence

from megatron_muon.checkpoint.folders import CheckpointError
from megatron_muon.checkpoint.storage import (
    Chunk,
    Item,
    StoredCheckpoint,
    StoredTensor,
    load_object,
    load_tensor,
)


def find_problems(
    checkpoint: StoredCheckpoint, files: Sequence[str] | None = None
) -> Iterator[str]:
    """Compare a checkpoint with its table of contents and its checksums.

    Args:
        checkpoint: Table of contents.
        files: Files to read; None for all.

    Yields:
        One sentence for each tensor whose chunks do not tile it, each file that is missing, too
        short or longer than what it holds, each item whose bytes have changed or are not the chunk
        they should be.

    Memory: twice the largest item.
    """
    for key, tensor in checkpoint.tensors.items():
        if not _is_tiled(tensor):
            yield f"{key}: expected chunks that tile the shape {tensor.shape}, got others"
    by_file = checkpoint.items_by_file()
    for name in by_file if files is None else files:
        yield from _problems_of_file(checkpoint, name, by_file[name])


def _problems_of_file(
    checkpoint: StoredCheckpoint, name: str, entries: Sequence[tuple[str, Item, Chunk | None]]
) -> Iterator[str]:
    path = checkpoint.folder / name
    if not path.is_file():
        yield f"{path}: expected a file, got none"
        return
    end = 0
    for key, item, chunk in entries:
        if item.offset != end:
            yield f"{path}: expected {key} at byte {end}, got it at {item.offset}"
        end = item.offset + item.length
        try:
            problem = _item_problem(checkpoint, key, checkpoint.read_item(item), chunk)
        except CheckpointError as error:
            problem = str(error)
        if problem:
            yield f"{path}, bytes {item.offset} to {end}: {problem}"
    size = path.stat().st_size
    if size != end:
        yield f"{path}: expected {end} bytes, got {size}"


def _item_problem(
    checkpoint: StoredCheckpoint, key: str, data: bytes, chunk: Chunk | None
) -> str | None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            damaged = archive.testzip()
    except Exception as error:  # noqa: BLE001 - a damaged archive raises anything
        return f"{key}: expected an archive of torch.save, got {type(error).__name__}: {error}"
    if damaged:
        return f"{key}: expected the checksum of its record {damaged}, got another"
    if chunk is None:
        load_object(data, key)
        return None
    found, dtype = load_tensor(data, key), checkpoint.tensors[key].dtype
    if tuple(found.shape) != chunk.sizes or found.dtype != dtype:
        return (
            f"{key}: expected shape {chunk.sizes} of {dtype}, got {tuple(found.shape)} of "
            f"{found.dtype}"
        )
    return None


def _is_tiled(tensor: StoredTensor) -> bool:
    """Tell whether chunks lie inside of the shape, fill it, and do not overlap."""
    if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.shape):
        return False
    boxes = sorted(
        tuple((start, start + size) for start, size in zip(c.offsets, c.sizes, strict=True))
        for c in tensor.chunks
    )
    open_boxes: list[tuple[tuple[int, int], ...]] = []
    for box in boxes:
        is_inside = all(
            0 <= start and stop <= bound
            for (start, stop), bound in zip(box, tensor.shape, strict=True)
        )
        # Boxes are in order of their first row: those that ended before it cannot overlap.
        open_boxes = [other for other in open_boxes if other and other[0][1] > box[0][0]]
        if not is_inside or any(_overlap(box, other) for other in open_boxes):
            return False
        open_boxes.append(box)
    return True


def _overlap(box: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True))
