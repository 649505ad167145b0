# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs of Muon under DDP go on under Megatron-FSDP from a converted checkpoint, and back.

Tolerances are those of test_parity.py: the two train alike but for rounding.
"""

import argparse
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
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

from megatron_muon.checkpoint.__main__ import main
from megatron_muon.checkpoint.storage import StoredCheckpoint, load_chunk, read_checkpoint
from megatron_muon.checkpoint.verify import find_problems
from megatron_muon.checkpoint.writing import CheckpointWriter

pytestmark = pytest.mark.ranks

SAVED_AT, LAST, NUM_RANKS = 3, 6, 2
SCHEDULE = f"--train-iters {LAST} --lr-decay-iters 20 --global-batch-size 4".split()
MEDIUM_TOLERANCE, BF16_TOLERANCE = 1e-5, 1.5e-4


def _without_psutil() -> None:
    """Let Megatron save torch_dist without psutil, which it asks for its memory, for a log line."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    class Process:
        """A process of unknown memory."""

        def __init__(self, pid: int) -> None:
            self.pid = pid

        def memory_info(self) -> Any:
            """Return no memory."""
            return types.SimpleNamespace(rss=0)

    filesystem_async.HAVE_PSUTIL = True
    filesystem_async.psutil = types.SimpleNamespace(Process=Process)


def _run_ddp(*flags: str) -> list[float]:
    """Run Muon under DDP, and return the losses."""
    # As tensor parallelism asks for it.
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    run = launch(NUM_RANKS, toy_gpt(*SCHEDULE, *flags), before=_without_psutil, env=env)
    return run.check().losses


def _train_under_ddp(folder: Path, *flags: str) -> list[float]:
    """Train without a stop, and return all losses."""
    save = ("--save", str(folder), "--save-interval", str(SAVED_AT))
    return _run_ddp(*save, "--ckpt-format", "torch_dist", *flags)


def _resume_under_fsdp(folder: Path, *flags: str) -> list[float]:
    """Go on from a checkpoint, and return the losses of the iterations that follow."""
    load = ("--load", str(folder), "--no-load-rng")
    run = launch(NUM_RANKS, fsdp_toy_gpt("optim_grads_params", *SCHEDULE, *load, *flags))
    return run.check().losses


def _train_under_fsdp(folder: Path, *flags: str) -> list[float]:
    """Train without a stop, and return all losses."""
    save = ("--save", str(folder), "--save-interval", str(SAVED_AT))
    run = launch(NUM_RANKS, fsdp_toy_gpt("optim_grads_params", *SCHEDULE, *save, *flags))
    return run.check().losses


def _resume_under_ddp(folder: Path, *flags: str) -> list[float]:
    """Go on from a checkpoint, and return the losses of the iterations that follow."""
    load = ("--load", str(folder), "--no-load-rng", "--ckpt-format", "torch_dist")
    return _run_ddp(*load, *flags)


def _convert(
    source: Path,
    target: Path,
    *flags: str,
    formats: Sequence[str] = ("torch_dist", "fsdp_dtensor"),
) -> int:
    names = ("--from", formats[0], "--to", formats[1])
    return main(["convert", str(source), str(target), *names, *flags])


def _convert_back(source: Path, target: Path, *flags: str) -> int:
    return _convert(source, target, *flags, formats=("fsdp_dtensor", "torch_dist"))


def _whole(checkpoint: StoredCheckpoint, key: str) -> torch.Tensor:
    stored = checkpoint.tensors[key]
    whole = torch.full(stored.shape, float("nan"))
    for item in stored.chunks:
        place = tuple(slice(o, o + n) for o, n in zip(item.offsets, item.sizes, strict=True))
        whole[place] = load_chunk(checkpoint, item).float()
    return whole


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list[float]]:
    """A --save folder of DDP in fp32, converted beside it, and the losses of the whole run."""
    folder = tmp_path_factory.mktemp("ddp")
    losses = _train_under_ddp(folder / "saved")
    step = ("--ckpt-step", str(SAVED_AT))
    assert _convert(folder / "saved", folder / "converted", *step) == 0
    return folder, losses


