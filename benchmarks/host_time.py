# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Time the host in an optimizer step of large jobs, without their GPUs.

    .venv/bin/python scripts/cpu_ranks benchmarks/host_time.py

The process is one rank of each job in turn. Its process groups are torch's "fake" ones, which send
nothing. Two parts of a step have times of their own:

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
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from counting import Launches
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


def go_the_way_of_a_gpu() -> None:
    """Let the kernel move rows, one call compute norms, and one call orthogonalize a stack."""
    from megatron_muon.runtime import row_moves

    norms_as_on_a_gpu()
    row_moves.uses_kernel = lambda device: True


def engine_figures(job: Job) -> dict[str, float]:
    """Time the engine of the rank that holds the most matrices."""
    import torch
    import torch.distributed as dist

    with busiest_rank(job, torch.device("cpu")) as (engine, rows), Launches() as launches:
        launches.replace_arithmetic()
        # Fake process groups copy messages to oneself, and so touch the memory.
        for name in COLLECTIVES:
            launches.replace(dist, name, lambda *_, **__: Completed())
        step = lambda: list(engine.orthogonalize(rows, rows))  # noqa: E731
        step()
        counts = launches.of(step)
        with torch._C.DisableTorchFunction():
            time_us = least_us(step)
            # Other dictionaries, as where gradients are in new memory in every step.
            moved_us = least_us(lambda: list(engine.orthogonalize(dict(rows), dict(rows))))
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

    parallel_state.destroy_model_parallel()  # that of the job before
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
        # Other ranks, which send nothing, have the same values in groups.
        checksum = chained_optimizer.signed_checksum
        chained_optimizer.signed_checksum = lambda *args: 0 * checksum(*args)
        with Launches() as launches:
            launches.replace_arithmetic()
            optimizer.step()
            counts = launches.of(optimizer.step)
            # Without the mode that makes CPU ranks, through which each call of torch passes.
            with torch._C.DisableTorchFunction():
                own_us, adam_us = least_us(optimizer.step, attach), least_us(adam.step)
        return {
            "parameters": len(params),
            "held": len(held),
            "own_us": own_us,
            "own_launches": sum(counts.values()),
            "adamw_us": adam_us,
            "finish_grad_sync_us": attach_us,
            "install_us": install_us,
        }


COLUMNS = (
    "job, parameters, own (us a parameter), matrices, engine (us a matrix), if rows move (us), "
    "launches, stacks, own + engine (ms), AdamW (ms), finish_grad_sync (us a parameter), "
    "install (us a parameter)"
).split(", ")


def row_of(name: str, of: dict[str, float]) -> list[str]:
    """Return the cells of a job, by ``COLUMNS``."""
    return [
        name,
        f"{of['parameters']}, {of['held']} with rows",
        f"{of['own_us'] / of['parameters']:.1f}",
        f"{of['matrices']}",
        f"{of['engine_us'] / of['matrices']:.1f}",
        f"{of['moved_us'] / of['matrices']:.1f}",
        f"{of['own_launches'] + of['engine_launches']}",
        f"{of['stacks']}",
        f"{(of['own_us'] + of['engine_us']) / 1e3:.2f}",
        f"{of['adamw_us'] / 1e3:.2f}",
        f"{of['finish_grad_sync_us'] / of['parameters']:.0f}",
        f"{of['install_us'] / of['parameters']:.0f}",
    ]


def main() -> int:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    go_the_way_of_a_gpu()
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    results = {}
    for name in options.jobs:
        results[name] = engine_figures(JOBS[name]) | outer_figures(JOBS[name])
        print(f"| {' | '.join(row_of(name, results[name]))} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
