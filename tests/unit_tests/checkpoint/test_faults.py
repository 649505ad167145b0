# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Saves that are cut short, full disks, ranks that die, and what upstream's saves need repaired.

Nothing is lost, and nothing hangs.
"""

import functools
import os
import pkgutil
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.checkpoint_runs import (
    SAVED_AT,
    SCHEDULE,
    after_enable,
    die,
    kill_in_save,
    loadable,
    wrap,
)
from helpers.commands import run_torchrun
from helpers.ranks import PRETRAIN_GPT, launch, run_ranks
from helpers.repairs import without
from helpers.toy_fsdp import build_model
from helpers.toy_gpt import BF16, EP, ZERO, fsdp_toy_gpt

import megatron_muon
from megatron_muon.mcore.checkpoint_folders import TRACKER
from megatron_muon.mcore.checkpoint_reading import read_checkpoint

pytestmark = pytest.mark.ranks

FLAGS = [*BF16, *SCHEDULE]
SOAP, ASYNC = ("--optimizer", "soap"), ("--async-save",)


# How often the first test below kills a save; ten leave hardly a moment out.
NUM_KILLS = int(os.environ.get("MEGATRON_MUON_TEST_KILLS", "4"))


@pytest.mark.parametrize("more", [(), SOAP, ASYNC], ids=["muon", "soap", "async"])
@pytest.mark.slow
def test_save_killed_at_random_moments_leaves_a_checkpoint(more, tmp_path):
    """After a SIGKILL of either rank in a save, the tracker points to a checkpoint that loads."""
    rng = random.Random(4)
    # An asynchronous save is complete after its call, at the latest when the next one begins.
    killed, longest = (3, 2.0) if more == ASYNC else (2, 1.1)
    seen, common = {}, [*FLAGS, *more, "--save-interval", "1"]
    all_codes: list[int] = []
    for attempt in range(NUM_KILLS):
        folder, victim, fraction = tmp_path / str(attempt), attempt % 2, rng.uniform(0, longest)
        flags = [*common, "--exit-interval", str(killed), "--save", str(folder)]
        run = launch(
            2,
            fsdp_toy_gpt(ZERO[3], *flags),
            before=functools.partial(kill_in_save, victim, fraction, killed),
        )
        assert run.exit_codes[victim] in (-signal.SIGKILL, 0), run.exit_codes
        assert run.exit_codes[1 - victim] in (1, 0), run.exit_codes
        all_codes += run.exit_codes
        seen[loadable(folder)] = folder
    iteration, folder = min(seen.items())
    assert iteration < killed, seen
    assert -signal.SIGKILL in all_codes
    flags = [*common, "--exit-interval", str(killed + 1), "--load", str(folder)]
    resumed = launch(2, fsdp_toy_gpt(ZERO[3], *flags, "--save", str(folder))).check()
    expected = [*range(iteration + 1, killed + 2)]
    assert [record["iteration"] for record in resumed.history] == expected
    assert loadable(folder) == killed + 1
    # What the killed save left is gone: the folder was saved again.
    again = read_checkpoint(folder / f"iter_{killed:07d}")
    found = {path.name for path in again.folder.glob("*.distcp")}
    assert found == {item.relative_path for item in again.metadata.storage_data.values()}


def _kill_before_metadata() -> None:
    from torch.distributed.checkpoint.filesystem import _FileSystemWriter

    wrap(_FileSystemWriter, "finish", lambda original, *args, **kwargs: die())


def _kill_in_tracker() -> None:
    """Die with the tracker open for writing."""
    from megatron.core.msc_utils import MaybeMultiStorageClient

    def lookup(original, self, name):
        found = original(self, name)

        def opened(path, mode="r", **kwargs):
            context = found(path, mode, **kwargs)
            if mode == "w" and os.path.basename(path) == TRACKER:
                context.__enter__()
                die()
            return context

        return opened if name == "open" else found

    wrap(MaybeMultiStorageClient, "__getattr__", lookup)


@pytest.mark.parametrize("more", [(), ASYNC], ids=["sync", "async"])
@pytest.mark.slow
def test_iteration_that_is_saved_again_survives_a_kill(more, tmp_path):
    """The only checkpoint survives a kill while it is saved again, as upstream's does not."""
    short = [*FLAGS, *more, "--train-iters", "4", "--lr-decay-iters", "20"]
    flags = fsdp_toy_gpt(ZERO[3], *short, "--save", str(tmp_path), "--load", str(tmp_path))
    launch(2, flags).check()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("iter_0000004/*.distcp")}
    for break_it in (_kill_before_metadata, _kill_in_tracker):
        killed = launch(2, flags, before=functools.partial(after_enable, break_it))
        assert killed.exit_codes == [-signal.SIGKILL, 1]
        assert loadable(tmp_path) == 4
        if break_it is _kill_before_metadata:
            assert all(path.stat().st_mtime_ns == when for path, when in before.items())
        launch(2, flags).check()
        assert loadable(tmp_path) == 4


