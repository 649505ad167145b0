# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""NCCL with one rank: empty messages, new groups, the pre-multiplied sum, memory."""

from typing import Any

from gpu_checks.ranks import run_ranks
from gpu_checks.report import Context, Device, Report

_TIMEOUT_S = 77.0


def check(context: Context, report: Report) -> None:
    """Make each call that a step or a construction makes, on one rank."""
    (found,) = run_ranks(
        context, 1, _run, context.device, context.is_rehearsal, timeout_s=0.9 * context.limit_s
    )
    report.data("found", found)
    for name, is_right in found["right"].items():
        report.expect(is_right, f"{name}: expected it to work, got another result")
    used = found["used_mb"]
    report.figure(
        f"{len(found['right'])} calls; device memory grows by {used['first collective']:.0f} MB "
        f"with the first collective, by {used['new group']:.0f} MB with a group more"
    )


def _run(device: Device, is_rehearsal: bool) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from gpu_checks import reference
    from gpu_checks.owner_layouts import Case, Grid, OwnerRun, Problem
    from gpu_checks.ranks import start
    from megatron_muon.runtime import domain

    where = start(device, timeout_s=_TIMEOUT_S)
    torch.ones(1, device=where)
    free = [torch.cuda.mem_get_info()[0]]
    right = {}

    ones = torch.ones(4, device=where)
    dist.all_reduce(ones)
    torch.cuda.synchronize()
    free.append(torch.cuda.mem_get_info()[0])
    right["all-reduce"] = ones.tolist() == [1.0] * 4

    group = domain.new_groups([(0,)])[(0,)]
    dist.all_reduce(ones, group=group)
    torch.cuda.synchronize()
    free.append(torch.cuda.mem_get_info()[0])
    right["new group"] = dist.get_process_group_ranks(group) == [0]
    right["timeout of new groups"] = domain._job_timeout().total_seconds() == _TIMEOUT_S

    empty = torch.empty(0, dtype=torch.bfloat16, device=where)
    work = dist.all_to_all_single(empty, empty.clone(), [0], [0], async_op=True)
    work.wait()
    sent = torch.arange(6.0, device=where)
    received = torch.zeros_like(sent)
    dist.all_to_all_single(received, sent, [6], [6], async_op=True).wait()
    right["empty message"] = torch.equal(received, sent)

    if not is_rehearsal:
        half = dist._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]
        output = torch.zeros_like(sent)
        dist.reduce_scatter_tensor(output, sent, op=half)
        right["pre-multiplied sum"] = torch.equal(output, sent / 2)

    cases = tuple(Case(rows, 48, ((0, rows),), None, None) for rows in (32, 48, 96))
    exchange = {"wire": "bf16", "cost_model": "stack_tiles=1"}
    run = OwnerRun(Problem(Grid(1, 1, 1), cases, exchange, "medium", where))
    found, expected = run.step(run.rows(0)), run.expected(0)
    right["owner compute"] = all(torch.equal(found[i], expected[i]) for i in expected)
    assert reference.STEPS
    used = [(before - after) / 1e6 for before, after in zip(free, free[1:], strict=False)]
    return {
        "right": right,
        "used_mb": dict(zip(("first collective", "new group"), used, strict=True)),
    }
