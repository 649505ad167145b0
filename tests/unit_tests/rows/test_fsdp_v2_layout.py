# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Rows of all ranks under version 2 of Megatron-FSDP, of the generation that is installed."""

import copy
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.megatron_fsdp import module_of
from helpers.ranks import run_ranks
from torch.distributed.tensor import Replicate, Shard

from megatron_muon.rows.megatron_fsdp import tensor_shard_boxes

pytest.importorskip("hypothesis")  # environments of check_compat.py lack it

from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]


def _rows_by_upstream(layout: Any, mesh_shape: list[int], sharded: list[bool]) -> list[Any]:
    """Return rows by tensor and rank, of what ``get_local_range`` says on each rank."""
    # In main the buffer makes its own of torch's.
    flat = module_of("experimental.placement").Flat()
    placements = [flat if is_sharded else None for is_sharded in sharded]
    found: list[Any] = [[] for _ in layout.tensor_shapes]
    for place in itertools.product(*map(range, mesh_shape)):
        mesh = SimpleNamespace(size=mesh_shape.__getitem__, get_local_rank=place.__getitem__)
        start, length = layout.get_local_range(mesh, placements)
        held = range(start, start + length)
        for rows, shape, begin in zip(
            found, layout.tensor_shapes, layout.tensor_to_offset, strict=True
        ):
            size = shape[1:].numel()
            # Rows of which all elements are here: one that were cut would be on no rank.
            own_rows = [
                i
                for i in range(shape[0])
                if begin + i * size in held and begin + (i + 1) * size - 1 in held
            ]
            rows.append([own_rows[0], own_rows[-1] + 1] if own_rows else [0, 0])
    return found


def _compare_rows(cases: list[Any]) -> list[Any]:
    """Return the cases, shapes and axes, whose rows are others than upstream's."""
    build = module_of("experimental.layout").GlobalLayout.build
    different = []
    for shapes, axes in cases:
        mesh_shape, sharded = [size for size, _ in axes], [is_sharded for _, is_sharded in axes]
        layout = build(shapes, math.prod(mesh_shape))
        # Hashed by identity, as a mesh is.
        mesh = type("Mesh", (), {"shape": mesh_shape, "ndim": len(axes)})()
        mesh.size = mesh_shape.__getitem__
        mesh.mesh = torch.arange(math.prod(mesh_shape)).view(mesh_shape)
        placements = tuple(Shard(0) if each else Replicate() for each in sharded)
        param = SimpleNamespace(device_mesh=mesh, placements=placements)
        params = [copy.copy(param) for _ in shapes]
        for each, shape in zip(params, layout.tensor_shapes, strict=True):
            each.shape = shape
        group = SimpleNamespace(
            main_weight=SimpleNamespace(layout=layout),
            parameter_names=[""] * len(params),
            sharded_parameters=params,
            unsharded_parameters=params,
        )
        found = []
        for param in params:
            param._mfsdp_parameter_group = group
            boxes = tensor_shard_boxes(param)
            ranks = range(math.prod(mesh_shape))
            found.append([list(boxes.get(rank, ((0, 0),))[0]) for rank in ranks])
        if found != _rows_by_upstream(layout, mesh_shape, sharded):
            different.append([shapes, axes])
    return different


def _random_cases() -> list[Any]:
    """Let hypothesis draw shapes of a group, and sizes of axes with whether they shard."""
    cases = []
    shapes = st.lists(st.integers(1, 12), min_size=1, max_size=3)
    axes = st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=3)

    @settings(max_examples=300, database=None, derandomize=True)
    @given(st.lists(shapes, min_size=1, max_size=6), axes)
    def draw(shapes: list[list[int]], axes: list[tuple[int, bool]]) -> None:
        cases.append([shapes, axes])

    draw()
    return cases


def test_rows_are_those_of_upstreams_ranges():
    """Rows of all ranks, computed from integers, equal upstream's ranges."""
    cases = _random_cases()
    assert len(cases) == 300
    assert run_ranks(1, _compare_rows, cases).check().results == [[]]
