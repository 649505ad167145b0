# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One rank of a large job in one process: its real plan, and process groups that send nothing."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Job(NamedTuple):
    """A model on a number of ranks.

    Args:
        preset: Its shape.
        dp: Data-parallel ranks.
        ep: Expert-parallel ranks.
        layers: Layers of the scaled-down model.
        experts: Experts of a layer that a rank has, in the scaled-down model; 0 for none.
    """

    preset: str
    dp: int
    ep: int
    layers: int
    experts: int


JOBS = {
    "llama3-8b-64": Job("llama3-8b", 64, 1, 32, 0),
    "llama3-8b-512": Job("llama3-8b", 512, 1, 32, 0),
    "qwen3-30b-64": Job("qwen3-30b-a3b", 64, 8, 48, 16),
    "qwen3-30b-512": Job("qwen3-30b-a3b", 512, 8, 48, 16),
    "deepseek-v3-64": Job("deepseek-v3", 64, 64, 61, 4),
}
COLLECTIVES = ("all_reduce", "all_to_all_single", "all_gather_into_tensor")


class Completed:
    """A collective that has ended."""

    def wait(self, _timeout: object = None) -> bool:
        """Return True at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


@contextmanager
def one_rank_of(world_size: int, rank: int) -> Iterator[None]:
    """Start process groups that send nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def busiest_rank(job: Job, device: Any, settings: Any = None) -> Iterator[tuple[Any, Any]]:
    """Build the engine of the rank that holds the most matrices.

    Args:
        job: The job.
        device: Where its rows are.
        settings: ``PlanSettings``; None for the defaults.

    Yields:
        The engine, and by handle the rows of this rank, ``(local_rows, cols)`` float32, whose
        memory is not initialized.
    """
    import torch
    import torch.distributed as dist

    from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
    from megatron_muon.plan.layout import Splits
    from megatron_muon.plan.rank_plan import RankSchedule
    from megatron_muon.plan.settings import PlanSettings
    from megatron_muon.runtime.agreement import Domain
    from megatron_muon.runtime.engine import Engine
    from megatron_muon.runtime.plan_runner import PlanInput
    from megatron_muon.tools.plan.model_shape import PRESETS
    from megatron_muon.tools.plan.simulation import Parallelism, simulate

    parallel = Parallelism(job.dp, ep=job.ep)
    planned = simulate(PRESETS[job.preset], parallel, settings or PlanSettings(), Splits())
    held = Counter(
        rank for plan in planned for matrix in plan.matrices for rank in matrix.elements_by_rank
    )
    rank = max(held, key=lambda holder: held[holder])
    plans = [plan for plan in planned if rank in plan.ranks]
    with one_rank_of(job.dp, rank):
        rows: dict[Any, torch.Tensor] = {}
        inputs, groups = [], {}
        for number, plan in enumerate(plans):
            handles = {}
            for index, matrix in enumerate(plan.matrices):
                if rank in matrix.elements_by_rank:
                    cols = matrix.regions[0].num_cols
                    shape = (matrix.elements_by_rank[rank] // cols, cols)
                    handles[index] = (number, index)
                    rows[number, index] = torch.empty(shape, device=device)
            owners = {ranks for ranks in plan.owners if len(ranks) > 1 and rank in ranks}
            groups |= {ranks: dist.new_group(list(ranks)) for ranks in sorted(owners)}
            domain = Domain(plan.ranks, dist.new_group(plan.ranks), None)
            inputs.append(PlanInput(domain, plan.matrices, handles, None))
        newton_schulz = NewtonSchulzSettings(5, "quintic", True, lambda rows, cols: (0.5, 1.0))
        schedule = RankSchedule.build(plans, rank)
        yield Engine(plans, inputs, schedule, groups, newton_schulz, device=device), rows
