# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Construction of plan and engine: costs and settings of all ranks, and faults of one."""

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.device import device, kind
from helpers.ranks import cached_cases
from helpers.sharded_muon import build_optimizers

from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime import arena, plan_runner
from megatron_muon.runtime.engine_builder import on_all_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]


def _error_without_memory(what: str, num_arenas: int) -> str:
    """Let an allocation of rank 1 fail, as a GPU's or as this CPU's, after some arenas.

    ``"norms"`` is another allocation, which comes before that of the arena.
    """
    original, sizes = torch.empty, []

    def fail(*_args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.\nSee more.")

    def empty(num_bytes: int, **kwargs: Any) -> torch.Tensor:
        sizes.append(num_bytes)
        if dist.get_rank() == 1 and len(sizes) > num_arenas:
            if what == "gpu":
                fail()
            num_bytes = 1 << 60
        return original(num_bytes, **kwargs)

    # Only what the arena asks for; the rest of torch goes on as it is.
    fake = SimpleNamespace(empty=empty, uint8=torch.uint8, cuda=torch.cuda)
    replaced: Any = mock.patch.object(arena, "torch", fake)
    if what == "norms":
        norms = fail if dist.get_rank() == 1 else plan_runner.BlockNorms
        replaced = mock.patch.object(plan_runner, "BlockNorms", norms)
    with replaced:
        try:
            build_optimizers(2, exchange={"staging_bytes": 10**6})
        except RuntimeError as error:
            return str(error)
    return "no error"


def _build_within(limit: int) -> str:
    try:
        built = build_optimizers(2, exchange={"staging_bytes": limit}, cases=[(64, [40, 24])] * 9)
    except RuntimeError as error:
        return str(error)
    return str(built.sharded.engine.staging_bytes)


def _build_within_the_least(limit: int) -> list[str]:
    """Build with a limit that cannot be kept, with the one that its error names, and with less."""
    refusal = _build_within(limit)
    least = int(re.search(r"Set --muon-fsdp-staging-bytes to (\d+) or more", refusal)[1])
    return [refusal, str(least), _build_within(least), _build_within(least - 1)]


# Two shapes of one block, and the blocks of query, key and value, 2 : 1 : 1 of 32 rows.
MATRICES = [(24, [31, 17]), (8, [16, 16]), (24, [7, 25])]


def _ranks_per_node(cost_model: str, sizes: list[str]) -> int:
    size = sizes[dist.get_rank()]
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": size} if size else {}):
        if not size:
            os.environ.pop("LOCAL_WORLD_SIZE", None)
        built = build_optimizers(2, exchange={"cost_model": cost_model}, cases=MATRICES)
    return built.sharded.engine.plans[0].cost.ranks_per_node


class Case(NamedTuple):
    """Settings of both ranks."""

    choices: Sequence[str]
    settings: Sequence[dict[str, Any]] = ({}, {})
    exchange: Sequence[dict[str, Any]] = ({}, {})


def _build(*case: Any) -> str:
    """Return the backend of the plan, or the error."""
    choice, settings, exchange = (each[dist.get_rank()] for each in case)
    try:
        exchange = {"newton_schulz": choice, **exchange}
        built = build_optimizers(2, settings, exchange, cases=MATRICES)
    except RuntimeError as error:
        return str(error)
    return built.sharded.engine.plans[0].cost.backend


def _connected_and_used(num_buckets: int, matrices: Any) -> list[Any]:
    """Return the ranks that are connected, the ranks that a step sends to, and the sizes."""
    original = dist.all_to_all_single
    sizes: list[tuple[list[int], list[int]]] = []

    def recorded(output: Any, sent: Any, received: Any, sends: Any, **options: Any) -> Any:
        sizes.append((list(sends), list(received)))
        return original(output, sent, received, sends, **options)

    exchange = {"comm_dtype": "bf16", "num_buckets": num_buckets, "cost_model": "stack_tiles=1"}
    with mock.patch.object(dist, "all_to_all_single", recorded):
        engine = build_optimizers(4, exchange=exchange, cases=matrices).sharded.engine
        connected = sizes.copy()
        engine._arena.allocate()
        (runner,) = engine.runners
        sizes.clear()
        for bucket in runner.buckets[: len(runner.plan.buckets)]:
            bucket.gather.start().wait()
            bucket.scatter.start().wait()
        used = [_pairs(sizes)]
    all_sizes = {size for call in connected for end in call for size in end}
    return [[_pairs([call]) for call in connected], used, sorted(all_sizes)]


def _pairs(calls: list[Any]) -> list[list[int]]:
    """Return to whom, and from whom, anything was sent; what a rank sends itself is left out."""
    ranks = [rank for rank in range(len(calls[0][0])) if rank != dist.get_rank()]
    return [[rank for rank in ranks if any(call[end][rank] for call in calls)] for end in (0, 1)]


# What cannot be allocated, and after how many arenas; torch raises a plain RuntimeError on a CPU.
ALLOCATIONS = [("norms", 0), ("gpu", 0), ("gpu", 1), *[("cpu", 0), ("cpu", 1)] * (kind() == "cpu")]
# Cost model, LOCAL_WORLD_SIZE of both ranks, and ranks a node.
NODES = [
    ("", ["4", "4"], 4),
    ("", ["6", "4"], 2),
    ("", ["4", ""], 8),
    ("", ["4", "all"], 8),
    ("", ["", ""], 8),
    ("ranks_per_node=2", ["4", "4"], 2),
]
STANDARD = ["standard"] * 2
# Parts of the errors, and what is built otherwise.
DIFFERING = {
    "standard": Case(STANDARD),
    "gram": Case(["gram"] * 2),
    # Each rank would wait in another collective.
    "newton_schulz='gram'": Case(["standard", "gram"]),
    "staging_bytes=2000000": Case(
        STANDARD, exchange=[{"staging_bytes": 10**6}, {"staging_bytes": 2 * 10**6}]
    ),
    # Such ranks once trained on under Megatron.
    "spectral 0.2": Case(STANDARD, settings=[{"extra_scale_factor": x} for x in (1.0, 0.2)]),
}


def _all(function: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> list[Any]:
    return [function(*case) for case in cases]


_OF_CPU_RANKS = {
    "nodes": partial(_all, _ranks_per_node, [case[:2] for case in NODES]),
    "differing": partial(_all, _build, list(DIFFERING.values())),
}
results = cached_cases(
    {
        2: {
            "memory": partial(_all, _error_without_memory, ALLOCATIONS),
            "limit": partial(_build_within_the_least, 1000),
            **(_OF_CPU_RANKS if kind() == "cpu" else {}),
        },
        # The last two ranks hold nothing of the one matrix of the last case.
        4: {
            "connected": partial(
                _all, _connected_and_used, [(3, None), (1, None), (1, [(24, [16, 16, 0, 0])])]
            )
        },
    }
)


def test_allocation_that_fails_on_one_rank_is_an_error_on_all():
    """An allocation that fails on one rank is an error on all, with the flag that decides it."""
    for errors in results(2)["memory"]:
        for error, (what, num_arenas) in zip(errors, ALLOCATIONS, strict=True):
            assert "See more" not in error and "rank 0:" not in error
            assert "Lower --muon-fsdp-staging-bytes (now 1,000,000)" in error
            if what == "norms":
                assert "rank 1: CUDA out of memory." in error
                continue
            purpose = "results" if num_arenas else "messages and stacks"
            requested = rf"rank 1: expected \d[\d,]* bytes on (cpu|cuda:\d) for {purpose}, got "
            assert re.search(requested, error)
            assert ("OutOfMemoryError: CUDA" if what == "gpu" else "RuntimeError: ") in error


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (AssertionError("a kernel is wrong"), False),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
    ],
)
def test_fault_at_construction_keeps_its_traceback(error, is_memory):
    """A fault at construction keeps its cause, and only missing memory has advice on memory."""

    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError, match="rank 0: ") as raised:
        on_all_ranks(fail, ExchangeSettings(), device())
    assert raised.value.__cause__ is error
    assert ("staging_bytes" in str(raised.value)) == is_memory


