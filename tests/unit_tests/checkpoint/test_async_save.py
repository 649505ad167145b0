# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""``--async-save``: the checkpoints of a synchronous save, written while training goes on."""

import gc
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.checkpoint_runs import LAST, after_enable, loadable, wrap
from helpers.fsdp2_models import stored
from helpers.ranks import launch, on_ranks
from helpers.toy_gpt import BF16, EP, HSDP, TP, ZERO, fsdp_toy_gpt, slow

pytestmark = pytest.mark.ranks

SCHEDULE = f"--train-iters {LAST} --lr-decay-iters 20 --async-save".split()
OFFLOADED = ("--exp-avg-dtype", "bf16", "--optimizer-cpu-offload")


def _write_after_the_next_step() -> None:
    """Let the thread of a save wait for the step that follows; a save leaves no memory behind."""
    from megatron.training import training

    from megatron_muon.mcore import async_save

    waiting: list[threading.Event] = []
    writers: list[Any] = []
    steps: list[int] = []

    def schedule(original: Any, caller: Any, request: Any) -> None:
        stepped = threading.Event()
        waiting.append(stepped)
        writers.append(weakref.ref(request.async_fn.__self__))
        if len(steps) == LAST:
            stepped.set()

        def write(write: Any = request.async_fn) -> None:
            stepped.wait()
            write()

        original(caller, request._replace(async_fn=write))

    def log(original: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        for stepped in waiting:
            stepped.set()
        return original(*args, **kwargs)

    def complete(original: Any, writer: Any) -> None:
        gc.collect()
        assert [ref() for ref in writers if ref() is not None] == [writer]
        original(writer)

    wrap(async_save._Thread, "schedule_async_call", schedule)
    wrap(training, "training_log", log)
    wrap(async_save.AsyncWriter, "complete", complete)


def _late() -> None:
    after_enable(_write_after_the_next_step)


@pytest.mark.parametrize(
    ("world_size", "zero", "interval", "flags"),
    [
        pytest.param(2, 3, 2, BF16, id="muon"),
        slow(2, 3, 1, (*BF16, "--optimizer", "adam"), id="adam_in_every_iteration"),
        slow(2, 2, 2, ("--optimizer", "lion"), id="lion"),
        slow(2, 3, 2, ("--optimizer", "soap", "--lr", "2e-3"), id="soap"),
        slow(2, 0, 2, ("--dist-ckpt-workers", "2"), id="no_shard_fp32"),
        slow(4, 3, 2, (*TP, *BF16, *OFFLOADED), id="tp2_bf16_momentum_in_cpu_memory"),
        slow(4, 3, 2, (*EP, *HSDP, *BF16), id="ep2_hsdp"),
    ],
)
def test_checkpoints_are_those_of_a_synchronous_save(world_size, zero, interval, flags, tmp_path):
    """A save that is written while later steps run has the bits of a synchronous one."""
    runs = {}
    for name, before in (("sync", None), ("async", _late)):
        extra = SCHEDULE if before else SCHEDULE[:-1]
        arguments = [*flags, *extra, "--save", str(tmp_path / name), "--save-interval"]
        arguments = fsdp_toy_gpt(ZERO[zero], *arguments, str(interval))
        runs[name] = launch(world_size, arguments, before=before).check()
    assert runs["async"].losses == runs["sync"].losses
    assert runs["async"].outputs[0].count("scheduled an async checkpoint save") >= 3
    folders = sorted(path.name for path in (tmp_path / "sync").glob("iter_*"))
    assert folders == sorted(path.name for path in (tmp_path / "async").glob("iter_*"))
    for folder in folders:
        expected, found = (stored(tmp_path / name / folder) for name in runs)
        assert found.keys() == expected.keys()
        different = [key for key in found if not torch.equal(found[key], expected[key])]
        assert not different, different
    assert loadable(tmp_path / "async") == loadable(tmp_path / "sync") == LAST


@on_ranks(2)
def test_thread_writes_what_was_copied_without_cuda(tmp_path):
    """Copying ahead, as torch does, uses CUDA on the first device in a thread of every rank."""
    import cpu_ranks
    from torch.distributed.checkpoint import filesystem

    import megatron_muon

    if not torch.cuda.is_available():
        cpu_ranks.enable()
    megatron_muon.enable()
    from megatron_muon.mcore.async_save import AsyncWriter, plan_and_copy

    writer = AsyncWriter(str(tmp_path))
    state = {"weights": torch.arange(6.0), "words": ["saved"], "step": torch.tensor(3)}
    plan_and_copy(state, writer, planner=dcp.DefaultSavePlanner())
    state["weights"].zero_()
    state["words"].append("changed")
    state["step"] += 1
    assert list(tmp_path.glob("*.distcp")) == []
    torch.distributed.barrier()
    with mock.patch.object(filesystem, "_OverlappingCpuLoader", side_effect=AssertionError):
        thread = threading.Thread(target=writer.write)
        thread.start()
        thread.join()
    assert not (tmp_path / ".metadata").exists()
    writer.complete()
    loaded = {"weights": torch.empty(6), "words": None, "step": torch.tensor(0)}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert torch.equal(loaded["weights"], torch.arange(6.0))
    assert (loaded["words"], loaded["step"].item()) == (["saved"], 3)


def _end_at_3() -> None:
    """Send rank 0 the signal of a scheduler in the third iteration."""
    import os
    import signal

    from megatron.training import training

    steps: list[int] = []

    def log(original: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        if len(steps) == 3 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    wrap(training, "training_log", log)


@pytest.mark.slow
def test_last_save_before_an_exit_is_complete(tmp_path):
    """A run that ends by a signal or --exit-interval completes its save; older ones are deleted."""
    flags = [*BF16, *SCHEDULE[2:], "--train-iters", "50"]
    by_signal = [
        "--save",
        str(tmp_path / "signal"),
        "--exit-signal-handler",
        "--save-interval",
        "100",
    ]
    launch(2, fsdp_toy_gpt(ZERO[3], *flags, *by_signal), before=_end_at_3).check()
    assert loadable(tmp_path / "signal") == 3
    by_interval = "--exit-interval 7 --save-interval 2 --save-retain-interval 4 --save".split()
    folder = tmp_path / "interval"
    launch(2, fsdp_toy_gpt(ZERO[3], *flags, *by_interval, str(folder))).check()
    assert loadable(folder) == 7
    kept = sorted(path.name for path in Path(folder).glob("iter_*"))
    assert kept == ["iter_0000004", "iter_0000007"]
