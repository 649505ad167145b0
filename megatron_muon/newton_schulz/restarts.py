# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How many steps the Gram form may combine before it must compute the Gram matrix again.

A segment of steps multiplies X by a polynomial q of its Gram matrix R. Rounding moves the
eigenvalues of R, so a small one may become negative, and every step then moves it further: a
segment that is too long diverges. A restart multiplies X by q(R), and begins again with a Gram
matrix without negative eigenvalues.

Rounding moves an eigenvalue r by up to a unit in the last place of the largest one. The error for
the singular value sqrt(r) is then |q(r + unit) - q(r)| sqrt(r). The largest of these, the error of
the segment, may be at most :data:`MAX_ERROR`.

With fp16's unit this gives the restarts that others found by trial: one, after step 2, for five
steps of quintic coefficients; three for ten of deepseekv4; more than one for five of polar_express
and of cans. Source of the Gram form and of restarts: Dao-AILab's gram-newton-schulz.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from megatron_muon.newton_schulz.settings import Coefficients

# Relative to singular values of about 1. The last three steps of quintic have 0.12, the first three
# would have 0.30; errors of real and of hard matrices are far smaller (docs/newton_schulz.md).
MAX_ERROR = 0.2
# fp16 has 11 bits. Also for other dtypes, so that CPU ranks restart as GPUs do.
_UNIT = 2.0**-11
# Grids: linear for singular values, logarithmic for eigenvalues of R, which may be near zero.
_NUM_POINTS = 400
_LEAST_EIGENVALUE = 1e-8


@lru_cache
def segments_of(coefficients: tuple[Coefficients, ...]) -> tuple[int, ...]:
    """Return the number of steps of every segment: fewest segments, then smallest error.

    Raises:
        ValueError: A single step exceeds the error.
    """
    num_steps = len(coefficients)
    largest = [1.0]
    for step in coefficients:
        largest.append(_largest_image(step, largest[-1]))
    # By number of first steps: their best segments, as (number, error, borders).
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
    """Return the error of a segment.

    Args:
        coefficients: By step.
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
    """Return q(r), the factor of a segment for the singular value sqrt(r)."""
    product = 1.0
    for a, b, c in coefficients:
        step = a + b * r + c * r * r
        product *= step
        r *= step * step
    return product


def _largest_image(step: Coefficients, largest: float) -> float:
    """Return the largest singular value after a step, for values up to ``largest`` before."""
    a, b, c = step
    values = (largest * index / _NUM_POINTS for index in range(_NUM_POINTS + 1))
    return max(abs(a * s + b * s**3 + c * s**5) for s in values)
