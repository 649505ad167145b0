# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Owner compute on several ranks of one device, against upstream's function on whole matrices.

Ranks with odd numbers are late with every matrix they pack. On a GPU that is a kernel that sleeps,
so a collective that did not wait for the stream would send what was there before.
"""

import random
import time
from collections.abc import Iterator
from typing import Any

from gpu_checks.ranks import RanksError, run_ranks, start
from gpu_checks.report import Context, Device, Report

# Replicas x shards x tensor-parallel ranks. The last one of eight only on a GPU: a machine without
# one may have two cores.
GRIDS = {
    2: [(1, 2, 1), (2, 1, 1), (1, 1, 2)],
    4: [(1, 4, 1), (2, 2, 1), (1, 2, 2)],
    8: [(2, 2, 2), (1, 8, 1)],
}
WIRES = (("bf16", "medium"), ("fp32", "medium"), ("fp32", "highest"))
NUM_STEPS = 2
MIN_BUCKETS = 5
# Relative to the Frobenius norm. Stacks, portioned ones too: products of other kernels, rounded to
# bf16 in each of 15 products; the Gram form rounds less. Split matrices: Gram matrices are added in
# bf16, or in fp32. A rank that orthogonalized its own part alone would be off by more than 0.3.
_STACKS, _SPLIT = 0.05, {"medium": 0.08, "highest": 1e-4}
# What cuBLAS asks for in torch's deterministic mode.
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
_SLEEP_CYCLES = 1_000_000  # half a millisecond of a GPU
_SLEEP_S = 0.0002


def check(context: Context, report: Report) -> None:
    """Run every kind of layout on 2, 4 and 8 ranks."""
    rows: list[list[Any]] = []
    for world_size in GRIDS:
        try:
            found = run_ranks(
                context,
                world_size,
                _run,
                context.device,
                timeout_s=context.limit_s / 2.5,
                env=_DETERMINISTIC,
            )
        except RanksError as error:
            report.expect(False, f"{world_size} ranks: {error}")
            continue
        for of_all_ranks in zip(*found, strict=True):
            row = dict(of_all_ranks[0])
            row["difference"] = max(each["difference"] for each in of_all_ranks)
            for name in ("unequal", "unequal_replicas"):
                row[name] = sum(each[name] for each in of_all_ranks)
            _judge(row, world_size, report)
            rows.append([world_size, *row.values()])
    report.data("rows", rows)
    exact = [row for row in rows if row[2] == "exact"]
    others = [row for row in rows if row[2] != "exact"]
    if exact:
        report.figure(
            f"{len(exact)} layouts bit for bit, {min(row[4] for row in exact)} to "
            f"{max(row[4] for row in exact)} buckets"
        )
    if others:
        report.figure(
            f"{len(others)} with stacks, groups, portions or split matrices, largest relative "
            f"difference {max(row[6] for row in others):.1e}"
        )


def _judge(row: dict[str, Any], world_size: int, report: Report) -> None:
    where = f"{world_size} ranks as {row['grid']}, {row['kind']}, {row['wire']}"
    report.expect(
        row["unequal_replicas"] == 0,
        f"{where}: {row['unequal_replicas']} shards differ from those of another replica",
    )
    if row["kind"] == "exact":
        report.expect(
            row["unequal"] == 0,
            f"{where}: {row['unequal']} shards differ from whole matrices or in deterministic "
            f"mode, by up to {row['difference']:.1e} of their norm",
        )
        report.expect(
            row["buckets"] >= MIN_BUCKETS,
            f"{where}: expected {MIN_BUCKETS} buckets or more, got {row['buckets']}",
        )
        return
    is_split = row["kind"] == "split"
    tolerance = _SPLIT[row["precision"]] if is_split else _STACKS
    report.expect(
        row["difference"] <= tolerance,
        f"{where}: differs from whole matrices by {row['difference']:.1e} of the norm, expected "
        f"{tolerance:.0e} at most",
    )
    if is_split:
        report.expect(row["owners"] > 1, f"{where}: expected a split matrix, got none")
    if row["kind"].startswith("portioned"):
        report.expect(row["portions"] > 1, f"{where}: expected a portioned plan, got none")
    if row["kind"] == "groups":
        report.expect(row["groups"] > 1, f"{where}: expected groups of instances, got one")


def _run(device: Device) -> list[dict[str, Any]]:
    import torch.distributed as dist

    where = start(device)
    grids = GRIDS[dist.get_world_size()]
    if device == "cpu" and dist.get_world_size() == 8:
        grids = grids[:1]
    return [_compare(problem, kind) for grid in grids for kind, problem in _problems(grid, where)]


def _problems(grid: tuple[int, int, int], device: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is run on a grid of ranks, the same on all ranks."""
    from gpu_checks.owner_layouts import Grid, Problem, random_cases

    ranks = Grid(*grid)
    world_size = ranks.num_replicas * ranks.num_shards * ranks.num_tensor_ranks
    rng = random.Random(repr(grid))
    for wire, precision in WIRES:
        count = max(16, 6 * world_size)
        rows, cols = (384, 320) if device.type == "cuda" else (48, 40)
        cases = random_cases(rng, ranks, count, max_rows=rows, max_cols=cols)
        exact = {"wire": wire, "max_parts": 1, "cost_model": "stack_tiles=1"}
        yield "exact", Problem(ranks, cases, exact, precision, device, num_buckets=6)
    cases = random_cases(rng, ranks, 6 * world_size, max_rows=8, max_cols=6)
    stacks = {"wire": "bf16", "max_parts": 1, "cost_model": "stack_tiles=4"}
    yield "stacks", Problem(ranks, cases, stacks, "medium", device, num_buckets=2)
    if ranks.num_replicas > 1:
        # Each instance by itself: nothing but equal operations keeps their results equal.
        groups = {**stacks, "instance_groups": ranks.num_replicas}
        yield "groups", Problem(ranks, cases, groups, "medium", device, num_buckets=2)
    # Portions that another stream receives while this one multiplies.
    cases = random_cases(rng, ranks, 2 * world_size, max_rows=256, max_cols=128)
    for name in ("standard", "gram"):
        portions = {**stacks, "newton_schulz": name, "overlap_within_matrices": True}
        yield f"portioned {name}", Problem(ranks, cases, portions, "medium", device)
    # Free launches and traffic: splitting pays whenever it shortens the products.
    free = "kernel_us=0,all_reduce_us=0,gbps=1e9,gbps_between_nodes=1e9,stack_tiles=1"
    for wire, precision in (WIRES[0], WIRES[2]):
        cases = random_cases(rng, ranks, 1, max_rows=64, max_cols=64, is_joined=True)
        split = {"wire": wire, "max_parts": 8, "cost_model": free}
        yield "split", Problem(ranks, cases, split, precision, device)


