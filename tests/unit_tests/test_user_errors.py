# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What a user reads whose command line cannot work, and that crashes keep their traceback."""

import json
import sys

import pytest
from helpers.commands import run_torchrun
from helpers.ranks import PRETRAIN_GPT
from helpers.toy_gpt import fsdp_toy_gpt

from megatron_muon import IncompatibleMegatronError, launcher
from megatron_muon.user_errors import SettingsError


@pytest.mark.slow
def test_refused_flags_end_with_one_text_on_rank_0():
    """Refused flags end two ranks with one text and torchrun's summary."""
    flags = ("--ckpt-convert-format", "torch_dist", "--fp16", "--muon-fsdp-max-owners", "3")
    env = {"PYTHONWARNINGS": "ignore"}
    done = run_torchrun(2, str(PRETRAIN_GPT), *fsdp_toy_gpt("optim_grads_params", *flags), env=env)
    assert done.returncode == 1
    text = (
        "megatron_muon: --optimizer muon --use-megatron-fsdp cannot run with:\n"
        "  --fp16: emerging optimizers have no loss scaling; use --bf16.\n"
        "  --ckpt-convert-format: a Megatron-FSDP model writes no other format; drop it.\n"
        "  --muon-fsdp-max-owners: expected a power of two, got 3. "
    )
    # Rank 0 prints it, unless rank 1 failed first and torchrun ended rank 0 before it could.
    assert f"\n{done.stderr}".count(f"\n{text}") <= 1
    # torchrun's own, of the process that started the ranks; below it the text once more.
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "raise ChildFailedError" in done.stderr
    assert "megatron_muon/" not in done.stderr, "a frame of this package"
    summary = done.stderr.rpartition("Root Cause (first observed failure)")[2]
    assert "--ckpt-convert-format" in summary


@pytest.fixture
def launch_raising(monkeypatch, tmp_path):
    """Launch a ``main`` that raises; return the exit status, and the file for torchrun."""

    def launch(error, rank, file="error.json"):
        def main(argv, enable_cpu_ranks):
            raise error

        monkeypatch.setenv("RANK", rank)
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
        if file:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / file))
        monkeypatch.setattr(launcher, "main", main)
        monkeypatch.setattr(sys, "last_exc", None, raising=False)
        return launcher.launch(["script.py"]), tmp_path / str(file)

    return launch


@pytest.mark.parametrize(
    "error", [SettingsError("x: wrong."), IncompatibleMegatronError(["torch: wrong."])]
)
def test_rank_0_says_the_error_of_the_user(launch_raising, capsys, error):
    """Rank 0 prints a user's error, and writes it for torchrun."""
    status, file = launch_raising(error, "0")
    assert status == 1
    assert capsys.readouterr().err == f"megatron_muon: {error}\n"
    assert sys.last_exc is error, "process groups would be destroyed, which waits for peers"
    written = json.loads(file.read_text())["message"]
    assert written["message"] == f"megatron_muon: {error}"
    assert written["extraInfo"].keys() == {"timestamp"}


def test_other_ranks_speak_only_where_nobody_reads_their_file(launch_raising, capsys):
    """Other ranks print a user's error only where no launcher reads their file."""
    error = SettingsError("x: wrong.")
    status, file = launch_raising(error, "1")
    assert status == 1 and capsys.readouterr().err == ""
    assert "x: wrong." in file.read_text()
    assert launch_raising(error, "1", file="")[0] == 1
    assert capsys.readouterr().err == "megatron_muon: x: wrong.\n"


@pytest.mark.parametrize("error", [ValueError("ours"), RuntimeError("ranks"), KeyError("k")])
def test_crash_keeps_its_traceback(launch_raising, capsys, error):
    """Errors other than UserError keep their traceback."""
    with pytest.raises(type(error)) as caught:
        launch_raising(error, "0")
    assert caught.value is error
    assert capsys.readouterr().err == ""
