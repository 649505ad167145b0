# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Construction of plan and engine, where one rank alone fails."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, init_group

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]


def _build_without_memory_for_norms() -> None:
    """Let another allocation of rank 1 fail, which comes before that of the arena."""
    import torch
    import torch.distributed as dist

    from megatron_muon.runtime import local_rows

    def fail(*_args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nSee the documentation.")

    init_group()
    if dist.get_rank() == 1:
        local_rows.BlockNorms = fail
    build_optimizers(2)


def test_other_allocation_that_fails_on_one_rank_is_an_error_on_all():
    """A full GPU has no memory for small tensors either."""
    run = run_ranks(2, _build_without_memory_for_norms, timeout_s=60.0)
    assert run.exit_codes == [1, 1]
    for output in run.outputs:
        assert "rank 1: CUDA out of memory." in output
        assert "lower --muon-fsdp-staging-bytes" in output


def _build_without_memory(is_gpu: bool, num_arenas: int) -> None:
    """Let an allocation of rank 1 fail, as a GPU's or as this CPU's, after some arenas."""
    import torch
    import torch.distributed as dist

    from megatron_muon.runtime import arena

    init_group()
    original, sizes = torch.empty, []

    def empty(num_bytes: int, **kwargs: Any) -> torch.Tensor:
        sizes.append(num_bytes)
        if dist.get_rank() == 1 and len(sizes) > num_arenas:
            if is_gpu:
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 8.00 GiB.\nSee the documentation."
                )
            num_bytes = 1 << 60
        return original(num_bytes, **kwargs)

    # Only what the arena asks for; the rest of torch goes on as it is.
    arena.torch = SimpleNamespace(empty=empty, uint8=torch.uint8)
    build_optimizers(2, exchange={"staging_bytes": 10**6})


@pytest.mark.parametrize("num_arenas", [0, 1], ids=["arena_of_engine", "arena_of_step"])
@pytest.mark.parametrize(
    ("is_gpu", "reason"),
    [
        (True, "OutOfMemoryError: CUDA out of memory. Tried to allocate 8.00 GiB."),
        pytest.param(False, "RuntimeError: ", marks=pytest.mark.cpu_only),
    ],
    ids=["gpu", "cpu"],
)
def test_allocation_that_fails_on_one_rank_is_an_error_on_all(is_gpu, reason, num_arenas):
    """The other rank went on to the next collective and waited for it until the timeout.

    The error names what was asked for, and the flag that decides it.
    """
    run = run_ranks(2, _build_without_memory, is_gpu, num_arenas, timeout_s=60.0)
    assert run.exit_codes == [1, 1]
    for output in run.outputs:
        text = output.partition("RuntimeError: Stopping on all ranks:")[2]
        assert re.search(
            r"rank 1: expected \d[\d,]* bytes on (cpu|cuda:\d) for messages and stacks", text
        )
        assert reason in text and "See the documentation" not in text
        assert "rank 0:" not in text
        assert "lower --muon-fsdp-staging-bytes (now 1,000,000)" in text


def _build_within(staging_bytes: list[int]) -> list[str]:
    """Build with limits of memory, one after the other."""
    init_group()
    found = []
    for limit in staging_bytes:
        try:
            built = build_optimizers(2, exchange={"staging_bytes": limit}, cases=CASES)
            found.append(str(built.sharded.compute.staging_bytes))
        except RuntimeError as error:
            found.append(str(error))
    return found


CASES = [(64, [40, 24])] * 9


def test_limit_that_no_plan_keeps_names_the_largest_matrix_and_the_least_that_works():
    """On all ranks, at construction; and what it names does work."""
    (refusal,), _ = run_ranks(2, _build_within, [1000]).check().results
    assert "expected at most 1,000 bytes a rank, got" in refusal
    assert "layer.0.weight, has 8,192" in refusal and "No optimizer was built" in refusal
    least = int(re.search(r"Set --muon-fsdp-staging-bytes to (\d+) or more", refusal)[1])
    results = run_ranks(2, _build_within, [least, least - 1]).check().results
    for used, refused in results:
        assert int(used) <= least
        assert f"Set --muon-fsdp-staging-bytes to {least} or more" in refused


def _connect_as_on_a_gpu() -> list[str]:
    """Connect once more, as if it took 1.5 GB of a GPU; return what is logged."""
    import logging

    import torch

    from megatron_muon.runtime.engine_builder import _connect

    init_group()
    engine = build_optimizers(2).sharded.compute
    free = iter((10_000_000_000, 8_500_000_000))
    torch.cuda.mem_get_info = lambda device: (next(free), 80_000_000_000)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_muon")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # On CPU ranks torch.device("cuda") is a CPU.
    _connect(engine, SimpleNamespace(type="cuda"))
    return logged


def test_memory_of_connections_is_logged_by_rank_0():
    """NCCL's may be gigabytes, of which torch's allocator knows nothing."""
    expected = "connecting took 1500 MB, 8500 MB are free"
    assert run_ranks(2, _connect_as_on_a_gpu).check().results == [[expected], []]
