# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Many tensors as one: the same memory, or nothing."""

import pytest
import torch

from megatron_muon.runtime.equally_spaced import as_one


def _views(offsets: list[int], strides: tuple[int, int] = (3, 1)) -> list[torch.Tensor]:
    memory = torch.arange(100.0)
    return [memory.as_strided((2, 3), strides, offset) for offset in offsets]


@pytest.mark.parametrize("offsets", [[5], [0, 6], [4, 10, 16], [0, 20, 40, 60]])
def test_even_tensors_become_one_that_shares_their_memory(offsets):
    """Adjacent ones, and ones with a gap between them."""
    tensors = _views(offsets)
    one = as_one(tensors)
    assert torch.equal(one, torch.stack(tensors))
    one.mul_(2)
    assert torch.equal(one, torch.stack(tensors))


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param(_views([0, 6, 13]), id="uneven"),
        pytest.param(_views([12, 6, 0]), id="descending"),
        pytest.param(_views([0, 3, 6]), id="overlapping"),
        pytest.param(_views([0, 0]), id="the same twice"),
        pytest.param([*_views([0]), *_views([6])], id="two storages"),
        pytest.param([*_views([0]), _views([6])[0][:1]], id="two shapes"),
        pytest.param([torch.zeros(2, 3), torch.zeros(3, 2).T], id="two strides"),
    ],
)
def test_other_tensors_stay_apart(tensors):
    """A view of them would read or write what is not theirs."""
    assert as_one(tensors) is None