def _compare(problem: Any, kind: str) -> dict[str, Any]:
    """Step several times without a wait between, then compare."""
    import torch

    from gpu_checks import reference
    from gpu_checks.owner_layouts import OwnerRun

    run = OwnerRun(problem, _late_on_odd_ranks(problem.device))
    rows = [run.rows(step) for step in range(NUM_STEPS)]
    found = [run.step(of_step) for of_step in rows]
    unequal, difference = 0, 0.0
    # The first step once more; torch then fills memory that is read before it is written with NaN.
    torch.use_deterministic_algorithms(True)
    again = run.step(rows[0])
    torch.use_deterministic_algorithms(False)
    unequal += sum(not torch.equal(result, again[index]) for index, result in found[0].items())
    for step in range(NUM_STEPS):
        expected = run.expected(step)
        if found[step].keys() != expected.keys():
            raise RuntimeError(f"expected results of {sorted(expected)}, got {sorted(found[step])}")
        for index, result in expected.items():
            if not torch.equal(found[step][index], result):
                unequal += 1
                difference = max(
                    difference, reference.relative_difference(found[step][index], result)
                )
    unequal_replicas = sum(map(run.num_unequal_replicas, found))
    (plan,) = run.compute.plans
    return {
        "grid": "x".join(map(str, problem.grid)),
        "kind": kind,
        "wire": problem.exchange["wire"],
        "buckets": len(plan.buckets),
        "unequal": unequal,
        "difference": difference,
        "unequal_replicas": unequal_replicas,
        "owners": max(map(len, plan.owners)),
        "portions": plan.order.num_gathers,
        "groups": plan.num_groups,
        "precision": problem.precision,
    }


def _late_on_odd_ranks(device: Any) -> Any:
    """Return what makes this rank late, and no other."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() % 2 == 0:
        return None
    if device.type == "cuda":
        return lambda: torch.cuda._sleep(_SLEEP_CYCLES)
    return lambda: time.sleep(_SLEEP_S)
