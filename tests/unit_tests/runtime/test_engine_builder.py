# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Construction of plan and engine, where one rank alone fails."""

import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.device import device, kind
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, each_of

from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime import arena, local_rows
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
        norms = fail if dist.get_rank() == 1 else local_rows.BlockNorms
        replaced = mock.patch.object(local_rows, "BlockNorms", norms)
    with replaced:
        try:
            build_optimizers(2, exchange={"staging_bytes": 10**6})
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_allocation_that_fails_on_one_rank_is_an_error_on_all():
    """An allocation that fails on one rank is an error on all, with the flag that decides it."""
    cases = [("norms", 0), ("gpu", 0), ("gpu", 1)]
    # Torch raises a plain RuntimeError there.
    cases += [("cpu", 0), ("cpu", 1)] * (kind() == "cpu")
    for errors in run_ranks(2, each_of, _error_without_memory, cases).check().results:
        for error, (what, num_arenas) in zip(errors, cases, strict=True):
            assert "See more" not in error and "rank 0:" not in error
            assert "Lower --muon-fsdp-staging-bytes (now 1,000,000)" in error
            if what == "norms":
                assert "rank 1: CUDA out of memory." in error
                continue
            purpose = "results and momentum" if num_arenas else "messages and stacks"
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


def _build_within(limit: int) -> str:
    """Build with a limit of memory; return the memory that is used, or the error."""
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


def test_infeasible_memory_limit_names_the_least_that_works():
    """A limit that is too small is refused with the least that works."""
    by_rank = run_ranks(2, each_of, _build_within_the_least, [[1000]]).check().results
    for ((refusal, least, used, refused),) in by_rank:
        assert "expected at most 1,000 bytes a rank, got" in refusal
        assert "layer.0.weight, has 8,192" in refusal and "No optimizer was built" in refusal
        assert int(used) <= int(least)
        assert f"Set --muon-fsdp-staging-bytes to {least} or more" in refused
