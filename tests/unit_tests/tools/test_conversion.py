# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs of Muon under DDP go on under Megatron-FSDP from a converted checkpoint, and back.

Tolerances are those of test_parity.py: the two train alike but for rounding.
"""

import argparse
import os
import resource
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.checkpoint_runs import ARGS, MATRIX, MOMENTUM, SETTING, WEIGHT, save_matrix
from helpers.ranks import launch
from helpers.toy_gpt import (
    BF16,
    EP,
    FP32_GRADIENTS,
    MOE,
    TP,
    fsdp_toy_gpt,
    relative_differences,
    toy_gpt,
)

from megatron_muon.mcore.checkpoint_folders import TRACKER
from megatron_muon.mcore.checkpoint_reading import StoredCheckpoint, read_checkpoint
from megatron_muon.tools.checkpoint import command
from megatron_muon.tools.checkpoint.command import main, replacing
from megatron_muon.tools.checkpoint.reading import find_problems
from megatron_muon.tools.checkpoint.writing import read, write

pytestmark = pytest.mark.ranks

SAVED_AT, LAST, NUM_RANKS = 3, 6, 2
FORMATS = ("fsdp_dtensor", "torch_dist")
SCHEDULE = f"--train-iters {LAST} --lr-decay-iters 20 --global-batch-size 4".split()
MEDIUM_TOLERANCE, BF16_TOLERANCE = 1e-5, 1.5e-4


def _save_in_this_process() -> None:
    """Let Megatron save torch_dist without psutil and without a process that holds a queue.

    It asks psutil for its memory, for a log line. Its queue's process would import torch anew.
    """
    import queue

    from megatron.core.dist_checkpointing.strategies import filesystem_async

    process = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=0))
    filesystem_async.HAVE_PSUTIL = True
    filesystem_async.psutil = types.SimpleNamespace(Process=lambda pid: process)
    filesystem_async._results_queue = queue.Queue()


def _run(checkpoints: str, *flags: str) -> list[float]:
    """Run Muon under DDP or Megatron-FSDP, by the format of checkpoints; return the losses."""
    if checkpoints == "fsdp_dtensor":
        arguments, env = fsdp_toy_gpt("optim_grads_params", *SCHEDULE, *flags), {}
    else:
        arguments = toy_gpt(*SCHEDULE, "--ckpt-format", checkpoints, *flags)
        # As tensor parallelism asks for it.
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return launch(NUM_RANKS, arguments, before=_save_in_this_process, env=env).check().losses


def _train(folder: Path, checkpoints: str, *flags: str) -> list[float]:
    return _run(checkpoints, "--save", str(folder), "--save-interval", str(SAVED_AT), *flags)


def _resume(folder: Path, checkpoints: str, *flags: str) -> list[float]:
    return _run(checkpoints, "--load", str(folder), "--no-load-rng", *flags)


def _convert(source: Path, target: Path, *flags: str, to: str = "fsdp_dtensor") -> int:
    return main(["convert", str(source), str(target), "--to", to, *flags])


def _whole(checkpoint: StoredCheckpoint, key: str) -> torch.Tensor:
    shape = checkpoint.tensors[key].size
    return read(checkpoint, key, ((0,) * len(shape), shape)).float()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list[float]]:
    """A --save folder of DDP in fp32, converted beside it, and the losses of the whole run."""
    folder = tmp_path_factory.mktemp("ddp")
    losses = _train(folder / "saved", "torch_dist")
    step = ("--ckpt-step", str(SAVED_AT))
    assert _convert(folder / "saved", folder / "converted", *step) == 0
    return folder, losses


def test_run_of_ddp_goes_on_under_megatron_fsdp(saved):
    """A converted run of DDP has the losses of the run that never stopped, by its momentum."""
    folder, losses = saved
    assert len(losses) == LAST
    found = _resume(folder / "converted", "fsdp_dtensor")
    assert max(relative_differences(found, losses[SAVED_AT:])) <= MEDIUM_TOLERANCE
    without = _resume(folder / "converted", "fsdp_dtensor", "--no-load-optim")
    assert max(relative_differences(without, losses[SAVED_AT:])) > 10 * MEDIUM_TOLERANCE


def test_values_keep_their_bits(saved):
    """Weights and momentum of all layers keep their bits, both halves of gated ones too."""
    folder, _ = saved
    iteration = f"iter_{SAVED_AT:07d}"
    before, after = (read_checkpoint(folder / of / iteration) for of in ("saved", "converted"))
    assert find_problems(after) == []
    name, state = "decoder.layers.mlp.linear_fc1.weight", "optimizer.state."
    for key, prefix, suffix in (
        (name, "model.module.", ""),
        (f"{state}momentum_buffer.{name}", f"{state}module.module.", ".momentum_buffer"),
    ):
        for layer, expected in enumerate(_whole(before, key)):
            own = prefix + name.replace("layers.", f"layers.{layer}.")
            halves = [_whole(after, f"{own}{half}{suffix}") for half in ("_w", "_v")]
            assert torch.equal(torch.cat(halves), expected)
    assert _whole(after, f"{state}module.module.output_layer.weight.step") == SAVED_AT


# Flags under DDP and under Megatron-FSDP, and the tolerance.
IN_BF16 = (BF16, (*BF16, *FP32_GRADIENTS), BF16_TOLERANCE)
LAYER_WISE = (*BF16, "--use-distributed-optimizer")
IN_TP = (*TP, "--muon-tp-mode", "duplicated")


def test_run_goes_on_under_ddp_after_the_way_there_and_back(saved, tmp_path):
    """A checkpoint converted there and back has the same tensors, and trains to the same losses."""
    folder, losses = saved
    flags = ("--save", str(tmp_path / "fsdp"), "--use-checkpoint-opt_param-scheduler")
    flags += ("--train-iters", str(SAVED_AT), "--save-interval", "100")
    assert _resume(folder / "converted", "fsdp_dtensor", *flags) == []
    assert _convert(tmp_path / "fsdp", tmp_path / "back", to="torch_dist") == 0
    iteration = f"iter_{SAVED_AT:07d}"
    before = read_checkpoint(folder / "saved" / iteration)
    after = read_checkpoint(tmp_path / "back" / iteration)
    assert find_problems(after) == []
    assert after.tensors.keys() == before.tensors.keys()
    for key, tensor in before.tensors.items():
        assert after.tensors[key].properties.dtype == tensor.properties.dtype
        assert torch.equal(_whole(after, key), _whole(before, key)), key
    # Random states, and those of runs that are repeated to look for faults.
    missing = before.objects - after.objects
    assert {key.partition("/")[0] for key in missing} == {"rng_state", "rerun_state_machine_state"}
    # Upstream's own step on the same values: the same bits.
    assert _resume(tmp_path / "back", "torch_dist") == losses[SAVED_AT:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "ddp_flags", "fsdp_flags", "tolerance"),
    [
        pytest.param("fsdp_dtensor", *IN_BF16, id="bf16"),
        # Upstream's layer-wise optimizer cannot train in fp32.
        pytest.param("fsdp_dtensor", LAYER_WISE, *IN_BF16[1:], id="layer_wise"),
        pytest.param("fsdp_dtensor", MOE, MOE, MEDIUM_TOLERANCE, id="experts"),
        pytest.param("fsdp_dtensor", IN_TP, (), MEDIUM_TOLERANCE, id="two_tensor_ranks_to_one"),
        pytest.param("torch_dist", *IN_BF16, id="back_bf16"),
        pytest.param("torch_dist", EP, EP, MEDIUM_TOLERANCE, id="back_experts"),
        pytest.param("torch_dist", (), IN_TP, MEDIUM_TOLERANCE, id="back_two_tensor_ranks_to_one"),
    ],
)
def test_other_runs_go_on(tmp_path, to, ddp_flags, fsdp_flags, tolerance):
    """Runs in bf16, with experts, and on tensor-parallel ranks go on after a conversion."""
    flags = {"torch_dist": ddp_flags, "fsdp_dtensor": fsdp_flags}
    before = next(name for name in FORMATS if name != to)
    losses = _train(tmp_path / "saved", before, *flags[before])
    # The tracker's checkpoint is the last one.
    (tmp_path / "saved" / TRACKER).write_text(str(SAVED_AT))
    assert _convert(tmp_path / "saved", tmp_path / "converted", to=to) == 0
    found = _resume(tmp_path / "converted", to, *flags[to])
    assert max(relative_differences(found, losses[SAVED_AT:])) <= tolerance


@pytest.mark.slow
def test_run_goes_on_from_the_format_torch_in_two_steps(tmp_path):
    """A checkpoint in the format torch goes on after upstream's conversion and this one."""
    losses = _train(tmp_path / "saved", "torch")
    load = ("--load", str(tmp_path / "saved"), "--ckpt-step", str(SAVED_AT))
    to = ("--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", str(tmp_path))
    assert _run("torch", *load, *to) == []
    assert _convert(tmp_path / "torch_dist", tmp_path / "converted") == 0
    found = _resume(tmp_path / "converted", "fsdp_dtensor")
    assert max(relative_differences(found, losses[SAVED_AT:])) <= MEDIUM_TOLERANCE


