# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Compare the busiest rank of a plan with the least that any choice of owners could give it.

    .venv/bin/python benchmarks/load_bound.py --dp 512 --newton-schulz gram

With more owners each of them has less of a matrix, and all of them together have more: n x n
products are repeated or exchanged. No plan keeps all ranks within T seconds where a matrix takes
each of its owners longer, however many it has. Nor where all matrices together take longer than all
ranks have in T, each with the number of owners that makes the least work within T. The least T that
is left is found by bisection. Plans can only be worse: they give whole parts to ranks, and weigh
traffic.

Floats only: no GPU, no torch, no ranks.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

from megatron_muon.newton_schulz.registry import BackendChoice, requested_backends
from megatron_muon.plan import ExchangePlan, ExchangeSettings
from megatron_muon.plan.assignment import matrix_seconds
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.preview.model_shape import PRESETS
from megatron_muon.plan.preview.simulation import Machine, Parallelism, simulate

_MAX_PARTS = (1, 2, 4, 8, 16, 32)
_NUM_HALVINGS = 40  # to a millionth of a millionth

# Seconds of each owner of a matrix, with 1, 2, ... owners.
type Choices = tuple[float, ...]


def choices_of(plans: Sequence[ExchangePlan], max_parts: int) -> Counter[Choices]:
    """Count the matrices by what they take with up to so many owners."""
    counts: Counter[Choices] = Counter()
    known: dict[tuple[int, tuple[tuple[int, int], ...]], Choices] = {}
    for plan in plans:
        for matrix in plan.matrices:
            # All layers of a kind have one tuple of ranks.
            key = id(matrix.ranks), matrix.blocks
            if key not in known:
                # Copies of a matrix are never split.
                most = 1 if matrix.has_copies else min(max_parts, len(matrix.ranks))
                known[key] = tuple(
                    matrix_seconds(matrix, plan.cost, parts) for parts in range(1, most + 1)
                )
            counts[known[key]] += 1
    return counts


def least_busiest(counts: Mapping[Choices, int], num_ranks: int) -> float:
    """Return the seconds that the busiest rank has at least.

    Args:
        counts: Matrices by what they take.
        num_ranks: Ranks.
    """

    def is_possible(most_s: float) -> bool:
        work_s = 0.0
        for seconds, count in counts.items():
            within = [parts * s for parts, s in enumerate(seconds, start=1) if s <= most_s]
            work_s += count * min(within, default=math.inf)
        return work_s <= num_ranks * most_s

    low, high = 0.0, sum(seconds[0] * count for seconds, count in counts.items())
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return high


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="llama3-8b")
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--newton-schulz", choices=get_args(BackendChoice), default="standard")
    options = parser.parse_args(arguments)
    parallel = Parallelism(dp=options.dp, ep=options.ep)
    machine = Machine(cost=CostModel(backends=requested_backends(options.newton_schulz)))
    print("| most owners | least busiest ms | / ideal | busiest of the plan, ms | / least |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for max_parts in _MAX_PARTS:
        settings = ExchangeSettings(newton_schulz=options.newton_schulz, max_parts=max_parts)
        plans = simulate(PRESETS[options.preset], parallel, machine, settings).plans
        counts = choices_of(plans, max_parts)
        ideal_s = sum(seconds[0] * count for seconds, count in counts.items()) / options.dp
        least_s = least_busiest(counts, options.dp)
        busiest_s = _busiest(plans)
        print(
            f"| {max_parts} | {1e3 * least_s:.2f} | {least_s / ideal_s:.2f} | "
            f"{1e3 * busiest_s:.2f} | {busiest_s / least_s:.2f} |"
        )
    return 0


def _busiest(plans: Sequence[ExchangePlan]) -> float:
    """Return the seconds of the busiest rank, over all kinds."""
    return max(seconds for plan in plans for seconds in plan.assignment.load_s.values())


if __name__ == "__main__":
    sys.exit(main())
