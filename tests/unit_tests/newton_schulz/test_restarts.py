# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Where the Gram form restarts: computed, against what others found by trying."""

import pytest

from megatron_muon.newton_schulz.restarts import MAX_ERROR, segment_error, segments_of
from megatron_muon.newton_schulz.settings import coefficients_of
from megatron_muon.plan.cost import _QUINTIC_SEGMENTS, CostModel


@pytest.mark.parametrize(
    ("coefficient_type", "steps", "segments"),
    [
        # One restart, after step 2: what gram-newton-schulz does by default.
        ("quintic", 5, (2, 3)),
        ("simple", 5, (3, 2)),
        ("aol", 4, (2, 2)),
        # Unsafe with one restart.
        ("polar_express", 5, (1, 2, 2)),
        ("cans", 5, (1, 2, 2)),
        ("polar_express", 8, (2, 2, 4)),
        # Needs three.
        ("deepseekv4", 10, (3, 2, 2, 3)),
    ],
)
def test_segments_are_as_few_as_rounding_allows(coefficient_type, steps, segments):
    """Steps of other sets amplify a small eigenvalue more."""
    assert segments_of(coefficients_of(steps, coefficient_type)) == segments


def test_plan_knows_the_segments_of_the_default_coefficients():
    """It is made without torch, and so without emerging-optimizers' coefficients."""
    computed = {n: segments_of(coefficients_of(n, "quintic")) for n in _QUINTIC_SEGMENTS}
    assert computed == _QUINTIC_SEGMENTS
    # Beyond them too, steps are as many as they are.
    for steps in range(1, 13):
        cost = CostModel(num_ns_steps=steps)
        assert cost.work(64, 64).flops == steps * 6 * 64**3
    with pytest.raises(ValueError, match=r"expected segments of 5 steps, got \(2, 2\)"):
        CostModel(segments=(2, 2))


def test_error_of_a_segment_grows_with_its_length():
    """By an order of magnitude a step: the bound is not a close call."""
    steps = coefficients_of(5, "quintic")
    errors = [segment_error(steps[:length], 1.0) for length in range(1, 6)]
    assert errors[0] < 0.01 < errors[1] < MAX_ERROR < errors[2] < 1 < errors[3]
    assert all(later > 5 * earlier for earlier, later in zip(errors, errors[1:], strict=False))


def test_coefficients_that_cannot_be_used_are_refused():
    """A step that makes 1e6 of rounding has no safe segment."""
    with pytest.raises(ValueError, match=r"gram: expected coefficients.*got \(3.0, -1000000.0, 0"):
        segments_of(((3.0, -1e6, 0.0),))