ONES = torch.ones(4, 2)
ADAM = {f"optimizer.state.{kind}.b": ONES for kind in ("exp_avg", "exp_avg_sq")}
MUON = {"w": ONES, "optimizer.state.momentum_buffer.w": ONES}
GROUPS = {0: {"param_groups": [{"lr": 0.1}]}, 1: {"param_groups": [{"betas": (0, 0), "step": 3}]}}


def _of_ddp(args: dict[str, Any] = ARGS, groups: Any = GROUPS) -> dict[str, Any]:
    """Return what all ranks share."""
    common = {"args": argparse.Namespace(**args), "iteration": 3, "optimizer": groups}
    return {"common_state/shard_0_1": [{k: v for k, v in common.items() if v is not None}]}


OF_FSDP = {"args": argparse.Namespace(**ARGS), "iteration": 3}
OF_MUON = {WEIGHT: ONES, MOMENTUM: ONES, **OF_FSDP}
OTHER_LAYER = {k.replace("layers.0", "layers.2"): value for k, value in OF_MUON.items()}


def _with_args(values: dict[str, Any], **args: Any) -> dict[str, Any]:
    return {**values, "args": argparse.Namespace(**ARGS | args)}


# Values of a checkpoint, and the error of a conversion to the other format.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "adam": ({"b": ONES, **ADAM, **_of_ddp()}, "expected momentum of Muon, got none"),
    "no momentum": ({"v": ONES, **MUON, **_of_ddp()}, "v: expected a weight with momentum_b"),
    "no weight": ({**MUON, **ADAM, **_of_ddp()}, "b: expected a weight with momentum_buffer"),
    "unknown state": (
        {**MUON, "optimizer.distributed.dp_group_idx_0": ONES, **_of_ddp()},
        "optimizer.distributed.dp_group_idx_0: expected a weight",
    ),
    "no arguments": ({**MUON, **_of_ddp({})}, "expected the arguments bf16, fp16"),
    "no step": ({**MUON, **_of_ddp(groups={0: GROUPS[0]})}, "expected one step count of Adam"),
    "no optimizer": ({**MUON, **_of_ddp(groups=None)}, "expected optimizer in common_state/sha"),
    "back, no weight": ({MOMENTUM: ONES, **OF_FSDP}, "layers.0.w: expected a weight with"),
    "back, unknown state": (
        {**OF_MUON, f"optimizer.state.{MATRIX}.moment2_buffer": ONES},
        "Only --optimizer muon is converted.",
    ),
    "back, unknown tensor": ({**OF_MUON, "other": ONES}, "other: expected a weight, but not of"),
    "back, layers": ({**OTHER_LAYER, SETTING: 0.1}, "parameters of one shape in all layers"),
    "back, a layer is missing": (
        _with_args({**OF_MUON, SETTING: 0.1}, num_layers=2),
        "parameters of one shape in all layers",
    ),
    "back, fp16": (_with_args(OF_MUON, fp16=True), "of a run in fp32 or bf16, got fp16"),
    "back, no arguments": ({**OF_MUON, "args": argparse.Namespace()}, "the arguments bf16, fp16"),
    "back, no settings": (OF_MUON, "expected settings of Muon, and one step count of Adam, got"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unknown_or_missing_values_are_refused(case, tmp_path, capsys):
    """The error of a conversion names the values, and neither a file nor a folder is left."""
    values, error = REFUSED[case]
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(values, checkpoint_id=tmp_path / "saved", planner=planner, no_dist=True)
    is_back = case.startswith("back")
    if not is_back:
        (tmp_path / "saved" / "metadata.json").write_text("{}")
    to = "torch_dist" if is_back else "fsdp_dtensor"
    assert _convert(tmp_path / "saved", tmp_path / "new", to=to) == 1
    assert error in capsys.readouterr().err
    # The format that it would have.
    assert _convert(tmp_path / "saved", tmp_path / "new", to=FORMATS[not is_back]) == 1
    assert f"expected the format {FORMATS[is_back]}, got" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


# What another process does while the result is written, and the error.
MEANWHILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "source is saved again": (
        lambda new: save_matrix(new.parent / "saved", 2.0),
        "expected files that do not change while they are read",
    ),
    "file": (lambda new: new.write_text("kept"), "FileExistsError"),
    "folder": (lambda new: (new.mkdir(), (new / "kept").touch()), "FileExistsError"),
    "empty folder": (lambda new: new.mkdir(), "FileExistsError"),
    "dangling link": (lambda new: new.symlink_to("nowhere"), "FileExistsError"),
}


