# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Time the host in an optimizer step of large jobs, without their GPUs.

    .venv/bin/python benchmarks/host_time.py

One process is one rank of the job. Its process groups are torch's "fake" ones, which send nothing.
Two parts of a step have times of their own:

- **the engine**, with the plan of the real model: rows have the real shapes, and memory that is
  never touched. The code goes the way of a GPU. The rank is the one that holds the most matrices;
- **everything else of our step**, from ``FSDPMuonChainedOptimizer.step``: a Megatron-FSDP model
  with as many layers, experts and ranks, whose matrices are scaled down. The engine is left out.
  ``torch.optim.AdamW(foreach=True)`` steps the same rows as plain tensors, after
  ``clip_grad_norm_(foreach=True)``, which our step does too. Two functions of Megatron-FSDP that
  run around any step have times of their own, with the mode that makes CPU ranks.

What would be launched on a GPU is replaced by a function that does nothing, once everything is
built: element-wise functions of ``torch``, ``_foreach_`` functions, Newton-Schulz, and the kernels
that move rows, and in the engine collectives. What is timed is Python, and the calls of ``Tensor``
methods that are not replaced, which are few. A launch costs a GPU's host about 5 us more, a Triton
kernel about 15 us, a collective 100 us or more: their numbers are printed beside the time. A
``_foreach_`` call counts as one launch.

The time is the processor time of the thread, the minimum of several steps.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from counting import Launches, count_launches, replace_arithmetic
from gpt_under_fsdp import build_gpt, build_muon, norms_as_on_a_gpu
from large_jobs import COLLECTIVES, JOBS, Completed, Job, busiest_rank, one_rank_of

STEPS = 15
HIDDEN, HEADS = 128, 4


def least_us(step: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
    """Return the processor time of this thread in a step, the minimum of several.

    Args:
        step: What is timed.
        before: Called before each step, and not timed.
    """
    times = []
    for _ in range(STEPS):
        before()
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    return 1e6 * min(times)


def move_rows_as_on_a_gpu() -> None:
    """Let the kernel move rows, and one call orthogonalize a stack."""
    from megatron_muon.runtime import local_rows, row_moves

    row_moves.uses_kernel = lambda device: True
    # CPU ranks orthogonalize one matrix at once.
    local_rows.batch_size = len


def engine_figures(job: Job) -> dict[str, float]:
    """Time the engine of the rank that holds the most matrices."""
    import torch
    import torch.distributed as dist

    norms_as_on_a_gpu()
    move_rows_as_on_a_gpu()
    with busiest_rank(job, torch.device("cpu")) as (engine, rows):
        launches = Launches()
        replace_arithmetic(launches)
        # Fake process groups copy messages to oneself, and so touch the memory.
        for name in COLLECTIVES:
            launches.replace(dist, name, lambda *_, **__: Completed())
        try:
            step = lambda: list(engine.orthogonalize(rows, rows))  # noqa: E731
            step()
            counts = count_launches(launches, step)
            with torch._C.DisableTorchFunction():
                time_us = least_us(step)
                # Other dictionaries, as where gradients are in new memory in every step.
                moved_us = least_us(lambda: list(engine.orthogonalize(dict(rows), dict(rows))))
        finally:
            launches.restore()
    products = counts.pop("run", 0)
    collectives = sum(counts.pop(name, 0) for name in COLLECTIVES)
    return {
        "matrices": len(rows),
        "stacks": products,
        "collectives": collectives,
        "engine_us": time_us,
        "moved_us": moved_us,
        "engine_launches": sum(counts.values()),
    }


def build_scaled_model(job: Job) -> Any:
    """Wrap a scaled-down GPT in Megatron-FSDP, as one of the ranks of the job."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=job.ep, create_gloo_process_groups=False
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    experts: dict[str, Any] = {}
    if job.experts:
        experts = {
            "num_moe_experts": job.experts * job.ep,
            "moe_ffn_hidden_size": HIDDEN,
            "expert_model_parallel_size": job.ep,
            "moe_token_dispatcher_type": "alltoall",
        }
    return build_gpt(
        512,
        32,
        num_layers=job.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        normalization="RMSNorm",
        add_bias_linear=False,
        **experts,
    )


class NoEngine:
    """Yield all parameters of which this rank holds rows at once."""

    def __init__(self, parameters: Sequence[Any], *_: Any, **__: Any) -> None:
        from megatron_muon.rows.matrices import RowIndex

        self.plans: list[Any] = []
        self.moments: list[Any] = []
        self.handles = [
            RowIndex(parameter.param, None, slice(None), slice(None))
            for parameter in parameters
            if parameter.param._local_tensor.numel()
        ]

    def reserve(self, others: Any = None) -> None:
        """Reserve nothing."""

    def forget(self) -> None:
        """Drop nothing."""

    def release(self) -> None:
        """Return nothing."""

    def orthogonalize(
        self, updates: Any, results: Any, overlap_fn: Any = None
    ) -> Iterator[Sequence[Any]]:
        """Return what an engine would, in one piece."""
        yield self.handles


def no_plans(parameters: Sequence[Any], *_: Any, **__: Any) -> Any:
    """Return the parameters in place of plan inputs."""
    from megatron_muon.step.plan_inputs import PlanInputs

    return PlanInputs(list(parameters), [], 0, None)


def outer_figures(job: Job) -> dict[str, float]:
    """Time what is not the engine, by part, and AdamW."""
    from unittest import mock

    import torch
    from megatron.core.optimizer import optimizer as mcore_optimizer

    from megatron_muon.mcore import chained_optimizer
    from megatron_muon.step import muon_step

    with one_rank_of(job.dp, 0):
        model = build_scaled_model(job)
        # Plans are made from what other ranks say, and these say nothing.
        with (
            mock.patch.object(muon_step, "find_plan_inputs", no_plans),
            mock.patch.object(muon_step, "build_engine", NoEngine),
        ):
            optimizer = build_muon(model)
        model.finish_grad_sync()
        params = optimizer.get_parameters()
        held = [param for param in params if param.grad is not None]
        for param in held:
            param.grad._local_tensor.fill_(1e-3)
        copies = [torch.nn.Parameter(param._local_tensor.clone()) for param in held]
        adam = torch.optim.AdamW(copies, foreach=True)
        for copy in copies:
            copy.grad = torch.full_like(copy, 1e-3)

        adam.step()

        def attach() -> None:
            """View gradients anew, as Megatron-FSDP does in every step."""
            for param in held:
                local = param.grad._local_tensor
                param.grad._local_tensor = local.view(local.shape)

        attach_us = least_us(model.finish_grad_sync)
        install_us = least_us(model.module.install_optimized_model_weights)
        model.module.device = torch.device("cpu")
        for owner, name in ((model, "finish_grad_sync"), (model, "start_param_sync")):
            setattr(owner, name, lambda: None)
        model.module.install_optimized_model_weights = lambda: None
        # Upstream's norm and clipping, which Adam has too, make tensors on a GPU.
        norm = torch.ones(1)
        mcore_optimizer.ChainedOptimizer.get_grad_norm = lambda *_: norm
        mcore_optimizer.clip_grad_by_total_norm_fp32 = lambda *_, **__: None
        chained_optimizer.current_device = lambda: torch.device("cpu")
        launches = Launches()
        replace_arithmetic(launches)
        try:
            optimizer.step()
            counts = count_launches(launches, optimizer.step)
            # Without the mode that makes CPU ranks, through which each call of torch passes.
            with torch._C.DisableTorchFunction():
                own_us, adam_us = least_us(optimizer.step, attach), least_us(adam.step)
        finally:
            launches.restore()
        return {
            "parameters": len(params),
            "held": len(held),
            "own_us": own_us,
            "own_launches": sum(counts.values()),
            "adamw_us": adam_us,
            "finish_grad_sync_us": attach_us,
            "install_us": install_us,
        }


def measure(names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the figures of jobs, each part in a process of its own."""
    root = Path(__file__).resolve().parents[1]
    launcher = [sys.executable, str(root / "scripts" / "cpu_ranks"), str(Path(__file__).resolve())]
    results: dict[str, dict[str, float]] = {name: {} for name in names}
    for name in names:
        for part in ("engine", "outer"):
            done = subprocess.run(
                [*launcher, "--part", part, "--jobs", name],
                stdout=subprocess.PIPE,
                text=True,
                env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(root)},
                check=True,
            )
            results[name] |= json.loads(done.stdout.splitlines()[-1])
    return results


