# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""CPU ranks: ``torch.cuda`` and NCCL's collectives without a GPU, and the end of a process.

Names stay replaced in a process: ranks, which are forked from a server that has enabled CPU ranks,
show most of it.
"""

import sys
from typing import Any

import pytest
from helpers.commands import run_command
from helpers.ranks import ROOT, run_ranks


def _rng_tracker_draws_as_upstream() -> None:
    import torch
    from megatron.core.tensor_parallel import random

    def draw() -> Any:
        torch.manual_seed(1)
        tracker = random.CudaRNGStatesTracker()
        tracker.add("outer", 11)
        tracker.add("inner", 12)
        values = []
        for _ in range(2):
            values.append(torch.rand(3))
            with tracker.fork("outer"):
                values.append(torch.rand(3))
                with tracker.fork("inner"):
                    values.append(torch.rand(3))
                values.append(torch.rand(3))
            values.append(torch.rand(3))
        return torch.stack(values)

    ours = draw()
    assert torch.equal(ours, draw()) and len(ours.unique(dim=0)) == len(ours)
    torch.manual_seed(11)
    assert torch.equal(ours[1], torch.rand(3)) and torch.equal(ours[3], torch.rand(3))


def _call_cuda() -> None:
    from types import SimpleNamespace

    import torch
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    cpu = torch.device("cpu")
    assert torch.device("cuda") == torch.device("cuda:1") == torch.device(0) == cpu
    assert torch.device("meta").type == "meta"
    for device in ("cuda", "cuda:0", 0, torch.cuda.current_device(), torch.device("cuda", 0)):
        assert torch.empty(2, device=device).device == cpu
        assert torch.empty(2).to(device).device == cpu
        assert torch.nn.Linear(2, 2, device=device).to(device).weight.device == cpu
    assert torch.empty(2, device="meta").is_meta
    half = torch.ones(2).to("cuda", torch.bfloat16, True)
    assert half.dtype is torch.bfloat16 and half.type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(2).type(torch.float64).dtype is torch.float64
    assert half.cuda(non_blocking=True) is half

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
        end.record()
    assert start.elapsed_time(end) >= 0

    # Torch's norms pass as sequence parallel, their parameters marked, the config untouched.
    config = SimpleNamespace(
        layernorm_zero_centered_gamma=False,
        persist_layer_norm=True,
        sequence_parallel=True,
        memory_efficient_layer_norm=False,
        normalization="RMSNorm",
    )
    norm = WrappedTorchNorm(config, 8)
    assert isinstance(norm, torch.nn.RMSNorm) and norm.weight.sequence_parallel
    assert config.sequence_parallel and config.persist_layer_norm


def _communicate_as_over_nccl() -> None:
    import datetime

    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _coalescing_manager

    dist.init_process_group(backend="nccl", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    subgroup = dist.new_group([0, 1], backend="nccl")
    assert dist.get_backend() == dist.get_backend(subgroup) == "gloo"
    mesh = torch.distributed.DeviceMesh.from_group(subgroup, "cuda")
    assert mesh.device_type == "cpu"

    for dtype in (torch.float32, torch.bfloat16):
        value = torch.full((3,), float(rank + 1), dtype=dtype)
        dist.all_reduce(value, op=dist.ReduceOp.AVG)
        assert value.tolist() == [1.5] * 3
        source, output = torch.arange(4.0).to(dtype) * (rank + 1), torch.empty(2, dtype=dtype)
        kept = source.clone()
        dist.reduce_scatter_tensor(output, source, op=dist.ReduceOp.AVG, group=subgroup)
        assert output.tolist() == [3.0 * rank, 3.0 * rank + 1.5] and torch.equal(source, kept)

    outputs = [torch.empty(2), torch.empty(3)]
    dist.all_gather(outputs, torch.arange(2.0 + rank))
    assert [output.tolist() for output in outputs] == [[0.0, 1.0], [0.0, 1.0, 2.0]]

    values = [torch.full((2,), float(rank + 1)), torch.full((3,), 2.0 * rank)]
    with _coalescing_manager(subgroup, async_ops=True) as manager:
        for value in values:
            dist.all_reduce(value, op=dist.ReduceOp.AVG, group=subgroup)
    manager.wait()
    assert [value.tolist() for value in values] == [[1.5] * 2, [1.0] * 3]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("num_ranks", "function"),
    [(1, _rng_tracker_draws_as_upstream), (1, _call_cuda), (2, _communicate_as_over_nccl)],
)
def test_cpu_ranks_do_what_gpus_do(num_ranks, function):
    """CPU ranks have random states, devices, streams, norms and averages as GPUs do."""
    run_ranks(num_ranks, function).check()


@pytest.mark.slow
def test_thread_that_waits_for_the_gil_does_not_abort_the_exit():
    """A thread that waits for the GIL at exit does not abort the process.

    If the machine is too busy for the thread to wait by then, the run ends well all the same.
    """
    code = f"""
import atexit, runpy, sys, threading, time
from datetime import timedelta
sys.path.insert(0, {str(ROOT / "scripts")!r})
import torch.distributed as dist
import cpu_ranks
from megatron_muon import launcher

def keep_the_gil():
    sys.setswitchinterval(1000)
    while time.monotonic() < begin + 1.5:
        pass

atexit.register(keep_the_gil)

def wait_in_cpp():
    try:
        dist.HashStore().wait(["nothing"], timedelta(seconds=1.0))
    except dist.DistStoreError:
        pass

def launch(argv, enable_cpu_ranks):
    global begin
    atexit.register(print, "at exit")
    begin = time.monotonic()
    threading.Thread(target=wait_in_cpp, daemon=True).start()
    threading.Timer(0.1, print, ["other thread"]).start()
    return 0

launcher.launch = launch
runpy.run_path({str(ROOT / "scripts" / "cpu_ranks")!r}, run_name="__main__")
"""
    done = run_command(sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (0, "other thread\nat exit\n"), done.stderr