@pytest.mark.parametrize("case", MEANWHILE)
def test_what_appears_meanwhile_is_neither_read_nor_replaced(case, tmp_path, capsys, monkeypatch):
    """Tensors of two saves are not mixed, and files that appear meanwhile are not replaced."""
    act, error = MEANWHILE[case]
    source, new = save_matrix(tmp_path / "saved"), tmp_path / "new"
    monkeypatch.setattr(command, "write", lambda *args: (act(new), write(*args)))
    assert _convert(source, new, to="torch_dist") == 1
    assert error in capsys.readouterr().err
    names = sorted(tmp_path.iterdir())
    assert names == ([source] if "source" in case else [new, source])
    if new in names:
        before = new.lstat()
        assert _convert(source, new, to="torch_dist") == 1
        assert "expected a path to write to, got one that exists" in capsys.readouterr().err
        assert new.lstat().st_ino == before.st_ino
        assert sorted(tmp_path.iterdir()) == names


def test_killed_conversion_leaves_no_target(tmp_path):
    """A conversion that is killed leaves only a hidden folder beside its target."""
    child = os.fork()
    if not child:
        with replacing(tmp_path / "new") as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".new.converting-")


def test_full_disk_is_one_line(tmp_path, capsys, monkeypatch):
    """A full disk ends a conversion with one line instead of torch's traceback."""
    source = save_matrix(tmp_path / "saved")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        status = _convert(source, tmp_path / "new", to="torch_dist")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1
    assert capsys.readouterr().err.count("expected to convert it") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
