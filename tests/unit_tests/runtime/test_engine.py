# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Owner compute on gloo ranks: bytes on the wire, memory, cut matrices, faults."""

import functools
import math
from collections import Counter
from typing import Any

import pytest
from helpers.device import device
from helpers.planned import planned_in
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, init_group, step_both

pytestmark = pytest.mark.ranks

OWNER = {"mode": "owner"}


def _count_bytes(
    wire: str, grid: dict[str, int], in_portions: bool, num_groups: int
) -> dict[str, Any]:
    """Step once, counting what is handed to torch.distributed for other ranks."""
    import torch.distributed as dist

    from megatron_muon.plan.report import build_report

    init_group()
    num_shards = 2 if grid else 4
    exchange = {**OWNER, "wire": wire, "overlap_within_matrices": in_portions}
    if "num_replicas" in grid:
        exchange["instance_groups"] = num_groups
    with planned_in(num_buckets=3, num_scatters=2, num_portions=2):
        optimizers = build_optimizers(num_shards, {}, exchange, **grid)
    counted: Counter[str] = Counter()
    all_to_all, all_reduce = dist.all_to_all_single, dist.all_reduce
    all_gather = dist.all_gather_into_tensor

    def counting_all_to_all(output, data, out_sizes, in_sizes, **kw):
        assert data.numel() == sum(in_sizes) and output.numel() == sum(out_sizes)
        # What a rank sends to itself, as a replica or for a matrix in place, does not leave it.
        to_itself = in_sizes[dist.get_rank(kw["group"])]
        counted["moved"] += data.nbytes - to_itself * data.element_size()
        counted["messages"] += 1
        return all_to_all(output, data, out_sizes, in_sizes, **kw)

    def counting_all_gather(output, data, **kw):
        # To each other replica, or through them.
        counted["moved"] += output.nbytes - data.nbytes
        counted["spreads"] += 1
        return all_gather(output, data, **kw)

    def counting_all_reduce(tensor, **kw):
        counted["reduced" if tensor.is_floating_point() else "flags"] += tensor.nbytes
        return all_reduce(tensor, **kw)

    dist.all_to_all_single, dist.all_reduce = counting_all_to_all, counting_all_reduce
    dist.all_gather_into_tensor = counting_all_gather
    optimizers.set_gradients(0)
    optimizers.sharded.step()
    owner_compute = optimizers.sharded.compute
    (plan,) = owner_compute.plans
    report = build_report(range(4), [plan], is_one_group=True)
    return {
        **counted,
        "planned": report.ranks[dist.get_rank()].bytes_sent,
        "elements": report.ranks[dist.get_rank()].elements_sent,
        "norms": report.norm_bytes,
        "buckets": len(plan.buckets),
        "gathers": len(plan.buckets) * plan.order.num_gathers,
        "scatters": len(plan.buckets) * plan.num_scatters,
        "blocks": sum(len(matrix.blocks) for matrix in plan.matrices),
    }


@pytest.mark.parametrize(
    ("wire", "grid", "in_portions", "num_groups"),
    [
        ("bf16", {}, False, 1),
        ("bf16", {}, True, 1),
        ("bf16", {"num_replicas": 2}, False, 1),
        ("bf16", {"num_replicas": 2}, False, 2),
        ("bf16", {"num_tensor_ranks": 2}, False, 1),
        ("fp32", {}, False, 1),
        ("fp32", {"num_replicas": 2}, False, 1),
        ("fp32", {"num_replicas": 2}, False, 2),
        ("fp32", {"num_tensor_ranks": 2}, False, 1),
    ],
    ids=str,
)
def test_bytes_at_the_collectives_are_those_of_the_plan(wire, grid, in_portions, num_groups):
    """Wire bf16: 2 bytes an element there, 2 back, 8 a block; no padding on either wire.

    Replicas in groups of their own have nothing to pass on.
    """
    run = run_ranks(4, _count_bytes, wire, grid, in_portions, num_groups).check()
    for counted in run.results:
        assert counted["moved"] == counted["planned"]
        assert counted.get("reduced", 0) == counted["norms"]
        assert counted["buckets"] > 1
        assert counted["messages"] <= counted["gathers"] + counted["scatters"]
        if grid.get("num_replicas", 1) > num_groups:
            assert counted["scatters"] == 2 * counted["buckets"] >= counted["spreads"] > 0
        else:
            assert counted["scatters"] == counted["gathers"] and "spreads" not in counted
            assert counted["gathers"] == (1 + in_portions) * counted["buckets"]
        if wire == "bf16":
            assert counted["planned"] == 2 * counted["elements"]
            assert counted["norms"] == 8 * counted["blocks"]
        else:
            assert counted["norms"] == 0
    assert sum(counted["moved"] for counted in run.results) > 0


