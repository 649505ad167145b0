# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What ``--device cuda`` does, rehearsed without a GPU; how ranks of tests end."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import device, ranks
from helpers.ranks import ROOT, UNIT_TESTS, run_ranks


def test_each_rank_has_a_gpu_where_there_are_enough():
    """As torchrun places them: NCCL is told nothing."""
    places = device.place_ranks(8, "cuda", 8)
    assert [place.local_rank for place in places] == list(range(8))
    for place in places:
        assert (place.kind, place.backend) == ("cuda", "nccl")
        assert not any(name.startswith("NCCL") for name in place.variables)


@pytest.mark.parametrize(("world_size", "num_gpus"), [(2, 1), (4, 1), (8, 4)])
def test_ranks_that_share_a_gpu_are_different_hosts_to_nccl(world_size, num_gpus):
    """It refuses two ranks on one GPU of one host."""
    places = device.place_ranks(world_size, "cuda", num_gpus)
    assert {place.backend for place in places} == {"nccl"}
    assert [place.local_rank for place in places] == [i % num_gpus for i in range(world_size)]
    assert len({place.variables["NCCL_HOSTID"] for place in places}) == world_size
    assert all(place.variables["NCCL_SOCKET_IFNAME"] == "lo" for place in places)
    (line,) = {device.summary(places, num_gpus, "")}
    assert line == f"{world_size} ranks shared {num_gpus} GPUs over NCCL, by NCCL_HOSTID"


def test_ranks_share_a_gpu_over_gloo_where_nccl_does_not_start():
    """And the last lines of pytest say so, with the reason."""
    places = device.place_ranks(4, "cuda", 1, shares_by_nccl=False)
    assert [(place.local_rank, place.backend) for place in places] == [(0, "gloo")] * 4
    assert not any("NCCL_HOSTID" in place.variables for place in places)
    line = device.summary(places, 1, "exit codes [1, 1]")
    assert line == "4 ranks shared 1 GPUs over gloo: NCCL did not start, exit codes [1, 1]"


def test_files_of_the_pieces_place_their_tensors_on_the_device():
    """They exist, belong to one piece, and name neither gloo nor the CPU to torch."""
    files = [file for piece in device.PIECES.values() for file in piece]
    assert len(set(files)) == len(files)
    for file in files:
        text = (UNIT_TESTS / file).read_text()
        for wrong in ('init_process_group("', 'init_device_mesh("', 'torch.device("cpu")'):
            assert wrong not in text, f"{file}: expected helpers.device, got {wrong}"


@pytest.mark.slow
def test_piece_asks_for_a_gpu():
    """In one line, where there is none."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = ["bash", "scripts/test.sh", "--device", "cuda", "--piece", "engine"]
    env = {**os.environ, "MEGATRON_MUON_PYTHON": sys.executable}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--device cuda: expected a GPU that torch can use, got none" in done.stderr


def _step() -> list[str]:
    from helpers.sharded_muon import build_optimizers, init_group, step_both

    init_group()
    optimizers = build_optimizers(2, {}, {"wire": "bf16"}, num_replicas=2)
    step_both(optimizers, "bf16")
    return optimizers.differences()


@pytest.mark.ranks
def test_test_that_runs_on_a_gpu_runs_where_a_cpu_stands_in_for_it(monkeypatch):
    """Ranks are told to share a GPU, and CPU ranks act as one: meshes, groups and plans are made.

    A hook of these helpers whose name is gone would be found on a GPU alone otherwise.
    """
    monkeypatch.setattr(ranks, "_places", lambda size: device.place_ranks(size, "cuda", 1))
    assert run_ranks(4, _step).check().results == [[]] * 4


def _where_if_spawned() -> list[Any]:
    """Return where a rank computes, and a sum; in a fork end as if it could not use its GPU."""
    import torch.distributed as dist

    if "helpers.preloaded" in sys.modules:
        os._exit(ranks._CANNOT_USE_GPU)
    device.init_group()
    total = torch.ones(1, device=device.device())
    dist.all_reduce(total)
    return [device.kind(), dist.get_backend(), total.item()]


@pytest.mark.slow
@pytest.mark.ranks
def test_forked_ranks_that_cannot_use_their_gpu_are_spawned(monkeypatch):
    """As where importing megatron has used CUDA; later worlds are spawned at once."""
    monkeypatch.setattr(ranks, "start_method", "forkserver")
    with pytest.warns(UserWarning, match="forked ranks cannot use their GPUs: ranks are spawned"):
        run = run_ranks(2, _where_if_spawned)
    assert run.check().results == [["cpu", "gloo", 2.0]] * 2 and ranks.start_method == "spawn"


def _start_process(path: str, is_failing: bool) -> None:
    """Start a process that outlives this rank by far, and note its number."""
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()
    Path(path).write_text(str(process.pid))
    assert not is_failing


@pytest.mark.ranks
@pytest.mark.parametrize("is_failing", [False, True])
def test_rank_ends_the_processes_that_it_started(is_failing, tmp_path):
    """A save of Megatron starts one, of 0.4 GB; a run of all tests once left dozens."""
    run = run_ranks(1, _start_process, str(tmp_path / "pid"), is_failing)
    assert run.exit_codes == [int(is_failing)]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
