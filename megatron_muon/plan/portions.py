# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How a portioned matrix is dealt out to the gathers and scatters of its bucket.

The lines of a matrix are the rows of a tall one, the columns of a wide one. Its Gram matrix is a
sum over lines, and Newton-Schulz multiplies each line alone. So a portion of the lines can be added
to the first Gram matrix while others still travel, and the last product can be taken, and leave,
portion by portion. The order of lines does not matter. They lie as they arrive::

    shards     | 0 1 2 3 | 4 5 6 7 | 8 9 |    three shards, whose rows are dealt out two at a time
    arriving   | 0 1 4 5 8 | 2 3 6 7 9 |      in the first gather, and in the second one

Each shard has about the same share of each portion, so that no link waits for others. In a portion
the shards follow each other by rank: what a rank receives may be the stack.
"""

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

# Lines of a portion, and lines that are dealt out at a time, are multiples of it: 16 bytes of bf16,
# which kernels load at once.
MULTIPLE = 8


class Lines(NamedTuple):
    """Neighbouring lines that travel together.

    Args:
        portion: Number of the portion.
        start: First line, as the matrix has them.
        place: First line in the stack.
        number: How many.
    """

    portion: int
    start: int
    place: int
    number: int


@lru_cache(maxsize=1024)
def borders(length: int, num_portions: int) -> tuple[int, ...]:
    """Return the first line of each portion in the stack, and the end.

    They depend on the shape alone, so that matrices of a stack share them; a portion of a small
    matrix may be empty.

    Args:
        length: Lines of the part.
        num_portions: Gathers of its bucket.
    """
    starts = (length * number // num_portions for number in range(num_portions))
    return (*(start // MULTIPLE * MULTIPLE for start in starts), length)


def lines_at_a_time(longest: int, num_portions: int) -> int:
    """Return the lines that are dealt out at a time.

    Args:
        longest: Most lines of a shard.
        num_portions: Gathers of the bucket.
    """
    return -(-longest // (num_portions * MULTIPLE)) * MULTIPLE


def deal_out(
    start: int, stop: int, length: int, num_portions: int, at_a_time: int
) -> Iterator[Lines]:
    """Yield some lines of a part by portion, ascending.

    Args:
        start: First line.
        stop: Line after the last one.
        length: Lines of the part.
        num_portions: Gathers of its bucket.
        at_a_time: Lines that are dealt out at a time, see :func:`lines_at_a_time`.
    """
    starts = borders(length, num_portions)
    num_rounds, left = divmod(length, num_portions * at_a_time)
    while start < stop:
        turn, within = divmod(start, num_portions * at_a_time)
        # The last round is shorter. Portions share it evenly, as borders() shares the part.
        ends = borders(left if turn == num_rounds else num_portions * at_a_time, num_portions)
        portion = bisect_right(ends, within) - 1
        end = min(stop, start - within + ends[portion + 1])
        place = starts[portion] + turn * at_a_time + within - ends[portion]
        yield Lines(portion, start, place, end - start)
        start = end
