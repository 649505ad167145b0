# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Rectangles of every rank of a mesh, against torch's own offsets; splits of rows."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megatron_muon.fsdp2.parameters import PlannedParameter
from megatron_muon.plan.layout import OutputSlice
from megatron_muon.rows.matrices import matrices_of, output_slices
from megatron_muon.rows.megatron_fsdp import tensor_shard_layout
from megatron_muon.rows.parameters import boxes_of_placements


def _mesh(shape: tuple[int, ...]) -> Any:
    """Stand in for a mesh of ranks in reverse, as meshes may have any."""
    ranks = torch.arange(math.prod(shape)).flip(0).view(shape)
    return SimpleNamespace(shape=shape, mesh=ranks, ndim=len(shape), size=lambda axis: shape[axis])


@st.composite
def fsdp2_layouts(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]:
    """Draw mesh, placements and shape as ``fully_shard`` makes them: replicas, shards, tensor."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    sizes: list[int] = []
    placements: list[Placement] = []
    if draw(st.booleans()):
        sizes.append(draw(st.integers(1, 3)))
        placements.append(Replicate())
    tensor = draw(st.sampled_from(["none", "replicated", "sharded"]))
    tensor_size = draw(st.integers(1, 4))
    tensor_dim = draw(dims)
    dim = draw(dims)
    sizes.append(draw(st.integers(1, 5)))
    # FSDP2 shards what tensor parallelism has sharded before, from an axis further left.
    is_strided = tensor == "sharded" and tensor_dim == dim
    placements.append(_StridedShard(dim, split_factor=tensor_size) if is_strided else Shard(dim))
    if tensor != "none":
        sizes.append(tensor_size)
        placements.append(Shard(tensor_dim) if tensor == "sharded" else Replicate())
    return tuple(sizes), tuple(placements), shape


def _shard_of(
    whole: torch.Tensor, coordinate: tuple[int, ...], layout: tuple[Any, ...]
) -> torch.Tensor:
    """Cut out what a rank holds as FSDP2 does: tensor-parallel blocks first, then their shards."""
    mesh_shape, placements, _ = layout
    local = whole
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if not placement.is_replicate():
            chunks = local.chunk(mesh_shape[axis], dim=placement.dim)
            nothing = local.narrow(placement.dim, 0, 0)
            chunks = [*chunks, *[nothing] * (mesh_shape[axis] - len(chunks))]
            local = chunks[coordinate[axis]]
    return local


@given(fsdp2_layouts())
def test_rectangles_are_what_fsdp2_cuts(layout):
    """The boxes of all ranks are FSDP2's shards, empty ones included.

    Offsets of torch, by which checkpoints are written, are those but for uneven strided shards: of
    7 rows over 2 x 3 ranks torch 2.11 gets two wrong; ``full_tensor()`` has them right. Such
    parameters are refused: ``test_refusals.py``.
    """
    mesh_shape, placements, shape = layout
    mesh = _mesh(mesh_shape)
    boxes = boxes_of_placements.__wrapped__(mesh, placements, shape)
    assert sorted(boxes) == list(range(math.prod(mesh_shape)))
    whole = torch.arange(math.prod(shape)).view(shape)
    is_strided = any(isinstance(each, _StridedShard) for each in placements)
    is_torch_right = not is_strided or all(size % mesh_shape[-1] == 0 for size in shape)
    for coordinate in itertools.product(*map(range, mesh_shape)):
        box = boxes[int(mesh.mesh[coordinate])]
        shard = _shard_of(whole, coordinate, layout)
        assert torch.equal(whole[tuple(slice(*each) for each in box)], shard)
        if is_torch_right:
            size, offset = _compute_local_shape_and_global_offset(
                shape, mesh_shape, list(coordinate), placements
            )
            assert tuple(stop - start for start, stop in box) == tuple(size)
            assert 0 in size or tuple(start for start, _ in box) == tuple(offset)


def test_placements_that_version_1_leaves_out_replicate():
    """An axis for which version 1 has no placement replicates."""
    mesh = _mesh((2, 3))
    param = SimpleNamespace(
        device_mesh=mesh,
        placements=(Replicate(),),
        shape=(8, 4),
        orig_param=torch.empty(8, 4),
        _megatron_fsdp_model=None,
    )
    assert tensor_shard_layout(param) == (mesh, (Replicate(), Replicate()))


@given(fsdp2_layouts(), st.data())
def test_matrices_tile_a_parameter(layout, data):
    """Matrices assembled from the views of all ranks equal the whole parameter's."""
    mesh_shape, placements, shape = layout
    boxes = boxes_of_placements.__wrapped__(_mesh(mesh_shape), placements, shape)
    whole = torch.arange(math.prod(shape)).view(shape)
    num_blocks = 1
    if len(shape) == 2:
        divisors = [n for n in range(1, shape[0] + 1) if shape[0] % n == 0]
        num_blocks = data.draw(st.sampled_from(divisors))
    domain = tuple(sorted(boxes))
    param = torch.empty(shape)
    sizes = num_blocks if num_blocks > 1 else None
    parameter = PlannedParameter("w", param, param, sizes, known_boxes=boxes)
    of_ranks = [list(matrices_of(parameter, domain, rank)) for rank in domain]
    expected = list(whole) if len(shape) == 3 else list(whole.split(shape[0] // num_blocks))
    assert len(of_ranks[0]) == len(expected)
    for index, block in enumerate(expected):
        matrix = of_ranks[0][index][0]
        assert all(each[index][0] == matrix for each in of_ranks)
        built = torch.full_like(block, -1)
        for region in matrix.regions:
            for rank in region.holders:
                box = boxes[rank]
                local = whole[tuple(slice(*each) for each in box)]
                rows = of_ranks[rank][index][1].of(local)
                part = rows[region.local_row : region.local_row + region.num_rows]
                built[
                    region.row : region.row + region.num_rows,
                    region.col : region.col + region.num_cols,
                ] = part
        assert torch.equal(built, block)


@pytest.mark.parametrize(
    ("num_rows", "split_sizes", "expected"),
    [
        (6, None, [((0, 6), None)]),
        (6, 1, [((0, 6), None)]),
        (6, 3, [((0, 2), None), ((2, 4), None), ((4, 6), None)]),
        (6, (2,), [((0, 2), None), ((2, 4), None), ((4, 6), None)]),
        (6, (6,), [((0, 6), None)]),
        (6, (1, 3, 2), [((0, 1), None), ((1, 4), None), ((4, 6), None)]),
        (12, (4, 1, 1), [((0, 12), (4, 1, 1))]),
    ],
)
def test_blocks_that_repeat_stay_together(num_rows, split_sizes, expected):
    """Blocks that repeat stay in one matrix, and others have owners of their own."""
    assert output_slices(num_rows, split_sizes) == [
        OutputSlice(range(*rows), blocks) for rows, blocks in expected
    ]


def test_interleaved_outputs_have_owners_of_their_own():
    """Interleaved outputs have owners of their own, and groups of columns are refused."""
    assert output_slices(7 * 2, (1, 1), is_transposed=True) == [
        OutputSlice(range(0, 14, 2)),
        OutputSlice(range(1, 14, 2)),
    ]
    with pytest.raises(ValueError, match="split_sizes: expected all columns of a transposed"):
        output_slices(12, (4, 1, 1), is_transposed=True)


@pytest.mark.parametrize("split_sizes", [0, -1, 4, (), (0, 6), (4, 3), (-1, 7)])
def test_blocks_that_do_not_divide_are_refused(split_sizes):
    """Sizes of blocks that leave rows out are refused."""
    with pytest.raises(ValueError, match="split_sizes: expected"):
        output_slices(6, split_sizes)
