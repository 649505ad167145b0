# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of planning on one rank, as a function of the number of ranks.

    .venv/bin/python benchmarks/planning.py
    .venv/bin/python benchmarks/planning.py --dp 512 2048 8192 16384 --hsdp 32

Each row is a process of its own, which does what rank 0 of a run does at construction: it assigns
the experts and the dense matrices of its domains, chooses buckets, works out its own messages and
their memory, and describes the plan for the comparison of hashes. What a run adds are its
collectives and the layouts of its own parameters.
"""

import argparse
import gc
import multiprocessing
import resource
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from megatron_muon.plan import layout
from megatron_muon.plan.preview import simulation
from megatron_muon.plan.preview.model_shape import PRESETS
from megatron_muon.plan.preview.simulation import Machine, Parallelism, Simulation, simulate
from megatron_muon.plan.rank_schedule import RankSchedule
from megatron_muon.plan.settings import ExchangeSettings


class Row(NamedTuple):
    """What was measured.

    Args:
        ranks: Of the job.
        num_matrices: Matrices of the rank's domains.
        num_shards: Shards of them that are not empty.
        seconds: Time of planning.
        peak_mb: Largest resident set of the process, python included.
        plan_mb: Memory of the plans.
        own_mb: Memory of what the rank itself does.
        num_split_groups: Sets of ranks that a rank splits matrices with, at most: each is a
            communicator.
    """

    ranks: int
    num_matrices: int
    num_shards: int
    seconds: float
    peak_mb: float
    plan_mb: float
    own_mb: float
    num_split_groups: int


def plan_rank(preset: str, parallelism: Parallelism) -> tuple[Simulation, RankSchedule]:
    """Plan rank 0 of a job."""
    planned = simulate(PRESETS[preset], parallelism, Machine(), ExchangeSettings(), rank=0)
    for plan in planned.plans:
        plan.entries()
    return planned, RankSchedule.build(planned.plans, 0)


def _clear_caches() -> None:
    for cached in (layout._tiling, layout._elements_by_rank, simulation._cached_layouts):
        cached.cache_clear()
    gc.collect()


def measure(job: tuple[str, Parallelism]) -> Row:
    """Plan twice: for the time, and for the memory, which is slow to trace."""
    start = time.perf_counter()
    job_plans, _ = plan_rank(*job)
    seconds = time.perf_counter() - start
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    matrices = [matrix for plan in job_plans.plans for matrix in plan.matrices]
    num_matrices = len(matrices)
    num_shards = sum(len(matrix.elements_by_rank) for matrix in matrices)
    groups = Counter(
        rank for plan in job_plans.plans for owners in plan.sets_of_owners for rank in owners
    )
    del job_plans, matrices
    _clear_caches()
    tracemalloc.start()
    both = plan_rank(*job)
    # What caches hold for plans belongs to these: they keep it alive.
    _clear_caches()
    all_mb = tracemalloc.get_traced_memory()[0] / 1e6
    own = both[1]
    del both
    gc.collect()
    own_mb = tracemalloc.get_traced_memory()[0] / 1e6
    del own
    gc.collect()
    left_mb = tracemalloc.get_traced_memory()[0] / 1e6
    return Row(
        ranks=job[1].dp,
        num_matrices=num_matrices,
        num_shards=num_shards,
        seconds=seconds,
        peak_mb=peak_mb,
        plan_mb=all_mb - own_mb,
        own_mb=own_mb - left_mb,
        num_split_groups=max(groups.values(), default=0),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="qwen3-235b-a22b")
    parser.add_argument("--dp", type=int, nargs="+", default=[128, 512, 2048, 4096, 8192, 16384])
    parser.add_argument("--ep", type=int, default=8)
    parser.add_argument("--hsdp", type=int, default=1, help="optimizer instances")
    options = parser.parse_args(arguments)
    layouts = [Parallelism(dp=dp, ep=options.ep, hsdp=options.hsdp) for dp in options.dp]
    print("| ranks | matrices | shards | seconds | peak MB | plans MB | own part MB | groups |")
    print("| ---: " * len(Row._fields) + "|")
    # A process for each row: the largest resident set never shrinks.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(measure, [(options.preset, each) for each in layouts]):
            cells = [
                *(f"{row.ranks:,}", f"{row.num_matrices:,}", f"{row.num_shards:,}"),
                *(f"{row.seconds:.1f}", f"{row.peak_mb:.0f}"),
                *(f"{row.plan_mb:.1f}", f"{row.own_mb:.1f}", str(row.num_split_groups)),
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
