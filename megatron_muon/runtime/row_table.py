# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A table of the rectangles that one kernel moves, on the device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

# Elements that one program of the kernel moves.
TILE = 4096
# Numbers of a rectangle.
WIDTH = 11
# A rectangle is cut below this, so that its elements are counted in 32 bits.
_MOST_ELEMENTS = 2**30

type _Strides = tuple[tuple[int, ...], tuple[int, ...]]


class RowTable(NamedTuple):
    """Rectangles that one launch moves.

    Args:
        moves: ``(num_moves, WIDTH)`` int64 on the device.
        tiles: ``(num_tiles, 2)`` int32 on the device: the move, and its first element.
        factors: ``(num_moves, 2)`` float32 on the device.
        storages: The allocations, by their numbers in ``moves``.
        dtypes: Of sources and targets.
    """

    moves: torch.Tensor
    tiles: torch.Tensor
    factors: torch.Tensor
    storages: Sequence[torch.UntypedStorage]
    dtypes: tuple[torch.dtype, torch.dtype]

    def addresses(self) -> list[int]:
        """Return where the allocations are now."""
        return [storage.data_ptr() for storage in self.storages]


def build_table(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    norms: Sequence[int] | None,
    factors: Sequence[Sequence[float]] | None,
    device: torch.device,
) -> RowTable:
    """List rectangles.

    Args:
        pairs: Source and target of each, ``(rows, cols)``; float32 or bfloat16, one dtype for all
            sources and one for all targets.
        norms: Positions of the norms that they are divided by; None for none.
        factors: Factors that they are multiplied by, one after the other; None for none.
        device: Where the table is needed.

    Memory: about 100 bytes a rectangle, and 8 for every 4,096 elements.
    """
    numbers: dict[int, int] = {}
    storages: list[torch.UntypedStorage] = []
    moves: list[list[Any]] = []
    tiles: list[tuple[int, int]] = []
    scales: list[Sequence[float]] = []
    for number, pair in enumerate(pairs):
        sides = []
        for tensor in pair:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in numbers:
                numbers[key] = len(storages)
                storages.append(storage)
            sides.append((numbers[key], tensor))
        for row, num_rows, num_cols, strides in _cut(*pair):
            start = len(moves)
            moves.append(
                [
                    entry
                    for (base, tensor), stride in zip(sides, strides, strict=True)
                    for entry in (
                        base,
                        tensor.storage_offset() + row * tensor.stride(0),
                        *stride,
                    )
                ]
                + [num_rows, num_cols, 0 if norms is None else norms[number]]
            )
            scales.append((1.0, 1.0) if factors is None else factors[number])
            tiles += [(start, first) for first in range(0, num_rows * num_cols, TILE)]
    return RowTable(
        on_device(torch.tensor(moves, dtype=torch.int64), device),
        on_device(torch.tensor(tiles, dtype=torch.int32), device),
        on_device(torch.tensor(scales, dtype=torch.float32), device),
        storages,
        (pairs[0][0].dtype, pairs[0][1].dtype),
    )


def _cut(source: torch.Tensor, target: torch.Tensor) -> list[tuple[int, int, int, _Strides]]:
    """Return the pieces of a pair: first row, rows, columns, and strides of both sides."""
    num_rows, num_cols = source.shape
    rows_of_piece = max(1, _MOST_ELEMENTS // num_cols)
    strides = (source.stride(), target.stride())
    pieces: list[tuple[int, int, int, _Strides]] = []
    for row in range(0, num_rows, rows_of_piece):
        rows = min(rows_of_piece, num_rows - row)
        if source.is_contiguous() and target.is_contiguous():
            # One long row.
            pieces.append((row, 1, rows * num_cols, ((0, 1), (0, 1))))
        else:
            pieces.append((row, rows, num_cols, strides))
    return pieces


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from the host, which does not wait."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor if device.type == "cpu" else tensor.to(device)