def test_run_of_ddp_goes_on_under_megatron_fsdp(saved):
    """Losses of iterations 4 to 6; without momentum they differ by far more."""
    folder, losses = saved
    assert len(losses) == LAST
    found = _resume_under_fsdp(folder / "converted")
    assert max(relative_differences(found, losses[SAVED_AT:])) <= MEDIUM_TOLERANCE
    without = _resume_under_fsdp(folder / "converted", "--no-load-optim")
    assert max(relative_differences(without, losses[SAVED_AT:])) > 10 * MEDIUM_TOLERANCE


def test_values_keep_their_bits(saved):
    """All layers, both halves of a gated one, weights and momentum; all chunks tile."""
    folder, _ = saved
    iteration = f"iter_{SAVED_AT:07d}"
    before = read_checkpoint(folder / "saved" / iteration)
    after = read_checkpoint(folder / "converted" / iteration)
    assert list(find_problems(after)) == []
    name = "decoder.layers.mlp.linear_fc1.weight"
    for key, target in (
        (name, "model.module.{}"),
        (
            f"optimizer.state.momentum_buffer.{name}",
            "optimizer.state.module.module.{}.momentum_buffer",
        ),
    ):
        for layer, expected in enumerate(_whole(before, key)):
            own = name.replace("layers.", f"layers.{layer}.")
            halves = [_whole(after, target.format(own + half)) for half in ("_w", "_v")]
            assert torch.equal(torch.cat(halves), expected)
    step = _whole(after, "optimizer.state.module.module.output_layer.weight.step")
    assert step == SAVED_AT
    assert _sum(before, "optimizer.state.exp_avg_sq.") == _sum(after, ".exp_avg_sq")


def _sum(checkpoint: StoredCheckpoint, part: str) -> float:
    values = [_whole(checkpoint, key).flatten() for key in checkpoint.tensors if part in key]
    return float(torch.cat(values).double().sort().values.sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "fsdp_flags", "tolerance"),
    [
        pytest.param(BF16, (*BF16, *FP32_GRADIENTS), BF16_TOLERANCE, id="bf16"),
        # Upstream's layer-wise optimizer cannot train in fp32.
        pytest.param(
            (*BF16, "--use-distributed-optimizer"),
            (*BF16, *FP32_GRADIENTS),
            BF16_TOLERANCE,
            id="layer_wise",
        ),
        pytest.param(MOE, MOE, MEDIUM_TOLERANCE, id="experts"),
        # Of one rank, to whole matrices.
        pytest.param(
            (*TP, "--muon-tp-mode", "duplicated"), (), MEDIUM_TOLERANCE, id="tensor_parallel"
        ),
    ],
)
def test_other_runs_go_on_too(tmp_path, flags, fsdp_flags, tolerance):
    """Main weights of bf16, owners of layers, experts, and tensor-parallel ranks."""
    losses = _train_under_ddp(tmp_path / "saved", *flags)
    # The tracker's checkpoint is the last one.
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    assert _convert(tmp_path / "saved", tmp_path / "converted") == 0
    found = _resume_under_fsdp(tmp_path / "converted", *fsdp_flags)
    assert max(relative_differences(found, losses[SAVED_AT:])) <= tolerance


