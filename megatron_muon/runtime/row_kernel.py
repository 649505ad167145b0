# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One kernel that moves any number of rectangles; needs Triton.

A table on the device lists them: where each comes from and goes to, as the number of a tensor, an
offset and two strides. A step hands over the addresses of the tensors. The kernel rounds as torch
does.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

# Elements that one program of the kernel moves, and the elements that its threads hold at a time:
# eight warps with eight elements a thread access 16 bytes at once, in 80 registers at most.
TILE = 4096
PIECE = 2048
NUM_WARPS = 8
# Columns of the table: source tensor, first element in it, row stride, column stride; the same for
# the target; rows, columns, and the position of the norm.
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
        dtypes: Of sources and targets.
        divides: Whether moves are divided by their norms; otherwise they are multiplied by their
            norms, if they have any, and by their factors.
    """

    moves: torch.Tensor
    tiles: torch.Tensor
    factors: torch.Tensor
    dtypes: tuple[torch.dtype, torch.dtype]
    divides: bool


def build_table(
    moves: Sequence[tuple[torch.Tensor, torch.Tensor, int, int]],
    tensors: Sequence[torch.Tensor],
    norms: Sequence[int] | None,
    factors: Sequence[Sequence[float]] | None,
    device: torch.device,
) -> RowTable:
    """List rectangles.

    Args:
        moves: Source and target of each, ``(rows, cols)``, and the numbers of the tensors that they
            are views of; float32 or bfloat16, one dtype for all sources and one for all targets.
        tensors: By number; of the dtype of their views, or from the beginning of an allocation on.
        norms: Positions of their norms; None for none.
        factors: Factors that they are multiplied by, one after the other; None for none.
        device: Where the table is needed.

    Memory: about 100 bytes a rectangle, and 8 for every 4,096 elements.
    """
    entries: list[list[Any]] = []
    scales: list[Sequence[float]] = []
    for index, (source, target, own, other) in enumerate(moves):
        norm = 0 if norms is None else norms[index]
        for row, num_rows, num_cols, (from_, to) in _cut(source, target):
            # Not from addresses, as memory may have been freed.
            first, last = (
                view.storage_offset() - tensors[number].storage_offset() + row * view.stride(0)
                for view, number in ((source, own), (target, other))
            )
            entries.append([own, first, *from_, other, last, *to, num_rows, num_cols, norm])
            scales.append((1.0, 1.0) if factors is None else factors[index])
    on_host = torch.tensor(entries, dtype=torch.int64)
    return RowTable(
        on_device(on_host, device),
        on_device(_tiles(on_host[:, 8] * on_host[:, 9]), device),
        on_device(torch.tensor(scales, dtype=torch.float32), device),
        dtypes=(moves[0][0].dtype, moves[0][1].dtype),
        divides=norms is not None and factors is None,
    )


def _tiles(num_elements: torch.Tensor) -> torch.Tensor:
    """Return the move and the first element of each tile, from the elements of each move."""
    num_tiles = (num_elements + TILE - 1) // TILE
    move = torch.repeat_interleave(num_tiles)
    before = (num_tiles.cumsum(0) - num_tiles)[move]
    first = (torch.arange(len(move)) - before) * TILE
    return torch.stack([move, first], dim=1).to(torch.int32)


def _cut(source: torch.Tensor, target: torch.Tensor) -> list[tuple[int, int, int, _Strides]]:
    """Return the pieces of a pair: first row, rows, columns, and strides of both sides."""
    num_rows, num_cols = source.shape
    rows_of_piece = max(1, _MOST_ELEMENTS // num_cols)
    strides = (source.stride(), target.stride())
    pieces: list[tuple[int, int, int, _Strides]] = []
    for row in range(0, num_rows, rows_of_piece):
        rows = min(rows_of_piece, num_rows - row)
        if source.is_contiguous() and target.is_contiguous():
            # One long row: the kernel then reads and writes without gaps.
            pieces.append((row, 1, rows * num_cols, ((0, 1), (0, 1))))
        else:
            pieces.append((row, rows, num_cols, strides))
    return pieces


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from the host, which does not wait: the memory is pinned."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def launch(table: RowTable, pointers: torch.Tensor, norms: torch.Tensor | None) -> None:
    """Move the rectangles of a table.

    Args:
        table: Where they are.
        pointers: Addresses of the tensors by number, int64 on the device.
        norms: float32 on the device; None for none.
    """
    source, target = table.dtypes
    _move[(table.tiles.shape[0],)](
        table.moves,
        table.tiles,
        table.factors,
        pointers,
        table.factors if norms is None else norms,
        SOURCE_IS_BF16=source == torch.bfloat16,
        TARGET_IS_BF16=target == torch.bfloat16,
        DIVIDES=table.divides,
        MULTIPLIES=norms is not None and not table.divides,
        WIDTH=WIDTH,
        TILE=TILE,
        PIECE=PIECE,
        num_warps=NUM_WARPS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _move(
    moves: tl.tensor,
    tiles: tl.tensor,
    factors: tl.tensor,
    pointers: tl.tensor,
    norms: tl.tensor,
    SOURCE_IS_BF16: tl.constexpr,
    TARGET_IS_BF16: tl.constexpr,
    DIVIDES: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    # One program for each tile; see WIDTH for the numbers of a rectangle. bfloat16 is moved as
    # integers, as it is the upper half of float32.
    SOURCE: tl.constexpr = tl.int16 if SOURCE_IS_BF16 else tl.float32
    TARGET: tl.constexpr = tl.int16 if TARGET_IS_BF16 else tl.float32
    program = tl.program_id(0)
    number = tl.load(tiles + 2 * program)
    first = tl.load(tiles + 2 * program + 1)
    move = moves + number * WIDTH
    source = tl.load(pointers + tl.load(move)).to(tl.pointer_type(SOURCE)) + tl.load(move + 1)
    target = tl.load(pointers + tl.load(move + 4)).to(tl.pointer_type(TARGET)) + tl.load(move + 5)
    num_rows = tl.load(move + 8).to(tl.int32)
    num_cols = tl.load(move + 9).to(tl.int32)
    factor0 = tl.load(factors + 2 * number)
    factor1 = tl.load(factors + 2 * number + 1)
    norm = factor0
    if DIVIDES or MULTIPLIES:
        norm = tl.load(norms + tl.load(move + 10))
    is_aligned = (source.to(tl.int64) | target.to(tl.int64)) % 16 == 0
    if (num_rows == 1) & (first + TILE <= num_cols) & is_aligned:
        # Nearly all tiles. Without masks, at addresses that are known to be multiples of 16 bytes,
        # loads and stores are as wide as they get.
        source = tl.multiple_of(source + first, 16)
        target = tl.multiple_of(target + first, 16)
        for piece in range(0, TILE, PIECE):
            index = piece + tl.arange(0, PIECE)
            value = _to_float32(tl.load(source + index), SOURCE_IS_BF16)
            value = _scaled(value, norm, factor0, factor1, DIVIDES, MULTIPLIES)
            tl.store(target + index, _rounded(value, TARGET_IS_BF16))
    else:
        for piece in range(0, TILE, PIECE):
            index = first + piece + tl.arange(0, PIECE)
            is_inside = index < num_rows * num_cols
            row = (index // num_cols).to(tl.int64)
            col = (index % num_cols).to(tl.int64)
            from_ = source + row * tl.load(move + 2) + col * tl.load(move + 3)
            to = target + row * tl.load(move + 6) + col * tl.load(move + 7)
            value = _to_float32(tl.load(from_, mask=is_inside, other=0), SOURCE_IS_BF16)
            value = _scaled(value, norm, factor0, factor1, DIVIDES, MULTIPLIES)
            tl.store(to, _rounded(value, TARGET_IS_BF16), mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _to_float32(value: tl.tensor, IS_BF16: tl.constexpr) -> tl.tensor:
    if IS_BF16:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(
    value: tl.tensor,
    norm: tl.tensor,
    factor0: tl.tensor,
    factor1: tl.tensor,
    DIVIDES: tl.constexpr,
    MULTIPLIES: tl.constexpr,
) -> tl.tensor:
    if DIVIDES:
        # IEEE's quotient, as torch's: Triton's own is approximate.
        return tl.div_rn(value, norm)
    if MULTIPLIES:
        value = value * norm
    return value * factor0 * factor1


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(value: tl.tensor, TO_BF16: tl.constexpr) -> tl.tensor:
    if TO_BF16:
        # To the nearest, ties to even: Triton's interpreter would cut the lower bits off.
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        value = tl.where(value == value, rounded, 0x7FC0).to(tl.int16)
    return value