def _save_alone(folder: str) -> list[Any]:
    """Save as another library in the process may, each rank with metadata of its own."""
    dist.init_process_group("gloo")
    megatron_muon.enable()
    state = {"rank": torch.full((3,), float(dist.get_rank()))}
    for _ in range(2):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), use_collectives=False)
        dist.barrier()
    return sorted(path.name for path in Path(folder).glob("*.distcp"))


@pytest.mark.slow
def test_saves_of_others_are_left_alone(tmp_path):
    """Saves that are not Megatron's of this format are written by torch's own writer."""
    names = ["__0_0.distcp", "__1_0.distcp"]
    assert run_ranks(2, _save_alone, str(tmp_path)).check().results == [names, names]


def _at(owner_path: str, name: str, call_number: int, act: Callable[[], object]) -> None:
    """Do something on rank 1 in the given call of a function or method."""
    calls: list[int] = []

    def call(original, *args, **kwargs):
        calls.append(1)
        if len(calls) == call_number and os.environ["RANK"] == "1":
            act()
        return original(*args, **kwargs)

    wrap(pkgutil.resolve_name(owner_path), name, call)


def _fill_disk() -> None:
    """Let no file of this rank grow beyond 50 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))


def _run_out_of_memory() -> None:
    raise MemoryError("rank 1 is out of memory")


SAVE_CHECKPOINT = ("megatron.training.training", "save_checkpoint")


@pytest.mark.parametrize("more", [(), ASYNC], ids=["sync", "async"])
@pytest.mark.slow
def test_full_disk_is_an_error_on_all_ranks_and_no_checkpoint(more, tmp_path):
    """Every rank says which rank could not write and why; the previous checkpoint stays."""
    flags = [*FLAGS, *more, "--save-interval", "1", "--save", str(tmp_path)]
    for attempt in range(2):
        load = ("--ckpt-step", "1", "--load", str(tmp_path)) if attempt else ()
        arguments = fsdp_toy_gpt(ZERO[3], *flags, *load)
        run = launch(
            2, arguments, before=functools.partial(_at, *SAVE_CHECKPOINT, 2 - attempt, _fill_disk)
        )
        assert run.exit_codes == [1, 1]
        assert "CheckpointException ranks:dict_keys([1])" in run.outputs[0]
        assert "File too large" in run.outputs[0]
        assert loadable(tmp_path) == 1
        assert not (tmp_path / "iter_0000002" / ".metadata").exists()
        # What the first attempt left does not pile up.
        assert len(list((tmp_path / "iter_0000002").glob("*.distcp"))) <= 2


ENGINE = ("megatron_muon.runtime.exchange.AllToAll", "start", 4)
SAVE = ("megatron_muon.mcore.chained_optimizer.FSDPMuonChainedOptimizer", "sharded_state_dict", 2)
FAULTS = [
    pytest.param(*ENGINE, die, -signal.SIGKILL, id="killed_in_the_gather", marks=pytest.mark.slow),
    pytest.param(*ENGINE, _run_out_of_memory, 1, id="raises_in_the_gather", marks=pytest.mark.slow),
    pytest.param(*SAVE, _run_out_of_memory, 1, id="raises_in_a_save", marks=pytest.mark.slow),
    pytest.param(*SAVE, die, -signal.SIGKILL, id="killed_in_a_save"),
]


@pytest.mark.parametrize(("owner", "name", "call_number", "action", "code"), FAULTS)
def test_rank_that_fails_ends_the_job(owner, name, call_number, action, code, tmp_path):
    """The other rank ends at once when its peer is gone, not after Megatron's ten minutes."""
    flags = fsdp_toy_gpt(ZERO[3], *FLAGS, "--save", str(tmp_path))
    run = launch(2, flags, before=functools.partial(_at, owner, name, call_number, action))
    assert run.exit_codes == [1, code]
    assert "Connection" in run.outputs[0]


