# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How Megatron-FSDP would shard the parameters of one unit, for ranks that do not exist.

A live run reads the buffers of the model itself (``rows/megatron_fsdp.py``). This is the rule they
come from, ``_get_parameter_groups`` and ``build_data_parallel_buffer_index`` of megatron-core
0.19.2, and ``tests/unit_tests/report/test_fsdp_buffer.py`` compares it with them.

The parameters of one module, such as a layer, share a buffer; experts have a buffer of their own.
Megatron-FSDP shards it at multiples of ``chunk_size_factor`` elements, which is a multiple of the
row of almost every parameter: shards are whole rows. A parameter whose size is no multiple of it
leaves a remainder in its last chunk, which others share::

    chunk size 8:   | A A A A A A A A | A A A b b . B B | B B B B B B B B |

    A has 11 elements: it starts on a chunk and leaves 5 free in its second one. B has 10 elements,
    so its remainder of 2 fits there: B starts at the end of the shared chunk and ends on a chunk.
    b is smaller than a chunk: it goes into the gap, right behind A.
"""

import math
from collections.abc import Sequence

type Shape = tuple[int, ...]


def unit_buffer(shapes: Sequence[Shape], num_shards: int) -> tuple[int, list[int]]:
    """Lay out the parameters of one unit.

    Args:
        shapes: Of each parameter, as tensor parallelism leaves it, in the order of
            ``named_parameters``.
        num_shards: Ranks that the buffer is sharded over.

    Returns:
        The size of the buffer and the first element of each parameter, for
        :func:`~megatron_muon.plan.layout.rows_in_buffer`.
    """
    order = sorted(range(len(shapes)), key=lambda i: _row_size(shapes[i]), reverse=True)
    chunk_size = _chunk_size([shapes[i] for i in order])
    offsets, used = _offsets([math.prod(shapes[i]) for i in order], chunk_size)
    # The buffer is padded so that every rank has the same number of whole chunks.
    multiple = num_shards * chunk_size
    begins = dict(zip(order, offsets, strict=True))
    return -(-used // multiple) * multiple, [begins[i] for i in range(len(shapes))]


def _row_size(shape: Shape) -> int:
    return math.prod(shape[1:])


def _chunk_size(shapes: Sequence[Shape]) -> int:
    """Return the longest row, or a common multiple of rows where they do not divide it."""
    chunk_size = _row_size(shapes[0])
    for shape in shapes:
        row, size = _row_size(shape), math.prod(shape)
        # A parameter smaller than a chunk never crosses a shard border, whatever its rows are.
        is_fine = (
            row == chunk_size
            or (chunk_size % row == 0 and size % chunk_size == 0)
            or size < chunk_size
        )
        if not is_fine:
            chunk_size = math.lcm(chunk_size, row)
    return chunk_size


def _offsets(sizes: Sequence[int], chunk_size: int) -> tuple[list[int], int]:
    """Lay parameters end to end; see the drawing above.

    Args:
        sizes: Elements of each parameter.
        chunk_size: Elements of a chunk.

    Returns:
        The offset of each parameter, and the elements used in all.
    """
    offsets = [0] * len(sizes)
    small = [i for i, size in enumerate(sizes) if size < chunk_size]
    large = [i for i, size in enumerate(sizes) if size >= chunk_size]
    end = 0
    while large:
        first = large.pop(0)
        offsets[first] = end
        remainder = sizes[first] % chunk_size
        gap = end + sizes[first]
        end += -(-sizes[first] // chunk_size) * chunk_size
        if not remainder:
            continue
        free = chunk_size - remainder
        partner = next((i for i in large if 0 < sizes[i] % chunk_size <= free), None)
        if partner is not None:
            # The partner ends on a chunk, so its remainder comes first: at the end of this chunk.
            large.remove(partner)
            remainder = sizes[partner] % chunk_size
            offsets[partner] = end - remainder
            free -= remainder
            end += sizes[partner] - remainder
        # The list is walked in a copy: what fits is taken out of it, and leaves less free.
        for filler in [i for i in small if sizes[i] <= free]:
            if sizes[filler] <= free:
                offsets[filler] = gap
                gap += sizes[filler]
                free -= sizes[filler]
                small.remove(filler)
    # What no gap could take shares chunks at the end.
    for rest in small:
        offsets[rest] = end
        end += sizes[rest]
    return offsets, end