def test_run_goes_on_under_ddp_from_what_is_converted_twice(saved, tmp_path):
    """Every tensor is there with its bits, and the losses are those of one run."""
    folder, losses = saved
    assert _convert_back(folder / "converted", tmp_path / "back") == 0
    iteration = f"iter_{SAVED_AT:07d}"
    before = read_checkpoint(folder / "saved" / iteration)
    after = read_checkpoint(tmp_path / "back" / iteration)
    assert list(find_problems(after)) == []
    assert after.tensors.keys() == before.tensors.keys()
    for key, tensor in before.tensors.items():
        assert after.tensors[key].dtype == tensor.dtype
        assert torch.equal(_whole(after, key), _whole(before, key)), key
    # Random states, and those of runs that are repeated to look for faults.
    missing = before.objects.keys() - after.objects.keys()
    assert {key.partition("/")[0] for key in missing} == {"rng_state", "rerun_state_machine_state"}
    # Upstream's own step on the same values: the same bits.
    assert _resume_under_ddp(tmp_path / "back") == losses[SAVED_AT:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "fsdp_flags", "tolerance"),
    [
        pytest.param((), (), MEDIUM_TOLERANCE, id="fp32"),
        pytest.param(BF16, (*BF16, *FP32_GRADIENTS), BF16_TOLERANCE, id="bf16"),
        pytest.param(EP, EP, MEDIUM_TOLERANCE, id="experts"),
        pytest.param(
            (), (*TP, "--muon-tp-mode", "duplicated"), MEDIUM_TOLERANCE, id="tensor_parallel"
        ),
    ],
)
def test_run_of_megatron_fsdp_goes_on_under_ddp(tmp_path, flags, fsdp_flags, tolerance):
    """Losses of iterations 4 to 6; tensor-parallel shards become whole matrices."""
    losses = _train_under_fsdp(tmp_path / "saved", *fsdp_flags)
    step = ("--ckpt-step", str(SAVED_AT))
    assert _convert_back(tmp_path / "saved", tmp_path / "converted", *step) == 0
    found = _resume_under_ddp(tmp_path / "converted", *flags)
    assert max(relative_differences(found, losses[SAVED_AT:])) <= tolerance


@pytest.mark.slow
def test_run_goes_on_from_the_format_torch_in_two_steps(tmp_path):
    """Upstream's own flags write torch_dist, on CPU ranks too."""
    losses = _train_under_ddp(tmp_path / "saved", "--ckpt-format", "torch")
    load = ("--load", str(tmp_path / "saved"), "--ckpt-step", str(SAVED_AT))
    to = ("--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", str(tmp_path))
    assert _run_ddp(*load, "--ckpt-format", "torch", *to) == []
    assert _convert(tmp_path / "torch_dist", tmp_path / "converted") == 0
    found = _resume_under_fsdp(tmp_path / "converted")
    assert max(relative_differences(found, losses[SAVED_AT:])) <= MEDIUM_TOLERANCE


def test_other_formats_are_refused(saved, tmp_path, capsys):
    """The format torch, and ones that are converted already: nothing is written."""
    folder, _ = saved
    (tmp_path / "torch" / "iter_0000003" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "torch" / "latest_checkpointed_iteration.txt").write_text("3")
    for source, error in (
        (tmp_path / "torch", "expected the format torch_dist, got torch. Load"),
        (folder / "converted", "expected the format torch_dist, got fsdp_dtensor"),
        (tmp_path / "none", "got no such file"),
    ):
        assert _convert(source, tmp_path / "new") == 1
        assert error in capsys.readouterr().err
    assert _convert_back(folder / "saved", tmp_path / "new") == 1
    assert "expected the format fsdp_dtensor, got torch_dist" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["torch"]


