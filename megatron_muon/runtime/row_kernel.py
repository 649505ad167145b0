# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One kernel that moves any number of rectangles; needs Triton.

A table on the device lists them, as ``megatron_muon.plan.rank_plan`` does: the number of a tensor,
row and column in it, and the stride of its rows, for source and target. A step hands over the
addresses and strides of the tensors. The kernel rounds as torch does.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_muon.plan.rank_plan import Move

# Elements that one program of the kernel moves, and the elements that its threads hold at a time:
# eight warps with eight elements a thread access 16 bytes at once, in 80 registers at most.
TILE = 4096
PIECE = 2048
NUM_WARPS = 8
# Columns of the table: numbers of a move.
WIDTH = 11


class RowTable(NamedTuple):
    """Rectangles that one launch moves.

    Args:
        moves: ``(num_moves, WIDTH)`` int64 on the device.
        tiles: ``(num_tiles, 2)`` int32 on the device: the move, and its first element.
        factors: ``(num_moves, 2)`` float32 on the device.
        dtypes: Of sources and targets.
    """

    moves: torch.Tensor
    tiles: torch.Tensor
    factors: torch.Tensor
    dtypes: tuple[torch.dtype, torch.dtype]


def build_table(
    moves: Sequence[Move],
    factors: Sequence[tuple[float, float]] | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
) -> RowTable:
    """Copy moves to the device.

    Args:
        moves: The moves, of at most 2^30 elements each.
        factors: By move, two factors of its target; None for 1.
        dtypes: Of all sources and of all targets; float32 or bfloat16.
        device: Where the table is needed.

    Memory: 96 bytes a move, and 8 for every 4,096 elements.
    """
    on_host = torch.tensor(moves, dtype=torch.int64)
    tiles = _tiles(on_host[:, 8] * on_host[:, 9])
    scales = torch.tensor(factors or [(1.0, 1.0)] * len(moves), dtype=torch.float32)
    return RowTable(
        on_device(on_host, device), on_device(tiles, device), on_device(scales, device), dtypes
    )


def _tiles(num_elements: torch.Tensor) -> torch.Tensor:
    """Return the move and the first element of each tile, from the elements of each move."""
    num_tiles = (num_elements + TILE - 1) // TILE
    move = torch.repeat_interleave(num_tiles)
    before = (num_tiles.cumsum(0) - num_tiles)[move]
    first = (torch.arange(len(move)) - before) * TILE
    return torch.stack([move, first], dim=1).to(torch.int32)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from the host, which does not wait: the memory is pinned."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def launch(table: RowTable, tensors: torch.Tensor, divisors: torch.Tensor | None) -> None:
    """Move the rectangles of a table, and scale them in float32.

    Args:
        table: The rectangles.
        tensors: Address, row stride and column stride by number, int64 on the device.
        divisors: Norms by block, float32; None for none.
    """
    source, target = table.dtypes
    _move[(table.tiles.shape[0],)](
        table.moves,
        table.tiles,
        tensors,
        # A pointer that is not read.
        tensors if divisors is None else divisors,
        table.factors,
        SOURCE_IS_BF16=source == torch.bfloat16,
        TARGET_IS_BF16=target == torch.bfloat16,
        DIVIDES=divisors is not None,
        WIDTH=WIDTH,
        TILE=TILE,
        PIECE=PIECE,
        num_warps=NUM_WARPS,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _move(
    moves: tl.tensor,
    tiles: tl.tensor,
    tensors: tl.tensor,
    divisors: tl.tensor,
    factors: tl.tensor,
    SOURCE_IS_BF16: tl.constexpr,
    TARGET_IS_BF16: tl.constexpr,
    DIVIDES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
) -> None:
    # One program for each tile. bfloat16 is moved as integers, as it is the upper half of float32.
    SOURCE: tl.constexpr = tl.int16 if SOURCE_IS_BF16 else tl.float32
    TARGET: tl.constexpr = tl.int16 if TARGET_IS_BF16 else tl.float32
    program = tl.program_id(0)
    number = tl.load(tiles + 2 * program)
    first = tl.load(tiles + 2 * program + 1)
    move = moves + number * WIDTH
    source, from_rows, from_cols = _place(move, tensors, SOURCE)
    target, to_rows, to_cols = _place(move + 4, tensors, TARGET)
    num_rows = tl.load(move + 8).to(tl.int32)
    num_cols = tl.load(move + 9).to(tl.int32)
    divisor = 1.0
    if DIVIDES:
        divisor = tl.load(divisors + tl.load(move + 10))
    factor0 = tl.load(factors + 2 * number)
    factor1 = tl.load(factors + 2 * number + 1)
    # Rows without gaps on both sides are one long row, which is read and written without gaps.
    is_dense = (from_rows == num_cols) & (to_rows == num_cols) | (num_rows == 1)
    is_row = is_dense & (from_cols == 1) & (to_cols == 1)
    is_aligned = (source.to(tl.int64) | target.to(tl.int64)) % 16 == 0
    if is_row & (first + TILE <= num_rows * num_cols) & is_aligned:
        # Nearly all tiles. Without masks, at addresses that are known to be multiples of 16 bytes,
        # loads and stores are as wide as they get.
        source = tl.multiple_of(source + first, 16)
        target = tl.multiple_of(target + first, 16)
        for piece in range(0, TILE, PIECE):
            index = piece + tl.arange(0, PIECE)
            value = _to_float32(tl.load(source + index), SOURCE_IS_BF16)
            value = _scaled(value, divisor, factor0, factor1, DIVIDES)
            tl.store(target + index, _rounded(value, TARGET_IS_BF16))
    else:
        for piece in range(0, TILE, PIECE):
            index = first + piece + tl.arange(0, PIECE)
            is_inside = index < num_rows * num_cols
            row = (index // num_cols).to(tl.int64)
            col = (index % num_cols).to(tl.int64)
            from_ = source + row * from_rows + col * from_cols
            to = target + row * to_rows + col * to_cols
            value = _to_float32(tl.load(from_, mask=is_inside, other=0), SOURCE_IS_BF16)
            value = _scaled(value, divisor, factor0, factor1, DIVIDES)
            tl.store(to, _rounded(value, TARGET_IS_BF16), mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _place(
    place: tl.tensor, tensors: tl.tensor, DTYPE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the address of a side of a move, and its strides."""
    tensor = tensors + 3 * tl.load(place)
    row_stride = tl.load(tensor + 1)
    col_stride = tl.load(tensor + 2)
    first = tl.load(place + 1) * row_stride + tl.load(place + 2) * col_stride
    own_stride = tl.load(place + 3)
    row_stride = tl.where(own_stride == 0, row_stride, own_stride)
    return tl.load(tensor).to(tl.pointer_type(DTYPE)) + first, row_stride, col_stride


@triton.jit  # type: ignore[untyped-decorator]
def _to_float32(value: tl.tensor, IS_BF16: tl.constexpr) -> tl.tensor:
    if IS_BF16:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(
    value: tl.tensor,
    divisor: tl.tensor,
    factor0: tl.tensor,
    factor1: tl.tensor,
    DIVIDES: tl.constexpr,
) -> tl.tensor:
    if DIVIDES:
        # IEEE's quotient, as torch's: Triton's own is approximate.
        value = tl.div_rn(value, divisor)
    return value * factor0 * factor1


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(value: tl.tensor, TO_BF16: tl.constexpr) -> tl.tensor:
    if TO_BF16:
        # To the nearest, ties to even: Triton's interpreter would cut the lower bits off.
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        value = tl.where(value == value, rounded, 0x7FC0).to(tl.int16)
    return value
