# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Tensors that are adjacent in memory, in several lists at once."""

import torch

from megatron_muon.runtime.tensors import join_adjacent


def test_only_what_is_adjacent_in_all_lists_is_joined():
    """Tensors are joined only if they are adjacent in all lists."""
    first, second = torch.arange(24.0), torch.arange(100.0, 124.0)
    shapes = [(2, 3), (1, 6), (3, 2), (6,)]
    without_gaps = [part.view(shape) for part, shape in zip(first.split(6), shapes, strict=True)]
    with_gap = [second[0:6], second[6:12], second[13:19].clone(), second[18:24]]
    joined, others = join_adjacent(without_gaps, with_gap)
    assert [each.flatten().tolist() for each in joined] == [
        list(range(12)),
        list(range(12, 18)),
        list(range(18, 24)),
    ]
    assert [each.numel() for each in others] == [12, 6, 6]
    (alone,) = join_adjacent(without_gaps)
    assert [each.numel() for each in alone] == [24]
    alone[0].zero_()
    assert not any(bool(each.any()) for each in without_gaps)
    # Descending, and of two allocations.
    assert len(join_adjacent(without_gaps[::-1])[0]) == 4
    assert len(join_adjacent([torch.ones(2), torch.ones(2)])[0]) == 2
    assert join_adjacent([], []) == [[], []]
