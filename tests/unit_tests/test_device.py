# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Placement of ranks by ``--device cuda``, rehearsed without a GPU; the end of a rank of tests."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
from helpers import device, ranks
from helpers.ranks import run_ranks


def test_ranks_share_a_gpu_only_if_there_are_too_few():
    """NCCL refuses two ranks on one GPU of one host: they are told different hosts, or use gloo."""
    alone = device.place_ranks(8, "cuda", 8)
    assert [place.local_rank for place in alone] == list(range(8))
    assert not any(name.startswith("NCCL") for place in alone for name in place.variables)
    shared = device.place_ranks(8, "cuda", 4)
    assert [place.local_rank for place in shared] == [0, 1, 2, 3] * 2
    assert {place.backend for place in alone + shared} == {"nccl"}
    assert len({place.variables["NCCL_HOSTID"] for place in shared}) == 8
    over_gloo = device.place_ranks(4, "cuda", 1, shares_by_nccl=False)
    assert [(place.local_rank, place.backend) for place in over_gloo] == [(0, "gloo")] * 4


def _step() -> list[str]:
    from helpers.sharded_muon import build_optimizers, init_group, step_both

    init_group()
    optimizers = build_optimizers(2, {}, {"comm_dtype": "bf16"}, num_replicas=2)
    step_both(optimizers, "bf16")
    return optimizers.differences()


@pytest.mark.ranks
def test_test_that_runs_on_a_gpu_runs_where_a_cpu_stands_in_for_it(monkeypatch):
    """Ranks are told to share a GPU, and CPU ranks act as one: meshes, groups and plans are made.

    A hook of these helpers whose name is gone would be found on a GPU alone otherwise.
    """
    monkeypatch.setattr(ranks, "_places", lambda size: device.place_ranks(size, "cuda", 1))
    assert run_ranks(4, _step).check().results == [[]] * 4


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
