# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The matrices of a parameter: one, a batch of them, or the parts of a fused one."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_muon.fsdp2.parameters import NamedParameter, SplitSizes
from megatron_muon.fsdp2.rectangles import Box
from megatron_muon.plan.layout import MatrixLayout, Region, RowRange, block_rows


@dataclass(frozen=True, eq=False)
class MatrixRows:
    """This rank's rows of one matrix, as a range of the local tensor of a parameter.

    Args:
        param: The parameter.
        index: Position in the batch of the local tensor; None if the parameter is no batch.
        start: First of its local rows.
        stop: The row after the last one.
    """

    param: torch.Tensor
    index: int | None
    start: int
    stop: int

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """View them, ``(rows, cols)``, in a tensor shaped like the parameter's local one."""
        # Of a convolution all dimensions but the first are columns.
        matrix = local.flatten(1) if self.index is None else local[self.index]
        return matrix[self.start : self.stop]


class Segment(NamedTuple):
    """Consecutive rows of the matrices of a parameter that are orthogonalized separately.

    Args:
        rows: The rows.
        blocks: For groups that repeat, the rows of one group by block, such as query, key and
            value; None for one block.
    """

    rows: RowRange
    blocks: tuple[int, ...] | None


def segments_of(num_rows: int, split_sizes: SplitSizes) -> list[Segment]:
    """Return the segments that are orthogonalized separately.

    Consecutive blocks become matrices with owners of their own. The blocks of repeating groups are
    many short pieces, which stay with one owner.

    Args:
        num_rows: Rows of the parameter.
        split_sizes: A number of equal blocks; the rows of the blocks, which add up to all rows or
            to those of one group, the last of which may be -1 for the rows that are left; None for
            one block.

    Raises:
        ValueError: They are not integers, or do not divide the rows.
    """
    whole = RowRange(0, num_rows)
    if split_sizes is None:
        return [Segment(whole, None)]
    sizes = split_sizes if isinstance(split_sizes, tuple) else (split_sizes,)
    # Not isinstance: True would be one block, and rows of numpy's integers make floats later.
    if any(type(size) is not int for size in sizes):
        raise ValueError(
            f"split_sizes: expected an int or a tuple of them, got {split_sizes!r}. Convert them "
            "with int()"
        )
    if isinstance(split_sizes, int):
        if split_sizes < 1 or num_rows % split_sizes:
            raise ValueError(
                f"split_sizes: expected a number of blocks that divides {num_rows} rows, got "
                f"{split_sizes}. Give the rows of each block as a tuple"
            )
        split_sizes = (num_rows // split_sizes,) * split_sizes
    if split_sizes[-1:] == (-1,) and len(split_sizes) > 1 and sum(split_sizes) + 1 < num_rows:
        split_sizes = (*split_sizes[:-1], num_rows - sum(split_sizes) - 1)
    if not split_sizes or min(split_sizes) < 1 or num_rows % sum(split_sizes):
        raise ValueError(
            f"split_sizes: expected rows of blocks that add up to {num_rows}, or to a divisor of "
            f"it for groups that repeat, got {split_sizes}. Count the rows of the parameter"
        )
    if sum(split_sizes) < num_rows:
        if len(split_sizes) == 1:
            return segments_of(num_rows, num_rows // split_sizes[0])
        return [Segment(whole, split_sizes)]
    ends = list(itertools.accumulate(split_sizes, initial=0))
    return [Segment(RowRange(*ends[i : i + 2]), None) for i in range(len(split_sizes))]


def matrices_of(
    parameter: NamedParameter, boxes: Mapping[int, Box], domain: tuple[int, ...], rank: int
) -> Iterator[tuple[MatrixLayout, MatrixRows | None]]:
    """Yield the matrices of a parameter that a domain exchanges, with this rank's rows of them.

    Args:
        parameter: Viewed as it is planned.
        boxes: The rectangles that the ranks of its mesh hold.
        domain: Ranks that exchange its matrices, ascending.
        rank: This rank.
    """
    ndim, (rows, cols) = parameter.view.ndim, parameter.view.shape[-2:]
    own = boxes[rank]
    segments = segments_of(rows, parameter.split_sizes)
    # By matrices of the batch: the ranks that hold them, with their rows and columns. Matrices that
    # the same ranks hold share one tiling, computed once.
    held: dict[tuple[int, int], list[tuple[int, Box]]] = defaultdict(list)
    for each in domain:
        of_batch = boxes[each][0] if ndim == 3 else (0, 1)
        held[of_batch].append((each, boxes[each][-2:]))
    tilings = {
        of_batch: [_tiling(cols, segment, tuple(ranks)) for segment in segments]
        for of_batch, ranks in held.items()
    }
    # In the order of the batch. Matrices that only other domains hold are left to them.
    found = sorted((number, held_by) for held_by in held for number in range(*held_by))
    for number, held_by in found:
        index = number if ndim == 3 else None
        holds = any(each == rank for each, _ in held[held_by])
        for segment, (blocks, regions) in zip(segments, tilings[held_by], strict=True):
            yield (
                MatrixLayout(
                    _name(parameter.name, index, segment, len(segments)),
                    blocks,
                    regions,
                    domain,
                    is_transposed=parameter.is_transposed,
                ),
                _own_rows(parameter.param, own, index, segment.rows) if holds else None,
            )


def _name(name: str, index: int | None, segment: Segment, num_segments: int) -> str:
    if index is not None:
        name = f"{name}[{index}]"
    if num_segments > 1:
        name = f"{name} rows {segment.rows.start} to {segment.rows.stop - 1}"
    return name


def _own_rows(
    param: torch.Tensor, own: Box, index: int | None, rows: RowRange
) -> MatrixRows | None:
    """Return this rank's rows of a segment, or None if it holds none."""
    (first, last), (left, right) = own[-2:]
    # A segment may begin or end inside a shard, or miss it.
    start, stop = max(rows.start, first), min(rows.stop, last)
    if start >= stop or left == right:
        return None
    position = None if index is None else index - own[0][0]
    return MatrixRows(param, position, start - first, stop - first)


# Equal layers share regions, and what the planner derives from them.
@functools.lru_cache(maxsize=256)
def _tiling(
    num_cols: int, segment: Segment, held: tuple[tuple[int, Box], ...]
) -> tuple[tuple[tuple[int, int], ...], tuple[Region, ...]]:
    """Return the blocks of a segment, and the rectangles that tile them.

    Args:
        num_cols: Columns of the matrix.
        segment: Its rows.
        held: Rows and columns that ranks hold.
    """
    top, bottom = segment.rows
    # Ranks with equal boxes are replicas, whichever axes of the mesh make them so: hybrid sharding,
    # tensor parallelism that replicates, axes of one rank.
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, box in held:
        holders[box].append(rank)
    shapes: list[tuple[int, int]] = []
    regions: list[Region] = []
    for block, runs in enumerate(block_rows(bottom - top, segment.blocks)):
        row = 0
        # Rows of a block are consecutive, though other blocks are between them in the parameter.
        for run in runs:
            for ((first, last), (left, right)), ranks in sorted(holders.items()):
                # Rows of the segment that these ranks hold.
                first, last = max(first, top) - top, min(last, bottom) - top
                start, stop = max(run.start, first), min(run.stop, last)
                if start < stop and left < right:
                    regions.append(
                        Region(
                            holders=tuple(ranks),
                            block=block,
                            row=row + start - run.start,
                            num_rows=stop - start,
                            col=left,
                            num_cols=right - left,
                            local_row=start - first,
                        )
                    )
            row += run.stop - run.start
        shapes.append((row, num_cols))
    return tuple(shapes), tuple(regions)
