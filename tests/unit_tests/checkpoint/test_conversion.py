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

from megatron_muon.checkpoint.__main__ import main, replacing
from megatron_muon.checkpoint.conversion import Conversion
from megatron_muon.checkpoint.reading import (
    TRACKER,
    StoredCheckpoint,
    find_problems,
    read_checkpoint,
)

pytestmark = pytest.mark.ranks

SAVED_AT, LAST, NUM_RANKS = 3, 6, 2
FORMATS = ("fsdp_dtensor", "torch_dist")
SCHEDULE = f"--train-iters {LAST} --lr-decay-iters 20 --global-batch-size 4".split()
MEDIUM_TOLERANCE, BF16_TOLERANCE = 1e-5, 1.5e-4


def _without_psutil() -> None:
    """Let Megatron save torch_dist without psutil, which it asks for its memory, for a log line."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    process = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=0))
    filesystem_async.HAVE_PSUTIL = True
    filesystem_async.psutil = types.SimpleNamespace(Process=lambda pid: process)


def _run(checkpoints: str, *flags: str) -> list[float]:
    """Run Muon under DDP or Megatron-FSDP, by the format of checkpoints; return the losses."""
    if checkpoints == "fsdp_dtensor":
        arguments, env = fsdp_toy_gpt("optim_grads_params", *SCHEDULE, *flags), {}
    else:
        arguments = toy_gpt(*SCHEDULE, "--ckpt-format", checkpoints, *flags)
        # As tensor parallelism asks for it.
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return launch(NUM_RANKS, arguments, before=_without_psutil, env=env).check().losses


def _train(folder: Path, checkpoints: str, *flags: str) -> list[float]:
    """Train without a stop, and return all losses."""
    return _run(checkpoints, "--save", str(folder), "--save-interval", str(SAVED_AT), *flags)


def _resume(folder: Path, checkpoints: str, *flags: str) -> list[float]:
    """Go on from a checkpoint, and return the losses of the iterations that follow."""
    return _run(checkpoints, "--load", str(folder), "--no-load-rng", *flags)


def _convert(source: Path, target: Path, *flags: str, to: str = "fsdp_dtensor") -> int:
    return main(["convert", str(source), str(target), "--to", to, *flags])


def _whole(checkpoint: StoredCheckpoint, key: str) -> torch.Tensor:
    shape = checkpoint.tensors[key].shape
    return Conversion(checkpoint)._read(key, (0,) * len(shape), shape).float()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list[float]]:
    """A --save folder of DDP in fp32, converted beside it, and the losses of the whole run."""
    folder = tmp_path_factory.mktemp("ddp")
    losses = _train(folder / "saved", "torch_dist")
    step = ("--ckpt-step", str(SAVED_AT))
    assert _convert(folder / "saved", folder / "converted", *step) == 0
    return folder, losses


def test_run_of_ddp_goes_on_under_megatron_fsdp(saved):
    """Losses of iterations 4 to 6; without momentum they differ by far more."""
    folder, losses = saved
    assert len(losses) == LAST
    found = _resume(folder / "converted", "fsdp_dtensor")
    assert max(relative_differences(found, losses[SAVED_AT:])) <= MEDIUM_TOLERANCE
    without = _resume(folder / "converted", "fsdp_dtensor", "--no-load-optim")
    assert max(relative_differences(without, losses[SAVED_AT:])) > 10 * MEDIUM_TOLERANCE


def test_values_keep_their_bits(saved):
    """All layers, both halves of a gated one, weights and momentum; all chunks tile."""
    folder, _ = saved
    iteration = f"iter_{SAVED_AT:07d}"
    before = read_checkpoint(folder / "saved" / iteration)
    after = read_checkpoint(folder / "converted" / iteration)
    assert find_problems(after) == []
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


# Flags under DDP and under Megatron-FSDP, and the tolerance.
IN_BF16 = (BF16, (*BF16, *FP32_GRADIENTS), BF16_TOLERANCE)
LAYER_WISE = (*BF16, "--use-distributed-optimizer")
IN_TP = (*TP, "--muon-tp-mode", "duplicated")


def test_run_goes_on_under_ddp_after_the_way_there_and_back(saved, tmp_path):
    """A run of Megatron-FSDP only loads and saves: each tensor keeps its bits, losses are equal."""
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
        assert after.tensors[key].dtype == tensor.dtype
        assert torch.equal(_whole(after, key), _whole(before, key)), key
    # Random states, and those of runs that are repeated to look for faults.
    missing = before.objects.keys() - after.objects.keys()
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
    """Losses after the conversion: main weights of bf16, experts, and tensor-parallel ranks."""
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
    """Upstream's own flags write torch_dist, on CPU ranks too."""
    losses = _train(tmp_path / "saved", "torch")
    load = ("--load", str(tmp_path / "saved"), "--ckpt-step", str(SAVED_AT))
    to = ("--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", str(tmp_path))
    assert _run("torch", *load, *to) == []
    assert _convert(tmp_path / "torch_dist", tmp_path / "converted") == 0
    found = _resume(tmp_path / "converted", "fsdp_dtensor")
    assert max(relative_differences(found, losses[SAVED_AT:])) <= MEDIUM_TOLERANCE


