# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Construction of plan and engine, where one rank alone fails."""

import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.device import device
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, each_of

from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.engine_builder import on_all_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]

CASES = [(64, [40, 24])] * 9


def _error_without_memory(what: str, num_arenas: int) -> str:
    """Let an allocation of rank 1 fail, as a GPU's or as this CPU's, after some arenas.

    ``"norms"`` is another allocation, which comes before that of the arena.
    """
    import torch
    import torch.distributed as dist

    from megatron_muon.runtime import arena, local_rows

    original, sizes = torch.empty, []

    def fail(*_args: Any) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 8.00 GiB.\nSee the documentation."
        )

    def empty(num_bytes: int, **kwargs: Any) -> torch.Tensor:
        sizes.append(num_bytes)
        if dist.get_rank() == 1 and len(sizes) > num_arenas:
            if what == "gpu":
                fail()
            num_bytes = 1 << 60
        return original(num_bytes, **kwargs)

    replaced: Any = mock.patch.object(
        local_rows, "BlockNorms", fail if dist.get_rank() == 1 else local_rows.BlockNorms
    )
    if what != "norms":
        # Only what the arena asks for; the rest of torch goes on as it is.
        fake = SimpleNamespace(empty=empty, uint8=torch.uint8, cuda=torch.cuda)
        replaced = mock.patch.object(arena, "torch", fake)
    with replaced:
        try:
            build_optimizers(2, exchange={"staging_bytes": 10**6})
        except RuntimeError as error:
            return str(error)
    return "no error"


def _assert_refused(errors: list[str], cases: list[tuple[str, int]]) -> None:
    for error, (what, num_arenas) in zip(errors, cases, strict=True):
        assert "See the documentation" not in error and "rank 0:" not in error
        assert "Lower --muon-fsdp-staging-bytes (now 1,000,000)" in error
        if what == "norms":
            assert "rank 1: CUDA out of memory." in error
            continue
        purpose = "results and momentum" if num_arenas else "messages and stacks"
        requested = rf"rank 1: expected \d[\d,]* bytes on (cpu|cuda:\d) for {purpose}, got "
        assert re.search(requested, error)
        reason = (
            "OutOfMemoryError: CUDA out of memory. Tried" if what == "gpu" else "RuntimeError: "
        )
        assert reason in error


def test_allocation_that_fails_on_one_rank_is_an_error_on_all():
    """The other rank went on to the next collective and waited for it until the timeout.

    The error names what was asked for, and the flag that decides it: of the arenas of engine and
    step, and of small tensors, for which a full GPU has no memory either.
    """
    cases = [("norms", 0), ("gpu", 0), ("gpu", 1)]
    for errors in run_ranks(2, each_of, _error_without_memory, cases).check().results:
        _assert_refused(errors, cases)


@pytest.mark.cpu_only
def test_allocation_that_fails_on_a_cpu_is_an_error_on_all():
    """Torch raises a plain RuntimeError there."""
    cases = [("cpu", 0), ("cpu", 1)]
    for errors in run_ranks(2, each_of, _error_without_memory, cases).check().results:
        _assert_refused(errors, cases)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (AssertionError("a kernel is wrong"), False),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
    ],
)
def test_fault_at_construction_keeps_its_traceback(error, is_memory):
    """The cause was lost, and every fault advised to save memory."""

    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError, match="rank 0: ") as raised:
        on_all_ranks(fail, ExchangeSettings(), device())
    assert raised.value.__cause__ is error
    assert ("staging_bytes" in str(raised.value)) == is_memory


def _build_within(limit: int) -> str:
    """Build with a limit of memory; return the memory that is used, or the error."""
    try:
        built = build_optimizers(2, exchange={"staging_bytes": limit}, cases=CASES)
    except RuntimeError as error:
        return str(error)
    return str(built.sharded.engine.staging_bytes)


def test_infeasible_memory_limit_names_the_least_that_works():
    """On all ranks, at construction; and what it names does work."""
    ((refusal,), _) = run_ranks(2, each_of, _build_within, [[1000]]).check().results
    assert "expected at most 1,000 bytes a rank, got" in refusal
    assert "layer.0.weight, has 8,192" in refusal and "No optimizer was built" in refusal
    least = int(re.search(r"Set --muon-fsdp-staging-bytes to (\d+) or more", refusal)[1])
    results = run_ranks(2, each_of, _build_within, [[least], [least - 1]]).check().results
    for used, refused in results:
        assert int(used) <= least
        assert f"Set --muon-fsdp-staging-bytes to {least} or more" in refused
