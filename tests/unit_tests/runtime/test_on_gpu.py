# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show of a step: streams, the allocator, and where the host waits."""

import datetime
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.device import device
from helpers.kernel_bits import difference_from_torch
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, init_group
from helpers.whole_matrices import float64_normalize

from megatron_muon.newton_schulz.standard import Standard
from megatron_muon.runtime import row_moves

pytestmark = [pytest.mark.ranks, pytest.mark.cuda]

NUM_STEPS = 3
SLEEP_CYCLES = 20_000_000  # ten milliseconds of a GPU
# Matrices of one size: two ranks own twelve each, three in every bucket.
ROWS, COLS, NUM_MATRICES, NUM_BUCKETS = 2048, 1024, 24, 4
CASES = [*[(COLS, [ROWS // 4, 3 * ROWS // 4])] * NUM_MATRICES, (COLS, [ROWS // 2, ROWS // 2])]
# cuBLAS has a workspace of 32 MiB for each stream, and blocks are rounded up.
SLACK_BYTES = 96 * 2**20
# 64 to 128 MB a communicator and 500 MB of buffers between near ranks were computed from NCCL's
# source; more would not leave room for a model.
MAX_CONNECTED_BYTES = 2 * 2**30
# What rank 1 may still allocate, less than a bucket, and how long an error may take to rank 0.
ROOM_BYTES, MAX_RAISE_S = 8 * 2**20, 20.0


def _step_behind_late_kernels(grid: dict[str, int], cases: Any) -> list[str]:
    """Let ranks with odd numbers be late with gradients and with every product.

    The host is ahead of the device in the whole step: a collective that did not wait for the
    stream would send, or hand on, what was there before.
    """
    init_group()
    exchange = {"comm_dtype": "bf16", "num_buckets": 4}
    optimizers = build_optimizers(2, {}, exchange, cases=cases, **grid)
    is_late = dist.get_rank() % 2 == 1
    newton_schulz = Standard.run

    def run_late(self: Any, stack: Any, call: Any) -> Any:
        torch.cuda._sleep(SLEEP_CYCLES)
        return newton_schulz(self, stack, call)

    if is_late:
        Standard.run = run_late
    for step in range(NUM_STEPS):
        optimizers.set_gradients(step)
        held = [p.grad._local_tensor for p, _, _ in optimizers.params if p.grad is not None]
        values = [gradient.clone() for gradient in held]
        for gradient in held:
            gradient.fill_(float("nan"))
        torch.cuda.synchronize()
        if is_late:
            torch.cuda._sleep(SLEEP_CYCLES)
        torch._foreach_copy_(held, values)
        optimizers.sharded.step()
    Standard.run = newton_schulz
    # Whole matrices, as often, with the norm of comm_dtype bf16.
    for step in range(NUM_STEPS):
        optimizers.set_gradients(step)
        with mock.patch("torch.nn.functional.normalize", float64_normalize):
            optimizers.whole.step()
    return optimizers.differences()


@pytest.mark.parametrize(
    "grid", [{}, {"num_replicas": 2}, {"num_tensor_ranks": 2}], ids=["shards", "hsdp", "tp2"]
)
def test_messages_wait_for_kernels_that_are_late(grid):
    """Messages wait for late kernels, and results have the bits of whole matrices."""
    cases = [*[(96, [40 + i, 56 - i]) for i in range(16)], (24, [7, 25])]
    world_size = 4 if grid else 2
    run = run_ranks(world_size, _step_behind_late_kernels, grid, cases).check()
    assert run.results == [[]] * world_size


def _memory_of_steps() -> dict[str, int]:
    """Return what construction and steps take of the allocator, and construction of the GPU."""
    init_group()
    warm = torch.ones(64, 64, device=device(), dtype=torch.bfloat16)
    warm @ warm  # cuBLAS's workspace
    before: dict[str, int] = {}

    # When parameters and the reference are there.
    def build(*args: Any, **options: Any) -> Any:
        from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon

        torch.cuda.synchronize()
        before["free"] = torch.cuda.mem_get_info()[0]
        return FSDPZeROTensorParallelMuon(*args, **options)

    exchange = {"comm_dtype": "bf16", "num_buckets": NUM_BUCKETS}
    optimizers = build_optimizers(2, {}, exchange, cases=CASES, sharded=build)
    connected = before["free"] - torch.cuda.mem_get_info()[0]
    engine = optimizers.sharded.engine
    rows = {each: each.of(each.param._local_tensor.detach() + 1) for each in engine.handles}
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(NUM_STEPS):
        for _ in engine.orthogonalize(rows, rows):
            pass
    torch.cuda.synchronize()
    return {
        "connected": connected,
        "staging": engine.staging_bytes,
        "peak": torch.cuda.max_memory_allocated() - held,
        "left": torch.cuda.memory_allocated() - held,
    }


@pytest.mark.parametrize("expandable", ["False", "True"])
def test_steps_take_the_staging_memory_that_is_reported(expandable):
    """A step takes the reported staging memory, and Newton-Schulz's of a stack.

    Construction allocates momentum; the rest that it needs of the GPU is NCCL's.
    """
    # The first name is that of torch 2.9 and later.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    env = dict.fromkeys(names, f"expandable_segments:{expandable}")
    for found in run_ranks(2, _memory_of_steps, env=env).check().results:
        print(found)
        owned = NUM_MATRICES // 2 // NUM_BUCKETS + 1
        # Three tensors like a stack, and three Gram matrices a matrix.
        temporary = 2 * 3 * owned * (ROWS * COLS + COLS**2)
        assert 0 < found["staging"] <= found["peak"]
        assert found["peak"] <= found["staging"] + temporary + SLACK_BYTES
        assert found["left"] <= SLACK_BYTES
        assert found["connected"] <= MAX_CONNECTED_BYTES


def _build_without_memory() -> list[Any]:
    """Leave rank 1 little memory; return what is raised, and after how long."""
    # Twice as long as an error may take: a rank that waits for the other one is seen.
    init_group(timeout=datetime.timedelta(seconds=2 * MAX_RAISE_S))
    store = dist.distributed_c10d._get_default_store()

    def build(params: Any, **options: Any) -> Any:
        from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon

        if dist.get_rank() == 1:
            torch.cuda.empty_cache()
            room = torch.cuda.memory_reserved() + ROOM_BYTES
            total = torch.cuda.get_device_properties(device()).total_memory
            torch.cuda.set_per_process_memory_fraction(room / total, device())
        return FSDPZeROTensorParallelMuon(params, **options)

    start_s, text = time.monotonic(), "no error"
    try:
        build_optimizers(2, {}, {"comm_dtype": "bf16"}, cases=CASES, sharded=build)
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start_s
    # Whoever raised stays: the end of a rank would end the other's wait.
    store.set(f"raised_{dist.get_rank()}", "1")
    store.wait([f"raised_{rank}" for rank in range(2)])
    dist.destroy_process_group()
    return [text, seconds]


def test_rank_that_runs_out_of_memory_is_an_error_on_both():
    """A GPU without memory is an error on both ranks before any timeout."""
    for text, seconds in run_ranks(2, _build_without_memory).check().results:
        assert "Stopping on all ranks" in text and "out of memory" in text
        assert seconds < MAX_RAISE_S


# Parts of torch that may wait by themselves; calls go through other parts of it.
PLACES = ("/megatron_muon/", "/megatron/", "/torch/optim/", "/torch/nn/", "/torch/distributed/")


@contextmanager
def _counted_waits(places: Counter[str]) -> Iterator[None]:
    """Count operations that make the host wait for the device, by the line that calls them."""

    def note(message: Any, *_args: Any, **_options: Any) -> None:
        if "synchronizing" in str(message):
            frames = reversed(traceback.extract_stack(sys._getframe(1)))
            lines = (f"{f.filename}:{f.lineno}" for f in frames)
            places[next((x for x in lines if any(place in x for place in PLACES)), "torch")] += 1

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _waits_of_a_step() -> dict[str, int]:
    """Count in the third step of a model under Megatron-FSDP."""
    from helpers.toy_fsdp import build_model, build_optimizer, run_backward

    model = build_model()
    optimizer = build_optimizer(model, clip_grad=1.0)
    places: Counter[str] = Counter()
    for step in range(3):
        optimizer.zero_grad()
        run_backward(model, seed=step)
        model.finish_grad_sync()
        if step < 2:
            optimizer.step()
            continue
        with _counted_waits(places):
            optimizer.step()
    return dict(places)


def _kernel_of_rows() -> list[Any]:
    """Compare the kernel that moves rows with torch, and say whether steps use it."""
    init_group()
    return [difference_from_torch(device()), row_moves.uses_kernel(device())]


def test_kernel_that_moves_rows_has_the_bits_of_torch():
    """The kernel compiled for the card moves rows with torch's bits."""
    assert run_ranks(1, _kernel_of_rows).check().results == [[None, True]]


@pytest.mark.parametrize("world_size", [1, 2])
def test_host_waits_once_in_a_step(world_size):
    """The host waits once in a step, before momentum changes."""
    for found in run_ranks(world_size, _waits_of_a_step).check().results:
        print(found)
        own = {place: count for place, count in found.items() if "/megatron_muon/" in place}
        assert sum(own.values()) <= 1, own