def _step_with_cut_matrices(
    wire: str, precision: str, backend: str, atol: float, grid: dict[str, int]
) -> list[Any]:
    """Cut every matrix, whether it pays or not."""
    from megatron_muon.plan import domain_plan
    from megatron_muon.plan.assignment import Thresholds, assignments

    always = Thresholds(longer_than_fair=0, sparse=1e9, worth_splitting=1e9)
    domain_plan.assignments = functools.partial(assignments, thresholds=always)
    init_group()
    settings = {"fp32_matmul_prec": precision}
    exchange = {"mode": "owner", "wire": wire, "newton_schulz": backend}
    num_shards = 4 // math.prod(grid.values())
    optimizers = build_optimizers(num_shards, settings, exchange, **grid)
    plan = optimizers.sharded.compute.plans[0]
    step_both(optimizers, wire)
    whole = build_optimizers(num_shards, settings, {**exchange, "max_parts": 1}, **grid)
    step_both(whole, wire)
    return [
        optimizers.differences(atol=atol),
        [
            len(owners)
            for matrix, owners in zip(plan.matrices, plan.owners, strict=True)
            if not matrix.has_copies
        ],
        whole.differences(atol=0.0 if backend == "standard" else atol),
    ]


@pytest.mark.parametrize(
    ("wire", "precision", "backend", "atol"),
    [
        # fp32 sums in another order, through 15 products.
        pytest.param("fp32", "highest", "standard", 1e-5, id="fp32"),
        # Gram matrices have the squares of singular values, and so twice the digits of an error.
        pytest.param("fp32", "highest", "gram", 1e-4, id="fp32_gram"),
        # Gram matrices are added in bf16, which keeps 8 bits: 3 steps of 0.02 times a result with
        # elements below 1, scaled by at most 7, are off by a few hundredths of that.
        pytest.param("bf16", "medium", "standard", 2e-2, id="bf16"),
        pytest.param("bf16", "medium", "gram", 2e-2, id="bf16_gram", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "grid",
    [
        pytest.param({}, id="zero3"),
        # A matrix cut over just the ranks that hold copies of it was once never stepped.
        pytest.param({"num_replicas": 4}, id="zero0"),
        pytest.param({"num_replicas": 2}, id="hsdp"),
        pytest.param({"num_tensor_ranks": 2}, id="tp2"),
    ],
)
def test_cut_matrices_agree_with_whole_ones_up_to_rounding(wire, precision, backend, atol, grid):
    """Parts on several ranks that all-reduce Gram matrices give the same update; uncut, bits."""
    run = run_ranks(4, _step_with_cut_matrices, wire, precision, backend, atol, grid).check()
    for different, num_owners, different_uncut in run.results:
        assert different == [] and different_uncut == []
        assert max(num_owners) == 4 and min(num_owners) >= 2


def _memory_of_steps(staging_bytes: int | None) -> list[int]:
    import torch

    init_group()
    exchange = {"mode": "owner", "wire": "bf16", "staging_bytes": staging_bytes}
    optimizers = build_optimizers(2, {}, exchange, cases=[(64, [40, 24])] * 9)
    owner_compute = optimizers.sharded.compute
    (memory,) = (x for x in vars(owner_compute._engine._arena).values() if torch.is_tensor(x))
    between_steps = memory.untyped_storage().nbytes()
    in_step = 0

    def orthogonalize(momentum, results, original=owner_compute.orthogonalize):
        nonlocal in_step
        for params in original(momentum, results):
            in_step = max(in_step, memory.untyped_storage().nbytes())
            yield params

    owner_compute.orthogonalize = orthogonalize
    step_both(optimizers, "bf16")
    assert optimizers.differences() == []
    between_steps = max(between_steps, memory.untyped_storage().nbytes())
    return [between_steps, in_step, owner_compute.staging_bytes]


@pytest.mark.parametrize("limit", [None, 40_000])
def test_staging_memory_lives_in_a_step_alone_and_stays_within_the_limit(limit):
    """Between steps the allocator has it, and in a step it is what the report says."""
    run = run_ranks(2, _memory_of_steps, limit).check()
    for between_steps, in_step, staging_bytes in run.results:
        assert between_steps == 0
        assert 0 < in_step == staging_bytes
        # Without a limit it takes more: otherwise this would test nothing.
        assert (staging_bytes > 40_000) == (limit is None)


def _fault(kind: str) -> list[Any]:
    import torch
    import torch.distributed as dist

    init_group()
    optimizers = build_optimizers(3, {}, {"mode": "owner"})
    sharded, rank = optimizers.sharded, dist.get_rank()
    optimizers.set_gradients(0)
    sharded.step()
    optimizers.set_gradients(1)
    param = optimizers.params[0][0]
    if rank == 1 and kind == "missing":
        param.grad = None
    elif rank == 1 and kind == "frozen":
        param.requires_grad_(False)
        param.grad = None
    elif rank == 1 and kind in ("nan", "inf"):
        param.grad._local_tensor[3, 5] = float(kind)
    elif rank == 1 and kind == "group":
        sharded.param_groups[0]["params"].pop()
    before = optimizers.state()
    try:
        sharded.step()
    except RuntimeError as error:
        after = optimizers.state()
        same = all(
            torch.equal(a, b) for x, y in zip(before, after, strict=True)
            for a, b in zip(x, y, strict=True)
        )  # fmt: skip
        return [str(error), same]
    return ["no error", False]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "rank 1: layer.0.weight: expected a gradient on a shard of shape (47, 24)"),
        ("frozen", "rank 1: layer.0.weight: expected a gradient on a shard of shape (47, 24)"),
        ("nan", "rank 1: layer.0.weight: expected a finite gradient, got NaN or Inf"),
        ("inf", "rank 1: layer.0.weight: expected a finite gradient, got NaN or Inf"),
        ("group", "rank 1: param_groups: expected the 5 parameters of construction, got 4"),
    ],
)
def test_fault_on_one_rank_raises_on_all_and_changes_nothing(kind, message):
    """All ranks stop together, naming rank and parameter, before momentum has moved."""
    run = run_ranks(3, _fault, kind).check()
    assert len({text for text, _ in run.results}) == 1
    for text, is_unchanged in run.results:
        assert message in text and "Nothing was updated" in text
        assert is_unchanged


