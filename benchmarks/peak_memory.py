# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Measure the peak memory of an optimizer step beside the memory that the optimizer reserves.

    torchrun --nproc-per-node 2 scripts/cpu_ranks benchmarks/peak_memory.py --hidden 256 --layers 4
    torchrun --nproc-per-node 8 -m megatron_muon benchmarks/peak_memory.py --hidden 4096 --layers 8

========  ==========================================================================================
kept      Memory that construction and the first step leave: states
peak      Largest growth within the second step
planned   Memory that ``MatrixStep.reserve()`` takes before ranks agree to step: messages and stacks
          (``staging_bytes``), results where they do not overwrite gradients, float32 momentum, and
          the largest of the temporaries of Newton-Schulz and of AdamW. For AdamW alone the
          temporaries that this package expects of it. See docs/communication.md#memory.
used      Largest growth within a third step, which reserves no temporaries before it needs them
========  ==========================================================================================

A peak above the plan, by more than ``SLACK``, could run out of memory after ranks have agreed. The
table names the rank that is the furthest above its plan; the command ends with 1 if one is above.
The reservation is a part of the step, so that the peak is at least the plan; the memory that was
used shows how tight the plan is.

On a GPU the figures are of torch's allocator, which rounds up each tensor to 512 bytes. On CPU
ranks they are exact: the profiler's record of every allocation and release of torch. Buffers of
NCCL and gloo are in neither. ``--precision`` is "medium" on GPUs, and on CPU ranks "high": a CPU
without bf16 instructions computes bf16 products on copies in fp32, which no plan has.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from measure import of_all_ranks, setup_of, start_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

# Lists of rectangles, norms and numbers a block, which come after the reservation: documented in
# step/matrix_step.py as small.
SLACK = 2**20
VOCAB = 1024


class Growth(NamedTuple):
    """Growth of memory, bytes: the largest one, and what is left of it."""

    peak: int
    left: int


def growth_of(changes: Iterator[int]) -> Growth:
    """Return the growth after allocations (positive) and releases (negative), in their order."""
    peak = total = 0
    for change in changes:
        total += change
        peak = max(peak, total)
    return Growth(peak, total)


@contextmanager
def grown(device: torch.device, found: list[Growth]) -> Iterator[None]:
    """Append the growth of the body to a list."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        torch.cuda.synchronize()
        after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        found.append(Growth(*(num_bytes - before for num_bytes in after)))
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        yield
    # The public events have changes by operation, without their order.
    records: Any = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    records = [record for record in records if record.name() == "[memory]"]
    records.sort(key=lambda record: record.start_ns())
    found.append(growth_of(record.nbytes() for record in records))


class Plan:
    """Records what ``MatrixStep.reserve()`` takes, while it is the method.

    Attributes:
        num_bytes: The plan; None for an optimizer that reserves nothing.
        without_temporaries: Whether to reserve no temporaries, so that a step shows its own.
    """

    def __init__(self) -> None:
        self.num_bytes: int | None = None
        self.without_temporaries = False

    def recording(self) -> Any:
        """Return a context in which reservations are recorded."""
        from megatron_muon.runtime.arena import NOTHING
        from megatron_muon.step.matrix_step import MatrixStep

        original = MatrixStep.reserve

        def reserve(step: Any, others: Any = NOTHING) -> None:
            """Reserve, and add up what that is."""
            engine = step.engine
            workspace = engine._workspace_bytes
            if self.without_temporaries:
                engine._workspace_bytes = 0
            original(step, NOTHING if self.without_temporaries else others)
            engine._workspace_bytes = workspace
            temporaries = max(others.temporaries, workspace)
            arenas = step._arena.num_bytes + step.staging._arena.num_bytes
            self.num_bytes = engine.staging_bytes + arenas + others.state + temporaries

        return mock.patch.object(MatrixStep, "reserve", reserve)


def fsdp2_parameters(
    layers: int, hidden: int, device: torch.device
) -> tuple[list[torch.nn.Parameter], torch.nn.Parameter]:
    """Shard the matrices of a transformer, and an embedding; return them with gradients."""
    module = torch.nn.Module()
    layer = [(hidden, hidden), (3 * hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    for number, shape in enumerate([*layer * layers, (VOCAB, hidden)]):
        value = torch.nn.Parameter(torch.randn(shape, device=device))
        module.register_parameter(f"p{number}", value)
    fully_shard(module, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    for param in module.parameters():
        param.grad = torch.randn_like(param)
    *matrices, embedding = module.parameters()
    return matrices, embedding


def reserving(peer: Any) -> Callable[[], None]:
    """Return a step that reserves its memory before, as Megatron's chain of optimizers does."""
    muon_step = peer.step.__self__

    def step() -> None:
        """Reserve, then step."""
        if problems := muon_step.reserve():
            raise RuntimeError("; ".join(problems))
        muon_step.step()

    return step


