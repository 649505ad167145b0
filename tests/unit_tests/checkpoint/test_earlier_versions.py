# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of earlier versions, stored in ``data/`` by ``helpers/earlier_versions.py``."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.checkpoint_runs import SAVED_AT, as_saved, assert_same, gathered, resumed_run
from helpers.earlier_versions import DATA, FLAGS, FORMS, OF_NORMUON, build
from helpers.fsdp2_models import load_state, local
from helpers.ranks import run_ranks
from helpers.toy_gpt import ZERO
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

pytestmark = [pytest.mark.ranks, pytest.mark.cpu_only]
of_each_version = pytest.mark.parametrize(
    "archive", sorted({*DATA.iterdir()} - {OF_NORMUON}), ids=lambda p: p.name
)


def _read(folder: Path, output: Path) -> dict[str, Any]:
    """Read whole tensors and objects by plain torch."""
    dcp_to_torch_save(folder, output)
    return torch.load(output, weights_only=False)


def _tensors(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return {prefix: state}
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items() if isinstance(state, dict) else ():
        found |= _tensors(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def _load_fsdp2(folder: str) -> None:
    dist.init_process_group("gloo")
    for name, form in FORMS.items():
        model, optimizer = build()
        load_state(f"{folder}/{name}", model, optimizer, form)
        whole = StateDictOptions(
            full_state_dict=True, flatten_optimizer_state_dict=form.flatten_optimizer_state_dict
        )
        found = dict(zip("mo", get_state_dict(model, optimizer, options=whole), strict=True))
        if dist.get_rank() == 0:
            expected = _tensors(_read(Path(folder, name), Path(folder, f"{name}.pt")))
            assert {"up", "momentum_buffer", "moment2_buffer"} <= {
                part for key in expected for part in key.split(".")
            }
            assert_same(_tensors(found), expected)


@of_each_version
def test_state_of_an_earlier_version_loads_under_fsdp2(archive, tmp_path):
    """A checkpoint of two ranks loads on three to the bit, in both forms of its names."""
    shutil.unpack_archive(archive, tmp_path, filter="data")
    run_ranks(3, _load_fsdp2, str(tmp_path)).check()


@pytest.mark.megatron
@of_each_version
def test_checkpoint_of_an_earlier_version_loads_under_megatron_fsdp(archive, tmp_path):
    """Weights, momentum and second moments after a load are the stored tensors to the bit."""
    shutil.unpack_archive(archive, tmp_path, filter="data")
    # It was saved by a run of fewer iterations.
    flags = (*FLAGS, "--override-opt_param-scheduler")
    resumed_run(2, tmp_path / "megatron", tmp_path / "resumed", ZERO[3], *flags).check()
    stored = _tensors(_read(tmp_path / f"megatron/iter_{SAVED_AT:07d}", tmp_path / "read.pt"))
    parts = ("model", "optimizer")
    expected = {key: value for key, value in stored.items() if key.split(".")[0] in parts}
    assert any(".moment2_" in key for key in expected)
    assert_same(as_saved(gathered(tmp_path / "resumed", 2)), expected)


def _load_of_normuon(folder: str) -> list[str]:
    """Return the errors of loads, after which weights are as before."""
    dist.init_process_group("gloo")
    errors = []
    for name, form in FORMS.items():
        model, optimizer = build("normuon")
        before = [local(param).clone() for param in model.parameters()]
        with pytest.raises(CheckpointException) as error:
            load_state(f"{folder}/{name}", model, optimizer, form)
        assert all(map(torch.equal, before, map(local, model.parameters())))
        errors.append(str(error.value))
    return errors


def test_moments_that_all_ranks_kept_are_refused_under_fsdp2(tmp_path):
    """Moments of NorMuon in the form of 0.1.0 are refused by name on all ranks."""
    shutil.unpack_archive(OF_NORMUON, tmp_path, filter="data")
    for errors in run_ranks(3, _load_of_normuon, str(tmp_path)).check().results:
        for error in errors:
            assert "Missing key in checkpoint" in error and "step_of_all_ranks" in error, error


@pytest.mark.megatron
def test_moments_that_all_ranks_kept_are_refused_under_megatron_fsdp(tmp_path):
    """Moments of NorMuon in the form of 0.1.0 are refused by name, with what to do."""
    shutil.unpack_archive(OF_NORMUON, tmp_path, filter="data")
    flags = [flag.replace("adamuon", "normuon") for flag in FLAGS]
    flags.append("--override-opt_param-scheduler")
    run = resumed_run(2, tmp_path / "megatron", tmp_path / "resumed", ZERO[3], *flags)
    assert run.exit_codes == [1] * 2
    for output in run.outputs:
        assert "moment2_rows: expected nothing" in output and "Nothing was loaded" in output
        assert "--no-load-optim or --finetune loads the weights" in output
