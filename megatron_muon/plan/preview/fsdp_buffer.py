# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How Megatron-FSDP would cut the parameters of one unit, for ranks that do not exist.

A live run reads the buffers of the model itself (``mcore/fsdp_model.py``). This is the rule they
come from, ``_get_parameter_groups`` and ``build_data_parallel_buffer_index`` of megatron-core
0.19.2, and ``tests/unit_tests/test_fsdp_buffer.py`` compares it with them.

Vocabulary:

==============  ================================================================================
unit            parameters of one module, such as a layer, that share a buffer; experts have one
                of their own
grid            the buffer is cut only at multiples of this many elements, a multiple of the row
                of (almost) every parameter, so that shards are whole rows
odd size        a size that is no multiple of the grid: it shares its last cell with others
==============  ================================================================================
"""

import math
from collections.abc import Sequence

from megatron_muon.plan.layout import RowLayout, shards_from_flat_ranges

type Shape = tuple[int, ...]


def unit_layouts(shapes: Sequence[Shape], num_shards: int) -> list[RowLayout | None]:
    """Cut the parameters of one unit.

    Args:
        shapes: Of each parameter, as tensor parallelism leaves it, in the order of
            ``named_parameters``.
        num_shards: Ranks the buffer is cut over.

    Returns:
        The layout of each 2-D parameter; None for others.
    """
    order = sorted(range(len(shapes)), key=lambda i: _row(shapes[i]), reverse=True)
    grid = _grid([shapes[i] for i in order])
    offsets, used = _offsets([math.prod(shapes[i]) for i in order], grid)
    cell = num_shards * grid
    shard = -(-used // cell) * cell // num_shards
    ranges = [(rank * shard, (rank + 1) * shard) for rank in range(num_shards)]
    layouts: list[RowLayout | None] = [None] * len(shapes)
    for position, index in enumerate(order):
        shape = shapes[index]
        if len(shape) == 2:
            layouts[index] = shards_from_flat_ranges(*shape, offsets[position], ranges)
    return layouts


def _row(shape: Shape) -> int:
    return math.prod(shape[1:])


def _grid(shapes: Sequence[Shape]) -> int:
    """Return the grid: the longest row, or a common multiple where rows do not divide it."""
    grid = _row(shapes[0])
    for shape in shapes:
        row, size = _row(shape), math.prod(shape)
        fits = row == grid or (grid % row == 0 and size % grid == 0) or size < grid
        if not fits:
            grid = math.lcm(grid, row)
    return grid


def _offsets(sizes: Sequence[int], grid: int) -> tuple[list[int], int]:
    """Lay parameters end to end on the grid; odd sizes share a cell in pairs, small ones fill it.

    Returns:
        The offset of each, and the elements used in all.
    """
    offsets = [0] * len(sizes)
    small = [i for i, size in enumerate(sizes) if size < grid]
    large = [i for i, size in enumerate(sizes) if size >= grid]
    end = 0
    while large:
        index = large.pop(0)
        offsets[index] = end
        odd = sizes[index] % grid
        gap = end + sizes[index]
        end += -(-sizes[index] // grid) * grid
        if not odd:
            continue
        free = grid - odd
        partner = next((i for i in large if 0 < sizes[i] % grid <= free), None)
        if partner is not None:
            # It ends on the grid, and its odd elements come before: at the end of the shared cell.
            large.remove(partner)
            odd = sizes[partner] % grid
            offsets[partner] = end - odd
            free -= odd
            end += sizes[partner] - odd
        for index in [i for i in small if sizes[i] <= free]:
            if sizes[index] <= free:
                offsets[index] = gap
                gap += sizes[index]
                free -= sizes[index]
                small.remove(index)
    for index in small:
        offsets[index] = end
        end += sizes[index]
    return offsets, end