def _unchecked_nan() -> list[str]:
    init_group()
    optimizers = build_optimizers(2, {}, {"mode": "owner", "wire": "bf16"})
    optimizers.sharded.checks_gradients = False
    optimizers.set_gradients(0)
    param = optimizers.params[0][0]
    param.grad._local_tensor.fill_(float("nan"))
    optimizers.sharded.step()
    optimizers.whole.step()
    return optimizers.differences(atol=1e-2)


def test_nan_in_one_matrix_does_not_reach_another():
    """Even where a caller has turned the check off, the other matrices are stepped as ever."""
    run = run_ranks(2, _unchecked_nan).check()
    for different in run.results:
        assert {each.partition(":")[0] for each in different} == {"layer.0.weight"}


def _zero_gradients(wire: str) -> list[float]:
    init_group()
    settings = {"weight_decay": 0.0}
    optimizers = build_optimizers(3, settings, {"mode": "owner", "wire": wire})
    before = optimizers.state()
    for param, _, _ in optimizers.params:
        if param.grad is None:
            param.grad = param.detach() * 0 if param._local_tensor.numel() else None
    optimizers.sharded.step()
    after = optimizers.state()
    return [
        (a - b).abs().max().item() if a.numel() else 0.0
        for (a, _), (b, _) in zip(before, after, strict=True)
    ]


@pytest.mark.parametrize("wire", ["bf16", "fp32"])
def test_zero_gradients_give_a_zero_update(wire):
    """Nothing is divided by a norm of zero."""
    run = run_ranks(3, _zero_gradients, wire).check()
    assert all(change == 0.0 for changes in run.results for change in changes)


def _different_settings() -> str:
    import torch.distributed as dist

    init_group()
    staging_bytes = 10**6 if dist.get_rank() == 0 else 2 * 10**6
    try:
        build_optimizers(2, {}, {"mode": "owner", "staging_bytes": staging_bytes})
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_ranks_with_different_settings_raise_at_construction():
    """They are compared once; a hang would be the alternative."""
    run = run_ranks(2, _different_settings).check()
    for text in run.results:
        assert "settings: expected the same on all ranks of the group" in text
        assert "staging_bytes=2000000" in text and "staging_bytes=1000000" in text


