# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Time the planning of one rank of large jobs, as in a run, without their GPUs.

    .venv/bin/python benchmarks/plan_time.py
    .venv/bin/python benchmarks/plan_time.py --jobs deepseek-v3-16384 --repeats 1 --profile

Process groups are torch's "fake" ones, which send nothing: an all-reduce returns this rank's
value, and a gather of objects this rank's object as often as there are ranks. The rest is that of
a run under Megatron-FSDP: boxes from its buffers, ``find_plan_inputs()``, and ``build_engine()``
with the rates of an H100, without the engine itself, which allocates memory. The rest of
Megatron-LM is not there.

A figure is the minimum of several processes. Times are processor time of the process, memory is
the peak growth of its resident set.
"""

import argparse
import cProfile
import itertools
import json
import os
import pstats
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from large_jobs import one_rank_of


class Size(NamedTuple):
    """A job under Megatron-FSDP ``optim_grads_params``.

    Args:
        preset: Its model.
        dp: Data-parallel ranks.
        ep: Expert-parallel ranks.
    """

    preset: str
    dp: int
    ep: int


JOBS = {
    f"{name}-{dp}": Size(preset, dp, ep)
    for dp in (64, 2048, 16384)
    for name, preset, ep in (
        ("llama3-70b", "llama3-70b", 1),
        ("qwen3-235b", "qwen3-235b-a22b", 8),
        ("deepseek-v3", "deepseek-v3", 64),
    )
}


def parameters_of(size: Size, rank: int) -> Iterator[Any]:
    """Yield the matrices of a rank as Megatron-FSDP's front end plans them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, Shard

    from megatron_muon.plan.layout import Splits
    from megatron_muon.rows.megatron_fsdp import boxes_in_buffer
    from megatron_muon.rows.parameters import PlannedParameter, as_dtensor
    from megatron_muon.tools.plan.model_shape import PRESETS
    from megatron_muon.tools.plan.simulation import unit_buffer

    stages = PRESETS[size.preset].stage(1, size.ep, Splits())
    for layers, num_groups in zip(stages, (1, size.ep), strict=True):
        ranks = list(range(rank % num_groups, size.dp, num_groups))
        group = dist.group.WORLD if num_groups == 1 else dist.new_group(ranks)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
        for layer, parameters in enumerate(layers):
            buffer_size, begins = unit_buffer(tuple(p.shape for p in parameters), len(ranks))
            for parameter, begin in zip(parameters, begins, strict=True):
                if len(shape := parameter.shape) == 2:
                    boxes = boxes_in_buffer(mesh, (0,), buffer_size, begin, shape)
                    start, stop = boxes[rank][0] if rank in boxes else (0, 0)
                    local = torch.empty(stop - start, shape[1], device="meta")
                    view = as_dtensor(local, mesh, [Shard(0)], shape)
                    yield PlannedParameter(
                        f"decoder.layers.{layer}.{parameter.name}",
                        torch.nn.Parameter(view),
                        view,
                        blocks=parameter.blocks(shape[0]),
                        known_boxes=boxes,
                    )


class Planned(NamedTuple):
    """In place of an engine.

    Args:
        plans: Plans of the rank.
        runners: None, as nothing is connected.
    """

    plans: Sequence[Any]
    runners: tuple[()] = ()


def figures(size: Size, rank: int, is_profiled: bool) -> dict[str, float]:
    """Plan as one rank of a job; return sizes of its plans, seconds and megabytes."""
    import torch
    import torch.distributed as dist
    from measure import peak_memory

    from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
    from megatron_muon.plan.cost import gpu_rates
    from megatron_muon.plan.settings import ExchangeSettings
    from megatron_muon.runtime import engine_builder
    from megatron_muon.step import plan_inputs

    device, ends = torch.device("cpu"), []
    newton_schulz = NewtonSchulzSettings(5, "quintic", True, lambda rows, cols: (0.5, 1.0))
    # Fake groups have no timeout, which new groups take from the job's.
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=dist.default_pg_timeout))

    def engine(plans: Any, *_: Any, **__: Any) -> Planned:
        """Return the plans in place of an engine."""
        return Planned(plans)

    with (
        ExitStack() as measured,
        one_rank_of(size.dp, rank),
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="8"),
        mock.patch.object(engine_builder, "_rates", lambda device: gpu_rates(9)),
        mock.patch.object(engine_builder, "Engine", engine),
        mock.patch.object(dist.ProcessGroup, "_get_backend", lambda *_: backend),
    ):
        next(parameters_of(size, rank))  # imports
        peak = measured.enter_context(peak_memory())
        if is_profiled:
            profile = measured.enter_context(cProfile.Profile())
        ends.append(time.process_time())
        parameters = list(parameters_of(size, rank))
        ends.append(time.process_time())
        found = plan_inputs.find_plan_inputs(parameters, device)
        ends.append(time.process_time())
        planned = engine_builder.build_engine(
            found.inputs,
            newton_schulz,
            ExchangeSettings(),
            device=device,
            max_num_plans=found.max_num_plans,
        )
        ends.append(time.process_time())
    if is_profiled:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    boxes_s, layouts_s, plan_s = (stop - start for start, stop in itertools.pairwise(ends))
    return {
        "matrices": sum(len(plan.matrices) for plan in planned.plans),
        "buckets": sum(len(plan.buckets) for plan in planned.plans),
        "boxes_s": boxes_s,
        "layouts_s": layouts_s,
        "plan_s": plan_s,
        "all_s": ends[-1] - ends[0],
        "peak_MB": peak["bytes"] / 1e6,
    }


def main() -> int:
    """Plan every job, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print the slowest functions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    results = {}
    # A process for each: caches are empty, and memory has not been allocated before.
    with ProcessPoolExecutor(1, max_tasks_per_child=1) as processes:
        for name in options.jobs:
            arguments = JOBS[name], options.rank, options.profile
            tasks = [processes.submit(figures, *arguments) for _ in range(options.repeats)]
            repeats = [task.result() for task in tasks]
            results[name] = {key: min(found[key] for found in repeats) for key in repeats[0]}
            if len(results) == 1:
                names = [key.replace("_", " ") for key in results[name]]
                print(f"| job | {' | '.join(names)} |\n| --- |{' --- |' * len(names)}")
            cells = (f"{value:.4g}" for value in results[name].values())
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