def _stop_in_the_gather(seconds: int) -> None:
    """Stop rank 1, with a part of the minutes that --distributed-timeout-minutes takes."""
    from megatron.training import initialize

    def initialized(original, *args, **kwargs):
        initialize.get_args().distributed_timeout_minutes = seconds / 60
        return original(*args, **kwargs)

    wrap(initialize, "_initialize_distributed", initialized)
    _at(*ENGINE, lambda: os.kill(os.getpid(), signal.SIGSTOP))


@pytest.mark.slow
def test_rank_that_stands_still_ends_the_job_after_the_timeout():
    """Groups of the exchange wait as long as --distributed-timeout-minutes says."""
    flags = fsdp_toy_gpt(ZERO[3], *FLAGS)
    run = launch(2, flags, before=functools.partial(_stop_in_the_gather, 5), ends_with=0)
    assert run.exit_codes == [1, -signal.SIGKILL]
    assert "Timed out waiting 5000ms" in run.outputs[0]


FAILING_SCRIPT = f"""
import os, runpy
from megatron_muon.step.muon_step import MuonStep
step = MuonStep.step
calls = []
def failing(self):
    calls.append(1)
    if len(calls) == 3 and os.environ["RANK"] == "1":
        raise MemoryError("rank 1 is out of memory")
    return step(self)
MuonStep.step = failing
runpy.run_path({str(PRETRAIN_GPT)!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_torchrun_ends_with_the_traceback_of_the_first_error(tmp_path):
    """The summary of torchrun shows the rank that failed first, with its error."""
    script = tmp_path / "script.py"
    script.write_text(FAILING_SCRIPT)
    done = run_torchrun(2, str(script), *fsdp_toy_gpt(ZERO[3], *FLAGS))
    assert done.returncode == 1
    summary = done.stderr[done.stderr.rindex("Root Cause (first observed failure)") :]
    assert "rank      : 1" in summary
    assert "MemoryError: rank 1 is out of memory" in summary


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


@pytest.mark.parametrize(
    ("attribute", "sharding", "flags"),
    [
        pytest.param("handle_swiglu_in_state_dict", ZERO[3], BF16, id="muon"),
        pytest.param("make_fsdp_dtensor", ZERO[0], BF16, id="no_shard"),
    ],
)
@pytest.mark.slow
def test_save_fails_without_the_repair(attribute, sharding, flags, tmp_path):
    """Saves of gated layers fail without the repairs of states and plain tensors."""
    arguments = [*flags, *SCHEDULE, "--save", str(tmp_path), "--exit-interval", str(SAVED_AT)]
    run = launch(
        2, fsdp_toy_gpt(sharding, *arguments), before=functools.partial(without, attribute)
    )
    assert 1 in run.exit_codes
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.slow
def test_adam_with_empty_shards_saves(tmp_path):
    """Ranks with empty shards join the collectives of a save with the same set of tensors."""
    flags = [*EP, *BF16, *SCHEDULE, "--exit-interval", str(SAVED_AT), "--optimizer", "adam"]
    launch(4, fsdp_toy_gpt(ZERO[3], *flags, "--save", str(tmp_path))).check()
    assert (tmp_path / f"iter_{SAVED_AT:07d}" / ".metadata").exists()


def _split_latent_attention() -> list[Any]:
    """Split states by a stand-in for ``handle_mla_down_proj_in_state_dict`` of later releases."""
    from megatron_muon.mcore.checkpoint_repairs import split_every_state

    def handler(model: Any, weights: dict[str, Any], states: Any) -> tuple[dict[str, Any], None]:
        assert states is None, "its own way knows Adam's states alone"
        parts = {}
        for name, tensor in weights.items():
            rows = model.get_parameter(name).megatron_fsdp_slice
            assert rows.stop - rows.start == tensor._local_tensor.numel()
            parts |= {name.replace("_qkv", f"_{part}"): (part, tensor) for part in ("q", "kv")}
        return parts, None

    model = build_model()
    param = dict(model.module.param_and_grad_buffer.optimizer_named_parameters)[QKV]
    states = {QKV: {"momentum_buffer": torch.zeros_like(param.data), "step": 3}}
    _, split = split_every_state(handler, model, {QKV: param.data}, {"state": states, "groups": 1})
    parts = {name: [*of_part] for name, of_part in split["state"].items()}
    return [parts, split["groups"]]


def test_every_state_of_fused_latent_attention_is_split():
    """All states are split by a handler of later releases, which knows Adam's alone."""
    kinds = ["step", "momentum_buffer"]
    parts = {QKV.replace("_qkv", part): kinds for part in ("_q", "_kv")}
    assert run_ranks(2, _split_latent_attention).check().results == [[parts, 1]] * 2
