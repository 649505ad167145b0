# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Device memory of construction and of steps; a rank that runs out of it."""

import math
import time
from typing import Any

from gpu_checks.ranks import RanksError, run_ranks
from gpu_checks.report import Context, Device, Report

_SHAPES = ((2048, 2048), (4096, 1024), (1024, 4096))
_NUM_MATRICES, _NUM_STEPS = 24, 3
_TINY = ((16, 16), (32, 8), (8, 32))
# cuBLAS keeps 32 MiB on Hopper for each stream, and blocks are rounded up.
_SLACK_BYTES = 96 * 2**20
# What the other rank may still allocate.
_ROOM_BYTES = 8 * 2**20
_MAX_RAISE_S = 20.0


def check(context: Context, report: Report) -> None:
    """Measure two ranks, with expandable segments and without, and with portioned buckets."""
    rows = []
    for name, value, in_portions in (
        ("segments as they come", "False", False),
        ("expandable segments", "True", False),
        ("portioned buckets", "False", True),
    ):
        # The first name is that of torch 2.9 and later.
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        env = dict.fromkeys(names, f"expandable_segments:{value}")
        try:
            found = run_ranks(
                context, 2, _measure, context.device, context.is_rehearsal, in_portions,
                timeout_s=0.3 * context.limit_s, env=env,
            )  # fmt: skip
        except RanksError as error:
            report.expect(False, f"{name}: {error}")
            continue
        for rank, each in enumerate(found):
            megabytes = {key: f"{number / 1e6:.1f}" for key, number in each.items()}
            rows.append([name, rank, *megabytes.values()])
            _judge(f"{name}, rank {rank}", each, report)
        report.figure(
            f"{name}: staging_bytes {rows[-1][2]} MB, {rows[-1][3]} MB from construction on, "
            f"at most {rows[-1][4]} MB more in a step, {rows[-1][6]} MB reserved"
        )
    report.data("rows", rows)
    report.table(
        "Device memory of owner compute, MB",
        ("run", "rank", "staging_bytes", "after construction", "most in a step, beyond that",
         "left after three steps", "reserved", "of results and Newton-Schulz, at most"),
        rows,
    )  # fmt: skip


def _judge(where: str, found: dict[str, float], report: Report) -> None:
    # Staging is allocated in each step, and freed at its end.
    most = found["built"] + found["peak"]
    allowed = found["staging"] + found["results"] + _SLACK_BYTES
    report.expect(
        most <= allowed,
        f"{where}: expected {allowed / 1e6:.0f} MB at most (staging, results, Newton-Schulz), got "
        f"{most / 1e6:.0f}",
    )
    report.expect(
        found["left"] <= _SLACK_BYTES,
        f"{where}: expected steps to leave nothing behind, got {found['left'] / 1e6:.0f} MB",
    )


def _problem(device: Any, *, is_tiny: bool, in_portions: bool = False) -> Any:
    """Return matrices that two ranks share unevenly, in several buckets."""
    from gpu_checks.owner_layouts import Case, Grid, Problem

    shapes = _TINY if is_tiny else _SHAPES
    cases = []
    for index in range(_NUM_MATRICES):
        rows, cols = shapes[index % len(shapes)]
        cut = rows * (1 + index % 3) // 4
        cases.append(Case(rows, cols, ((0, cut), (cut, rows)), None, None))
    exchange = {"wire": "bf16", "overlap_within_matrices": in_portions}
    return Problem(Grid(1, 2, 1), tuple(cases), exchange, "medium", device, num_buckets=4)