def table(results: dict[str, dict[str, float]]) -> Iterator[str]:
    """Yield the lines of a table."""
    rows = []
    for name, of in results.items():
        whole = of["own_us"] + of["engine_us"]
        row = {
            "job": name,
            "parameters / with rows": f"{of['parameters']} / {of['held']}",
            "own, a parameter (us)": f"{of['own_us'] / of['parameters']:.1f}",
            "matrices held": f"{of['matrices']}",
            "engine, a matrix (us)": f"{of['engine_us'] / of['matrices']:.1f}",
            "the same if rows move (us)": f"{of['moved_us'] / of['matrices']:.1f}",
            "launches of ours": f"{of['own_launches'] + of['engine_launches']}",
            "stacks": f"{of['stacks']}",
            "own + engine (ms)": f"{whole / 1e3:.2f}",
            "AdamW (ms)": f"{of['adamw_us'] / 1e3:.2f}",
            "ratio": f"{whole / of['adamw_us']:.2f}",
            "finish_grad_sync, a parameter": f"{of['finish_grad_sync_us'] / of['parameters']:.0f}",
            "install, a parameter (us)": f"{of['install_us'] / of['parameters']:.0f}",
        }
        rows.append(row)
    yield f"| {' | '.join(rows[0])} |"
    yield f"| {' | '.join(['---'] * len(rows[0]))} |"
    for row in rows:
        yield f"| {' | '.join(row.values())} |"


def main() -> int:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--part", choices=["engine", "outer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        figures = {"engine": engine_figures, "outer": outer_figures}[options.part]
        print(json.dumps(figures(JOBS[options.jobs[0]])))
        return 0
    results = measure(options.jobs)
    print("\n".join(table(results)))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