def test_infeasible_memory_limit_names_the_least_that_works():
    """A limit that is too small is refused with the least that works."""
    for refusal, least, used, refused in results(2)["limit"]:
        assert "expected at most 1,000 bytes a rank, got" in refusal
        assert "layer.0.weight, has 8,192" in refusal and "No optimizer was built" in refusal
        assert int(used) <= int(least)
        assert f"Set --muon-fsdp-staging-bytes to {least} or more" in refused


@pytest.mark.cpu_only
def test_ranks_a_node_are_those_of_the_launcher():
    """Ranks a node are the launcher's, unless the user says others."""
    assert results(2)["nodes"] == [[expected for *_, expected in NODES]] * 2


@pytest.mark.cpu_only
def test_setting_that_differs_on_one_rank_is_an_error_on_all():
    """A setting that differs on one rank is an error on all, and plans have the backend of all."""
    for errors in results(2)["differing"]:
        for error, expected in zip(errors, DIFFERING, strict=True):
            assert expected in error


def test_construction_connects_the_ranks_that_a_step_uses():
    """Construction connects exactly the ranks that gathers and scatters use."""
    for rank, found in enumerate(results(4)["connected"]):
        for connected, used, sizes in found:
            assert connected == used
            assert set(sizes) <= {0, 1}
        connected, _, sizes = found[-1]
        assert sizes == ([0, 1] if rank < 2 else [0])
