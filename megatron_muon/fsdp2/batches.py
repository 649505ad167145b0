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
    """This rank's rows of one matrix, as a view of the local tensor of a parameter.

    Args:
        param: The parameter.
        index: Position in the batch of the local tensor; None if the parameter is no batch.
        rows: Its local rows.
        cols: Its local columns, fewer than all where a transposed parameter is split.
    """

    param: torch.Tensor
    index: int | None
    rows: slice
    cols: slice

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """View them, ``(rows, cols)``, in a tensor shaped like the parameter's local one."""
        # Of a convolution all dimensions but the first are columns.
        matrix = local.flatten(1) if self.index is None else local[self.index]
        return matrix[self.rows, self.cols]


class Segment(NamedTuple):
    """Outputs of the matrices of a parameter that are orthogonalized separately.

    Outputs are rows, or columns if the parameter is transposed.

    Args:
        rows: The outputs.
        blocks: For groups that repeat, the outputs of one group by block, such as query, key and
            value; None for one block.
        step: Distance of its outputs: 1, or the number of interleaved segments.
    """

    rows: RowRange
    blocks: tuple[int, ...] | None
    step: int = 1

    def within(self, first: int, last: int) -> tuple[int, slice, int]:
        """Return what a shard has of it.

        Args:
            first: First output of the shard.
            last: The output after its last one.

        Returns:
            The position in the segment, the outputs in the shard, and their number.
        """
        position = max(0, -(-(first - self.rows.start) // self.step))
        start = self.rows.start + position * self.step
        stop = max(start, min(last, self.rows.stop))
        return (
            position,
            slice(start - first, stop - first, self.step),
            len(range(start, stop, self.step)),
        )


def segments_of(
    num_rows: int, split_sizes: SplitSizes, *, is_transposed: bool = False
) -> list[Segment]:
    """Return the segments that are orthogonalized separately.

    Consecutive and interleaved blocks become matrices with owners of their own. The blocks of
    repeating groups are many short pieces, which stay with one owner.

    Args:
        num_rows: Outputs of the parameter.
        split_sizes: A number of equal blocks; the outputs of the blocks, which add up to all
            outputs or to those of one group, the last of which may be -1 for the outputs that are
            left; None for one block.
        is_transposed: Whether outputs are columns.

    Raises:
        ValueError: They are not integers, do not divide the outputs, or are groups of columns.
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
        if max(split_sizes) == 1:
            step = len(split_sizes)
            return [Segment(RowRange(start, num_rows), None, step) for start in range(step)]
        if is_transposed:
            raise ValueError(
                f"split_sizes: expected all columns of a transposed matrix, or interleaved ones "
                f"(1, 1), got groups of {split_sizes}. Store it as (outputs, inputs)"
            )
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
    ndim, shape = parameter.view.ndim, tuple(parameter.view.shape[-2:])
    own = boxes[rank]
    segments = segments_of(
        shape[parameter.output_dim], parameter.split_sizes, is_transposed=parameter.is_transposed
    )
    # By matrices of the batch: the ranks that hold them, with their rows and columns. Matrices that
    # the same ranks hold share one tiling, computed once.
    held: dict[tuple[int, int], list[tuple[int, Box]]] = defaultdict(list)
    for each in domain:
        of_batch = boxes[each][0] if ndim == 3 else (0, 1)
        held[of_batch].append((each, boxes[each][-2:]))
    tilings = {
        of_batch: [
            _tiling(shape, parameter.output_dim, segment, tuple(ranks)) for segment in segments
        ]
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
                    _name(parameter, index, segment, len(segments)),
                    blocks,
                    regions,
                    domain,
                    is_transposed=parameter.is_transposed,
                ),
                _own_rows(parameter, own, index, segment) if holds else None,
            )


def _name(parameter: NamedParameter, index: int | None, segment: Segment, num_segments: int) -> str:
    name = parameter.name if index is None else f"{parameter.name}[{index}]"
    if num_segments > 1:
        dim = "columns" if parameter.output_dim else "rows"
        step = f" by {segment.step}" if segment.step > 1 else ""
        name = f"{name} {dim} {segment.rows.start} to {segment.rows.stop - 1}{step}"
    return name


def _own_rows(
    parameter: NamedParameter, own: Box, index: int | None, segment: Segment
) -> MatrixRows | None:
    """Return this rank's rows of a segment, or None if it holds none."""
    ranges = [slice(0, stop - start) for start, stop in own[-2:]]
    # A segment may begin or end inside a shard, or miss it.
    _, ranges[parameter.output_dim], count = segment.within(*own[-2:][parameter.output_dim])
    if not count or any(each.start >= each.stop for each in ranges):
        return None
    position = None if index is None else index - own[0][0]
    return MatrixRows(parameter.param, position, *ranges)


# Equal layers share regions, and what the planner derives from them.
@functools.lru_cache(maxsize=256)
def _tiling(
    shape: tuple[int, int], output_dim: int, segment: Segment, held: tuple[tuple[int, Box], ...]
) -> tuple[tuple[tuple[int, int], ...], tuple[Region, ...]]:
    """Return the blocks of a segment, and the rectangles that tile them.

    Args:
        shape: Of the matrix.
        output_dim: Its dimension of outputs.
        segment: Its outputs.
        held: Rows and columns that ranks hold.
    """
    # Ranks with equal boxes are replicas, whichever axes of the mesh make them so: hybrid sharding,
    # tensor parallelism that replicates, axes of one rank.
    holders: dict[Box, list[int]] = defaultdict(list)
    for rank, box in held:
        holders[box].append(rank)
    num_outputs = len(range(*segment.rows, segment.step))
    shapes: list[tuple[int, int]] = []
    regions: list[Region] = []
    for block, runs in enumerate(block_rows(num_outputs, segment.blocks)):
        size = list(shape)
        size[output_dim] = sum(run.stop - run.start for run in runs)
        shapes.append((size[0], size[1]))
        before = 0
        # Rows of a block are consecutive, though other blocks are between them in the parameter.
        for run in runs:
            for box, ranks in sorted(holders.items()):
                # Outputs of the segment that these ranks hold, and of the run.
                position, _, count = segment.within(*box[output_dim])
                start, stop = max(run.start, position), min(run.stop, position + count)
                ranges = list(box)
                ranges[output_dim] = (before + start - run.start, before + stop - run.start)
                (row, last_row), (col, last_col) = ranges
                if row < last_row and col < last_col:
                    # Only rows have blocks that repeat: all held columns of a segment are taken.
                    local_row = 0 if output_dim else start - position
                    regions.append(
                        Region(
                            holders=tuple(ranks),
                            block=block,
                            row=row,
                            num_rows=last_row - row,
                            col=col,
                            num_cols=last_col - col,
                            local_row=local_row,
                        )
                    )
            before += run.stop - run.start
    return tuple(shapes), tuple(regions)