ARGS = {
    "bf16": False,
    "fp16": False,
    "swiglu": True,
    "transformer_impl": "local",
    "moe_grouped_gemm": False,
    "num_layers": 1,
    "num_experts": None,
}
MATRIX = torch.ones(4, 2)
ADAM = {f"optimizer.state.{kind}.b": MATRIX for kind in ("exp_avg", "exp_avg_sq")}
MUON = {"w": MATRIX, "optimizer.state.momentum_buffer.w": MATRIX}
GROUPS = {0: {"param_groups": [{"lr": 0.1}]}, 1: {"param_groups": [{"betas": (0, 0), "step": 3}]}}


def _of_ddp(args: dict[str, Any] = ARGS, groups: Any = GROUPS) -> dict[str, Any]:
    """Return what all ranks share."""
    common = {"args": argparse.Namespace(**args), "iteration": 3, "optimizer": groups}
    return {"common_state/shard_0_1": [{k: v for k, v in common.items() if v is not None}]}


W, B = "module.module.decoder.layers.0.w", "module.module.b"
OF_FSDP = {"args": argparse.Namespace(**ARGS), "iteration": 3}
OF_MUON = {f"model.{W[7:]}": MATRIX, f"optimizer.state.{W}.momentum_buffer": MATRIX, **OF_FSDP}
NO_WEIGHT = {key: value for key, value in OF_MUON.items() if not key.startswith("model.")}
LR = {f"optimizer.param_to_group_meta.{W}.lr": 0.1}
OTHER_LAYER = {k.replace("layers.0", "layers.2"): value for k, value in OF_MUON.items()}
# Values of a checkpoint, and the error of a conversion to the other format.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "adam": ({"b": MATRIX, **ADAM, **_of_ddp()}, "expected momentum of Muon, got none"),
    "no momentum": ({"v": MATRIX, **MUON, **_of_ddp()}, "v: expected a weight with momentum_b"),
    "no weight": ({**MUON, **ADAM, **_of_ddp()}, "b: expected a weight with momentum_buffer"),
    "unknown state": (
        {**MUON, "optimizer.distributed.dp_group_idx_0": MATRIX, **_of_ddp()},
        "optimizer.distributed.dp_group_idx_0: expected a weight, but not of multi-token",
    ),
    "no arguments": ({**MUON, **_of_ddp({})}, "expected the arguments bf16, fp16"),
    "no step": ({**MUON, **_of_ddp(groups={0: GROUPS[0]})}, "expected one step count of Adam"),
    "no optimizer": ({**MUON, **_of_ddp(groups=None)}, "expected optimizer in common_state/sha"),
    "back, no weight": (NO_WEIGHT, "decoder.layers.0.w: expected a weight with"),
    "back, unknown state": (
        {**OF_MUON, f"optimizer.state.{W}.moment2_buffer": MATRIX},
        "got moment2_buffer, momentum_buffer. Only --optimizer muon is converted.",
    ),
    "back, unknown tensor": ({**OF_MUON, "other": MATRIX}, "other: expected a weight, but not of"),
    "back, layers": (
        {**OTHER_LAYER, **LR},
        "expected parameters of one shape in all layers and experts, got ValueError",
    ),
    "back, a layer is missing": (
        {**OF_MUON, **LR, "args": argparse.Namespace(**{**ARGS, "num_layers": 2})},
        "expected parameters of one shape in all layers and experts, got ValueError: others for",
    ),
    "back, fp16": (
        {**OF_MUON, "args": argparse.Namespace(**{**ARGS, "fp16": True})},
        "of a run in fp32 or bf16, got fp16",
    ),
    "back, no arguments": (
        {**OF_MUON, "args": argparse.Namespace()},
        "expected the arguments bf16, fp16",
    ),
    "back, no settings": (OF_MUON, "expected settings of Muon, and one step count of Adam, got"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unknown_or_missing_values_are_refused(case, tmp_path, capsys):
    """The error names them, and neither a file nor a folder is left."""
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


def _save(path: Path, value: float = 1.0) -> Path:
    """Save a checkpoint of Megatron-FSDP whose bytes have the same places for every value."""
    state = OF_MUON | LR
    state |= {k: torch.full((20, 30), value) for k, v in state.items() if v is MATRIX}
    dcp.save(state, checkpoint_id=path / "saved", no_dist=True)
    return path / "saved"


def _meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let another process act once, while the result is written."""
    original, waiting = Conversion.lookup_object, [act]

    def lookup_object(self: Conversion, index: Any) -> Any:
        value = original(self, index)
        while waiting:
            waiting.pop()()
        return value

    monkeypatch.setattr(Conversion, "lookup_object", lookup_object)


def test_source_that_is_saved_again_meanwhile_is_refused(tmp_path, capsys, monkeypatch):
    """The result had tensors of two saves, and verify called it sound."""
    source = _save(tmp_path)
    _meanwhile(monkeypatch, lambda: _save(tmp_path, 2.0))
    assert _convert(source, tmp_path / "new", to="torch_dist") == 1
    assert "expected files that do not change while they are read" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


APPEARING: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_text("kept"),
    "folder": lambda path: (path.mkdir(), (path / "kept").touch()),
    "empty folder": lambda path: path.mkdir(),
    "dangling link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", APPEARING)
def test_target_that_appears_meanwhile_is_not_replaced(kind, tmp_path, capsys, monkeypatch):
    """A file was replaced by the result, and so was a dangling link, at any time."""
    source, new = _save(tmp_path), tmp_path / "new"
    _meanwhile(monkeypatch, lambda: APPEARING[kind](new))
    assert _convert(source, new, to="torch_dist") == 1
    assert "FileExistsError" in capsys.readouterr().err
    before = new.lstat()
    assert _convert(source, new, to="torch_dist") == 1
    assert "expected a path to write to, got one that exists" in capsys.readouterr().err
    assert new.lstat().st_ino == before.st_ino
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "saved"]


def test_killed_conversion_leaves_no_target(tmp_path):
    """Only a hidden folder is left beside it."""
    child = os.fork()
    if not child:
        with replacing(tmp_path / "new") as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".new.converting-")


def test_flipped_bit_is_not_converted(tmp_path, capsys):
    """Convert copied damaged bytes, and wrote a new checksum for them."""
    source = _save(tmp_path)
    path = source / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(torch.ones(600).numpy().tobytes()) + 1000] ^= 4
    path.write_bytes(data)
    assert _convert(source, tmp_path / "new", to="torch_dist") == 1
    assert "expected the checksum of its record" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]


def test_full_disk_is_one_line(tmp_path, capsys, monkeypatch):
    """Torch's own error is a traceback of "unexpected pos"."""
    source = _save(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        status = _convert(source, tmp_path / "new", to="torch_dist")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1
    assert capsys.readouterr().err.count("expected to convert it") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_target_inside_of_the_source(tmp_path):
    """It is no change of the source, which stays sound."""
    source = _save(tmp_path)
    assert _convert(source, source / "new", to="torch_dist") == 0
    for folder in (source, source / "new" / "iter_0000003"):
        assert find_problems(read_checkpoint(folder)) == []