ARGS = {
    "bf16": False,
    "fp16": False,
    "swiglu": True,
    "transformer_impl": "local",
    "moe_grouped_gemm": False,
}
MATRIX = torch.ones(4, 2)
ADAM = {f"optimizer.state.{kind}.b": MATRIX for kind in ("exp_avg", "exp_avg_sq")}
MUON = {"w": MATRIX, "optimizer.state.momentum_buffer.w": MATRIX}
SETTINGS = {0: {"param_groups": [{"lr": 0.1}]}, 1: {"param_groups": [{"betas": (0, 0), "step": 3}]}}
# What is wrong, the tensors, the arguments, the optimizer's settings, and the error.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], Any, str]] = {
    "adam": ({"b": MATRIX, **ADAM}, ARGS, SETTINGS, "expected momentum of Muon, got none"),
    "no momentum": ({"v": MATRIX, **MUON}, ARGS, SETTINGS, "v: expected a weight with momentum_b"),
    "no weight": ({**MUON, **ADAM}, ARGS, SETTINGS, "b: expected a weight with momentum_buffer"),
    "unknown state": (
        {**MUON, "optimizer.distributed.dp_group_idx_0": MATRIX},
        ARGS,
        SETTINGS,
        "optimizer.distributed.dp_group_idx_0: expected optimizer.state.<name>.<parameter>",
    ),
    "no arguments": (MUON, {}, SETTINGS, "expected the arguments bf16, fp16"),
    "no step": (MUON, ARGS, {0: SETTINGS[0]}, "expected one step count of Adam"),
    "no group": (MUON, ARGS, {1: SETTINGS[1]}, "w: expected a group of its optimizer"),
    "no optimizer": (MUON, ARGS, None, "expected optimizer in common_state/shard_0_1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused(case, tmp_path, capsys):
    """The error names what is missing, and neither a file nor a folder is left."""
    tensors, args, settings, error = REFUSED[case]
    common = {"args": argparse.Namespace(**args), "iteration": 3, "optimizer": settings}
    if settings is None:
        del common["optimizer"]
    (tmp_path / "saved").mkdir()
    writer = CheckpointWriter(tmp_path / "saved")
    for key, value in tensors.items():
        writer.add_chunk(key, value.shape, (0, 0), value)
    writer.add_object("common_state/shard_0_1", [common])
    writer.finish()
    (tmp_path / "saved" / "metadata.json").write_text("{}")
    assert _convert(tmp_path / "saved", tmp_path / "new") == 1
    assert error in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


W, B = "module.module.decoder.layers.0.w", "module.module.b"
OF_MUON = {f"model.{W[7:]}": MATRIX, f"optimizer.state.{W}.momentum_buffer": MATRIX}
OF_ADAM = {
    f"model.{B[7:]}": MATRIX,
    **{f"optimizer.state.{B}.{kind}": MATRIX for kind in ("exp_avg", "exp_avg_sq")},
}
SECOND = {key.replace("layers.0", "layers.2"): value for key, value in OF_MUON.items()}
# What is wrong, the tensors, the arguments, and the error.
REFUSED_BACK: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no step": ({**OF_MUON, **OF_ADAM}, ARGS, "b: expected a weight with momentum_buffer of Muon"),
    "no weight": (
        {f"optimizer.state.{W}.momentum_buffer": MATRIX},
        ARGS,
        "decoder.layers.0.w: expected a weight with",
    ),
    "unknown state": (
        {**OF_MUON, f"optimizer.state.{W}.moment2_buffer": MATRIX},
        ARGS,
        "got moment2_buffer, momentum_buffer. Only --optimizer muon is converted.",
    ),
    "unknown tensor": ({**OF_MUON, "other": MATRIX}, ARGS, "other: expected a weight, or a state"),
    "layers": (
        {**OF_MUON, **SECOND},
        ARGS,
        "decoder.layers.w: expected it in all layers with one shape, got shapes [(4, 2)] of 2",
    ),
    "fp16": (OF_MUON, {**ARGS, "fp16": True}, "of a run in fp32 or bf16, got fp16"),
    "no arguments": (OF_MUON, {}, "expected the arguments bf16, fp16"),
    "no settings": (OF_MUON, ARGS, "expected settings of Muon, and one step count of Adam, got"),
}


@pytest.mark.parametrize("case", REFUSED_BACK)
def test_what_is_not_known_is_refused_on_the_way_back(case, tmp_path, capsys):
    """The error names what is missing, and neither a file nor a folder is left."""
    tensors, args, error = REFUSED_BACK[case]
    (tmp_path / "saved").mkdir()
    writer = CheckpointWriter(tmp_path / "saved")
    for key, value in tensors.items():
        writer.add_chunk(key, value.shape, (0, 0), value)
    writer.add_object("args", argparse.Namespace(**args))
    writer.add_object("iteration", 3)
    writer.finish()
    assert _convert_back(tmp_path / "saved", tmp_path / "new") == 1
    assert error in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