def _measure(device: Device, is_tiny: bool, in_portions: bool) -> dict[str, float]:
    """Return bytes on this rank."""
    import torch

    from gpu_checks.owner_layouts import OwnerRun
    from gpu_checks.ranks import start

    where = start(device)
    problem = _problem(where, is_tiny=is_tiny, in_portions=in_portions)
    warm = torch.ones(64, 64, device=where, dtype=torch.bfloat16)
    warm @ warm  # cuBLAS's workspace
    before = torch.cuda.memory_allocated()
    run = OwnerRun(problem)
    built = torch.cuda.memory_allocated() - before
    (plan,) = run.compute.plans
    rows = run.rows(0)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(_NUM_STEPS):
        _step(run, rows)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    left = torch.cuda.memory_allocated() - held
    shapes = {shape for matrix in plan.matrices for shape in matrix.blocks}
    # Results of one bucket in bf16, and dense copies of them. Newton-Schulz on a stack of the
    # largest shape: two more like it and two Gram matrices, none larger than it.
    owned = max(
        sum(plan.matrices[i].num_elements for i in bucket if rank in plan.owners[i])
        for bucket in plan.buckets
        for rank in range(2)
    )
    # Of a portioned bucket each matrix has a sum of its own in fp32, and in place of the dense copy
    # what the last product multiplies.
    sums = max(
        sum(
            min(shape) ** 2
            for i in bucket
            if rank in plan.owners[i]
            for shape in plan.matrices[i].blocks
        )
        for bucket in plan.buckets
        for rank in range(2)
    )
    assert plan.order.is_portioned == in_portions
    stack = max(plan.cost.stack_size(*shape) * math.prod(shape) for shape in shapes)
    return {
        "staging": run.compute.staging_bytes,
        "built": built,
        "peak": peak,
        "left": left,
        "reserved": torch.cuda.max_memory_reserved(),
        "results": 2 * (2 * owned + 4 * stack) + 4 * sums * in_portions,
    }


def _step(run: Any, rows: Any) -> None:
    """Step without keeping results, which ``OwnerRun.step`` copies."""
    from gpu_checks import reference

    by_param = dict(zip(run.params, rows, strict=True))
    with reference.fp32_matmul_precision("medium"):
        for _ in run.compute.orthogonalize(by_param, by_param):
            pass


def check_out_of_memory(context: Context, report: Report) -> None:
    """Leave the second of two ranks too little memory: both must raise, soon, and not hang."""
    found = run_ranks(
        context, 2, _run_out_of_memory, context.device, context.is_rehearsal,
        timeout_s=0.9 * context.limit_s,
    )  # fmt: skip
    report.data("ranks", found)
    for rank, (text, seconds) in enumerate(found):
        is_in_time = text != "" and seconds < _MAX_RAISE_S
        report.expect(
            is_in_time or context.is_rehearsal,
            f"rank {rank}: expected an error within {_MAX_RAISE_S:.0f} s, got "
            f"{text[:200] or 'none'} after {seconds:.0f} s",
        )
        report.figure(f"rank {rank} raised after {seconds:.1f} s: {text[:120]}")


def _run_out_of_memory(device: Device, is_tiny: bool) -> tuple[str, float]:
    """Return what was raised on this rank, and after how long."""
    import torch
    import torch.distributed as dist

    from gpu_checks.owner_layouts import OwnerRun
    from gpu_checks.ranks import start

    # Twice the time after which an error counts as too late: a rank that waits is seen to.
    where = start(device, timeout_s=2 * _MAX_RAISE_S)
    problem = _problem(where, is_tiny=is_tiny)
    store = dist.distributed_c10d._get_default_store()
    if device == "cuda" and dist.get_rank() == 1:
        total = torch.cuda.get_device_properties(where).total_memory
        room = torch.cuda.memory_reserved() + _ROOM_BYTES
        torch.cuda.set_per_process_memory_fraction(room / total, where)
    start_s = time.monotonic()
    text = ""
    try:
        run = OwnerRun(problem)
        by_param = dict(zip(run.params, run.rows(0), strict=True))
        for _ in run.compute.orthogonalize(by_param, by_param):
            pass
    except (RuntimeError, torch.OutOfMemoryError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    seconds = time.monotonic() - start_s
    # A rank that has raised stays: its death would end the other's wait.
    store.set(f"raised_{dist.get_rank()}", "1")
    store.wait([f"raised_{rank}" for rank in range(2)])
    dist.destroy_process_group()
    return text, seconds