def _padded_stacks() -> list[Any]:
    """Stack as on a GPU, in memory that holds NaN."""
    import torch

    from megatron_muon.plan import stacking
    from megatron_muon.runtime.arena import Arena

    # Padded even where that takes more than a quarter.
    stacking.MAX_PADDING = 4.0
    allocate = Arena.allocate

    def allocate_nan(arena):
        allocate(arena)
        arena.view(0, arena.num_bytes // 2, torch.bfloat16).fill_(float("nan"))

    Arena.allocate = allocate_nan
    init_group()
    exchange = {"mode": "owner", "wire": "bf16", "cost_model": "stack_tiles=4"}
    optimizers = build_optimizers(2, {}, exchange)
    engine = optimizers.sharded.compute._engine
    step_both(optimizers, "bf16")
    work = [stacks for plan in engine._plans for stacks in (*plan._buckets, *plan._local)]
    owned = sum(len(stack) for each in work for stack, _ in each.stacks)
    room = sum(len(memory) for each in work for _, memory in each.stacks)
    # Three steps of 0.02 times a few units of bf16's last bit.
    return [optimizers.differences(atol=2e-3), owned < room]


def test_what_lies_in_the_padding_of_a_stack_does_not_matter():
    """Padding is not cleared: a batched call keeps even NaN in its own slot."""
    assert run_ranks(2, _padded_stacks).check().results == [[[], True]] * 2


def _step_after_an_abandoned_one() -> list[str]:
    init_group()
    optimizers = build_optimizers(1, {}, {"mode": "owner", "wire": "bf16"})
    compute = optimizers.sharded.compute
    rows = {param: param._local_tensor.detach() + 1 for param, _, _ in optimizers.params}
    abandoned = compute.orthogonalize(rows, rows)
    next(abandoned)
    abandoned.close()
    step_both(optimizers, "bf16")
    return optimizers.differences()


def test_exception_in_the_callers_loop_leaves_nothing_to_the_next_step():
    """Norms of a step that ended early were added to the next one, which failed on that rank."""
    assert run_ranks(1, _step_after_an_abandoned_one).check().results == [[]]


def _step_after_messages_were_left(grid: dict[str, int]) -> list[Any]:
    """Abandon a step whose gathers, or what replicas pass on, are under way, and step again."""
    from helpers.collective_timing import collectives_run

    init_group()
    exchange = {"mode": "owner", "wire": "bf16"}
    with planned_in(num_buckets=4):
        cases = [*[(12, [12, 12])] * 8, (12, [16, 16])]
        if grid:
            cases = [(cols, [sum(rows)]) for cols, rows in cases]
        optimizers = build_optimizers(1 if grid else 2, {}, exchange, cases=cases, **grid)
    compute = optimizers.sharded.compute
    rows = {param: param._local_tensor.detach() + 1 for param, _, _ in optimizers.params}
    with collectives_run("at_wait") as timing:
        abandoned = compute.orthogonalize(rows, rows)
        next(abandoned)
        (buckets,) = compute._engine._plans
        while grid and not buckets._scattering:
            next(abandoned)
        under_way = len(buckets._gathering) + len(buckets._scattering)
        abandoned.close()
        step_both(optimizers, "bf16")
    return [under_way, optimizers.differences(), timing.breaches]


@pytest.mark.cpu_only
@pytest.mark.parametrize("grid", [{}, {"num_replicas": 2}], ids=["gathers", "spreads"])
def test_messages_of_an_abandoned_step_are_waited_for_before_their_memory_is_used(grid):
    """They may still read and write it."""
    run = run_ranks(2, _step_after_messages_were_left, grid).check()
    for under_way, different, breaches in run.results:
        assert under_way > 0 and different == [] and breaches == []


def _groups_of_ranks_that_are_in_different_numbers_of_groups() -> list[int]:
    import torch
    import torch.distributed as dist

    from megatron_muon.runtime.domain import new_groups

    init_group()
    rank = dist.get_rank()
    first = new_groups([(0,)] if rank == 0 else [])
    second = new_groups([(1, 2), (0, 1, 2)] if rank else [(0, 1, 2)])
    for ranks in sorted(second):
        dist.all_reduce(torch.ones(1, device=device()), group=second[ranks])
    return [len(first), len(second)]


def test_groups_are_made_by_ranks_that_are_in_different_numbers_of_groups():
    """With use_local_synchronization the ranks would give a group different names, and hang."""
    run = run_ranks(3, _groups_of_ranks_that_are_in_different_numbers_of_groups).check()
    assert run.results == [[1, 1], [0, 2], [0, 2]]