class Built(NamedTuple):
    """How an optimizer is built.

    Args:
        build: Builds it, and returns its step.
        num_bytes: Of parameters and gradients that are made meanwhile.
    """

    build: Callable[[], Any]
    num_bytes: int = 0


def builders(options: argparse.Namespace, device: torch.device) -> dict[str, Built]:
    """Return the optimizers by name; they share no parameters."""
    from peers import MUON, Model, sharded_muon

    from megatron_muon.fsdp2 import Muon, MuonAdamW

    sizes = options.layers, options.hidden, device
    model = Model.build(*sizes)
    (plain, _), (mixed, embedding), (adam, other) = (fsdp2_parameters(*sizes) for _ in range(3))
    keys: dict[str, Any] = {"fp32_matmul_prec": options.precision}
    groups = [{"params": mixed}, {"params": [embedding], "algorithm": "adamw"}]
    groups[0]["algorithm"] = "muon"
    made = 2 * sum(shard.nbytes for shard in model.shards(0))
    found = {
        "fsdp2.Muon": lambda: Muon(plain, MUON["lr"], **keys).step,
        "fsdp2.MuonAdamW": lambda: MuonAdamW(groups, MUON["lr"], foreach=True, **keys).step,
        "torch.optim.AdamW": lambda: torch.optim.AdamW([*adam, other], foreach=True).step,
    }
    return {
        "Megatron-FSDP, Muon": Built(
            lambda: reserving(sharded_muon(model, options.precision)), made
        ),
        **{name: Built(build) for name, build in found.items()},
    }


def measure(built: Built, device: torch.device) -> dict[str, int]:
    """Build an optimizer, step twice, and return the figures of this rank."""
    from megatron_muon.step.elementwise import elementwise_bytes

    growths: list[Growth] = []
    plan = Plan()
    with plan.recording():
        with grown(device, growths):
            step = built.build()
            step()
        for plan.without_temporaries in (False, True):
            with grown(device, growths):
                step()
    planned = plan.num_bytes
    if planned is None:
        planned = elementwise_bytes([step.__self__], device).temporaries
    return {
        "peak_bytes": growths[1].peak,
        "used_bytes": growths[2].peak,
        "planned_bytes": planned,
        "kept_bytes": growths[0].left - built.num_bytes,
    }


def main() -> int:
    """Measure all, print a table on rank 0, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--precision", choices=("medium", "high"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    device = start_ranks()
    options.precision = options.precision or ("medium" if device.type == "cuda" else "high")
    if device.type == "cuda":
        # The workspace of cuBLAS, which is nobody's state.
        for dtype in (torch.bfloat16, torch.float32):
            torch.ones(64, 64, device=device, dtype=dtype).matmul(torch.eye(64).to(device, dtype))
    rows = []
    for name, built in builders(options, device).items():
        of_ranks = of_all_ranks(measure(built, device))
        worst = max(of_ranks, key=lambda row: row["peak_bytes"] - row["planned_bytes"])
        holds = worst["peak_bytes"] <= worst["planned_bytes"] + SLACK
        rows.append({"optimizer": name, **worst, "rank": of_ranks.index(worst), "holds": holds})
    if dist.get_rank() == 0:
        setup = setup_of(options, "hidden", "layers", "precision")
        print(", ".join(f"{key} {value}" for key, value in setup.items()))
        print("| optimizer | rank | peak MB | planned MB | used MB | kept MB | |\n|" + " --- |" * 7)
        for row in rows:
            keys = "peak_bytes", "planned_bytes", "used_bytes", "kept_bytes"
            cells = " | ".join(f"{row[key] / 1e6:.2f}" for key in keys)
            verdict = "holds" if row["holds"] else "MORE"
            print(f"| {row['optimizer']} | {row['rank']} | {cells} | {verdict} |")
        if options.json is not None:
            options.json.write_text(json.dumps({"setup": setup, "rows": rows}, indent=1) + "\n")
    dist.barrier()
    return int(not all(row["holds"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
