# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How many steps the Gram form may take before it has to compute the Gram matrix again.

A segment of steps multiplies X by a polynomial q of its Gram matrix R. Rounding moves the
eigenvalues of R, so a small one may become negative, and from there each step takes it further: a
segment that is too long diverges. A restart multiplies X by q(R), and begins again with a Gram
matrix that has no negative eigenvalues.

Rounding moves an eigenvalue r by up to a unit in the last place of the largest one. The result of
the singular value sqrt(r) is then off by |q(r + unit) - q(r)| sqrt(r), and the largest of these
is what the segment makes of rounding. It may be at most :data:`MAX_ERROR`.

With fp16's unit this finds what others found by trying: one restart, after step 2, for five steps
of quintic coefficients; three for ten of deepseekv4; more than one for five of polar_express and of
cans. Source of the Gram form and of restarts: Dao-AILab's gram-newton-schulz.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from megatron_muon.newton_schulz.coefficients import Coefficients

# Of a result whose singular values are about 1. A segment of quintic's last three steps has 0.12,
# and its first three would have 0.30; errors of real and of hard matrices stay far below it
# (docs/newton_schulz.md).
MAX_ERROR = 0.2
# fp16 has 11 bits. The points do not follow the dtype of a run: CPU ranks then rehearse a GPU's.
_UNIT = 2.0**-11
# Grids of singular values: even where the polynomials wave, logarithmic where R is nearly singular.
_NUM_POINTS = 400
_LEAST_EIGENVALUE = 1e-8


@lru_cache
def segments_of(coefficients: tuple[Coefficients, ...]) -> tuple[int, ...]:
    """Return the steps of each segment: as few segments as possible, then the smallest error.

    Raises:
        ValueError: Even single steps exceed the error.
    """
    num_steps = len(coefficients)
    largest = [1.0]
    for step in coefficients:
        largest.append(_largest_image(step, largest[-1]))
    # By number of steps: the best way to take the first of them, as (segments, error, borders).
    best: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, (0,))]
    for end in range(1, num_steps + 1):
        ways = []
        for start in range(end):
            error = segment_error(coefficients[start:end], largest[start])
            if error <= MAX_ERROR and math.isfinite(best[start][1]):
                count, before, borders = best[start]
                ways.append((count + 1, max(before, error), (*borders, end)))
        if not ways:
            raise ValueError(
                f"gram: expected coefficients whose single steps keep rounding below {MAX_ERROR}, "
                f"got {coefficients[end - 1]}. Use exchange.newton_schulz standard."
            )
        best.append(min(ways))
    return tuple(end - start for start, end in pairwise(best[num_steps][2]))


def segment_error(coefficients: Sequence[Coefficients], largest: float) -> float:
    """Return what a segment makes of rounding.

    Args:
        coefficients: Of its steps.
        largest: Largest singular value of X before it.
    """
    unit = _UNIT * largest**2
    span = math.log(largest**2 / _LEAST_EIGENVALUE)
    worst = 0.0
    for index in range(_NUM_POINTS + 1):
        r = _LEAST_EIGENVALUE * math.exp(span * index / _NUM_POINTS)
        exact = _factor(r, coefficients)
        off = max(abs(_factor(r + moved, coefficients) - exact) for moved in (unit, -unit))
        if not math.isfinite(off):
            return math.inf
        worst = max(worst, off * math.sqrt(r))
    return worst


def _factor(r: float, coefficients: Sequence[Coefficients]) -> float:
    """Return q(r): what a segment multiplies the singular value sqrt(r) by."""
    product = 1.0
    for a, b, c in coefficients:
        step = a + b * r + c * r * r
        product *= step
        r *= step * step
    return product


def _largest_image(step: Coefficients, largest: float) -> float:
    """Return the largest singular value after one step of those up to ``largest``."""
    a, b, c = step
    values = (largest * index / _NUM_POINTS for index in range(_NUM_POINTS + 1))
    return max(abs(a * s + b * s**3 + c * s**5) for s in values)
