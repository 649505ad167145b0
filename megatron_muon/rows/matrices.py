# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Matrices of a parameter: one, a batch, or slices of a fused one."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_muon.plan.layout import (
    Box,
    MatrixLayout,
    MatrixShape,
    OutputSlice,
    Range,
    Ranks,
    tile,
)
from megatron_muon.rows.parameters import PlannedParameter, SplitSizes


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Index of this rank's rows of one matrix in the local tensor of a parameter.

    Args:
        param: The parameter.
        index: Position in the batch of the local tensor; None if the parameter is no batch.
        rows: Local rows.
        cols: Local columns; not all of them in a split transposed parameter.
    """

    param: torch.Tensor
    index: int | None
    rows: slice
    cols: slice

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """View the rows, ``(rows, cols)``, in a tensor shaped like the parameter's local one."""
        # All dimensions of a convolution but the first are columns.
        matrix = local.flatten(1) if self.index is None else local[self.index]
        return matrix[self.rows, self.cols]


def output_slices(
    num_rows: int, split_sizes: SplitSizes, *, is_transposed: bool = False
) -> list[OutputSlice]:
    """Return the slices of outputs that are orthogonalized separately.

    Consecutive and interleaved blocks become separate matrices with their own owners. Blocks of
    repeating groups consist of many short row ranges, and stay with one owner.

    Args:
        num_rows: Outputs of the parameter.
        split_sizes: A number of equal blocks; or the outputs of the blocks, in all or of one group
            that repeats (a last -1 stands for the remaining outputs); None for one block.
        is_transposed: Whether outputs are columns.

    Raises:
        ValueError: They are not integers, do not divide the outputs, or are groups of columns.
    """
    whole = range(num_rows)
    if split_sizes is None:
        return [OutputSlice(whole)]
    sizes = split_sizes if isinstance(split_sizes, tuple) else (split_sizes,)
    # Not isinstance: True would be one block, and rows of numpy's integers make floats later.
    if any(type(size) is not int for size in sizes):
        raise ValueError(
            f"split_sizes: expected an int or a tuple of them, got {split_sizes!r}. Convert them "
            "with int()"
        )
    if isinstance(split_sizes, int):
        sizes = (num_rows // split_sizes,) * split_sizes if split_sizes > 0 else ()
    elif sizes[-1:] == (-1,) and len(sizes) > 1 and sum(sizes) + 1 < num_rows:
        sizes = (*sizes[:-1], num_rows - sum(sizes) - 1)
    if not sizes or min(sizes) < 1 or num_rows % sum(sizes):
        raise ValueError(
            f"split_sizes: expected a number of blocks that divides {num_rows} rows, or rows of "
            "blocks that add up to them, or to a divisor for groups that repeat, got "
            f"{split_sizes}. Count the rows of the parameter"
        )
    num_groups = num_rows // sum(sizes)
    if len(sizes) == 1:
        sizes, num_groups = sizes * num_groups, 1
    if num_groups == 1:
        ends = itertools.accumulate(sizes, initial=0)
        return [OutputSlice(range(*ends)) for ends in itertools.pairwise(ends)]
    if max(sizes) == 1:
        step = len(sizes)
        return [OutputSlice(range(start, num_rows, step)) for start in range(step)]
    if is_transposed:
        raise ValueError(
            "split_sizes: expected all columns of a transposed matrix, or interleaved ones (1, 1), "
            f"got groups of {split_sizes}. Store it as (outputs, inputs)"
        )
    return [OutputSlice(whole, sizes)]


def matrices_of(
    parameter: PlannedParameter, domain: Ranks, rank: int
) -> Iterator[tuple[MatrixLayout, RowIndex | None]]:
    """Yield the matrices of a parameter that a domain exchanges, and the rows of ``rank``."""
    is_batch, is_transposed = parameter.view.ndim == 3, parameter.is_transposed
    shape: MatrixShape = tuple(parameter.view.shape[-2:])  # type: ignore[assignment]
    dim = int(is_transposed)
    slices = [OutputSlice(range(shape[0]), parameter.blocks)]
    if parameter.blocks is None:
        try:
            slices = output_slices(shape[dim], parameter.split_sizes, is_transposed=is_transposed)
        except ValueError as error:
            raise ValueError(f"{parameter.name}: {error}") from error
    # Matrices of the batch with the same holders share one tiling.
    boxes_by_range: dict[Range, dict[int, Box]] = defaultdict(dict)
    all_boxes = parameter.boxes
    for holder in all_boxes.keys() & domain:
        box = all_boxes[holder]
        boxes_by_range[box[0] if is_batch else (0, 1)][holder] = box[-2:]
    tilings = {
        batch_range: [tile(shape, outputs, boxes, dim) for outputs in slices]
        for batch_range, boxes in boxes_by_range.items()
    }
    # In the order of the batch. Other domains plan the matrices that only they hold.
    order = sorted((number, held) for held in boxes_by_range for number in range(*held))
    for number, batch_range in order:
        own_box = boxes_by_range[batch_range].get(rank)
        for outputs, (blocks, regions) in zip(slices, tilings[batch_range], strict=True):
            name = f"{parameter.name}[{number}]" if is_batch else parameter.name
            if len(slices) > 1:
                held = outputs.outputs
                step = f" by {held.step}" if held.step > 1 else ""
                name += f" {'columns' if dim else 'rows'} {held.start} to {held.stop - 1}{step}"
            index = number - batch_range[0] if is_batch else None
            rows = None
            if own_box is not None:
                rows = _own_rows(parameter.param, own_box, index, outputs, dim)
            yield MatrixLayout(name, blocks, regions, domain, is_transposed), rows


def _own_rows(
    param: torch.Tensor, box: Box, index: int | None, outputs: OutputSlice, dim: int
) -> RowIndex | None:
    """Return the rows of a slice in the box of this rank, or None if there are none."""
    ranges = [slice(0, stop - start) for start, stop in box]
    # A slice may begin or end inside a shard, or miss it.
    _, ranges[dim], _ = outputs.within(*box[dim])
    if any(side.start >= side.stop for side in ranges):
        return None
    return RowIndex(param, index, *ranges)
