# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One kernel that moves any number of rectangles; needs Triton.

A table on the device lists them: where each comes from and goes to, as an allocation, an offset and
two strides. A step hands over the addresses of the allocations. The kernel rounds as torch does.
"""

import torch
import triton
import triton.language as tl

from megatron_muon.runtime.row_table import TILE, WIDTH, RowTable


def launch(table: RowTable, pointers: torch.Tensor, norms: torch.Tensor | None) -> None:
    """Move the rectangles of a table.

    Args:
        table: Where they are.
        pointers: See :meth:`RowTable.addresses`.
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
) -> None:
    # One program for each tile; see WIDTH for what the numbers of a rectangle are.
    program = tl.program_id(0)
    number = tl.load(tiles + 2 * program)
    move = moves + number * WIDTH
    source = tl.load(pointers + tl.load(move))
    target = tl.load(pointers + tl.load(move + 4))
    num_cols = tl.load(move + 9).to(tl.int32)
    index = tl.load(tiles + 2 * program + 1) + tl.arange(0, TILE)
    is_inside = index < tl.load(move + 8).to(tl.int32) * num_cols
    row = (index // num_cols).to(tl.int64)
    col = (index % num_cols).to(tl.int64)
    from_ = tl.load(move + 1) + row * tl.load(move + 2) + col * tl.load(move + 3)
    to = tl.load(move + 5) + row * tl.load(move + 6) + col * tl.load(move + 7)
    if SOURCE_IS_BF16:
        # bfloat16 is the upper half of float32.
        bits = tl.load(source.to(tl.pointer_type(tl.int16)) + from_, mask=is_inside, other=0)
        value = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        value = tl.load(source.to(tl.pointer_type(tl.float32)) + from_, mask=is_inside, other=0.0)
    if DIVIDES:
        # IEEE's quotient, as torch's: Triton's own is approximate.
        value = tl.div_rn(value, tl.load(norms + tl.load(move + 10)))
    else:
        if MULTIPLIES:
            value = value * tl.load(norms + tl.load(move + 10))
        value = value * tl.load(factors + 2 * number) * tl.load(factors + 2 * number + 1)
    if TARGET_IS_BF16:
        # To the nearest, ties to even: Triton's interpreter would cut the lower bits off.
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(value == value, rounded, 0x7FC0)
        tl.store(target.to(tl.pointer_type(tl.int16)) + to, rounded.to(tl.int16), mask=is_inside)
    else:
        tl.store(target.to(tl.pointer_type(tl.float32)) + to, value, mask=is_inside)
