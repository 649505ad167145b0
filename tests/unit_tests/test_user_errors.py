# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What a user reads whose command line cannot work, and that crashes keep their traceback."""

import json
import os
import subprocess
import sys

import pytest
from helpers.ranks import PRETRAIN_GPT, ROOT
from helpers.toy_gpt import fsdp_toy_gpt

from megatron_muon import IncompatibleMegatronError, launcher
from megatron_muon.mcore.unsupported import unsupported_settings
from megatron_muon.user_errors import SettingsError


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"optimizer": "psgd_pro"}, "adaptive_muon and lion, got psgd_pro: it has no"),
        (
            {
                "moe_grouped_gemm": True,
                "add_bias_linear": True,
                "expert_model_parallel_size": 2,
                "save": "folder",
            },
            "got --moe-grouped-gemm --expert-model-parallel-size 2 --save folder: Megatron-FSDP's",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusal_says_what_was_given(settings, given):
    """Of optimizers that Megatron's parser does not know, and of several flags together."""
    (refusal,) = unsupported_settings({"optimizer": "muon", **settings})
    assert given in refusal


@pytest.mark.slow
def test_refused_flags_end_with_one_text_on_rank_0():
    """Two ranks printed 16,000 characters: three tracebacks around the one sentence to read."""
    flags = ("--ckpt-convert-format", "torch_dist", "--fp16", "--muon-fsdp-max-owners", "3")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "scripts" / "cpu_ranks"), str(PRETRAIN_GPT)]
    done = subprocess.run(
        [sys.executable, *command, *fsdp_toy_gpt("optim_grads_params", *flags)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
        },
        timeout=240,
    )
    assert done.returncode == 1
    text = (
        "megatron_muon: --optimizer muon --use-megatron-fsdp cannot run with:\n"
        "  --fp16: emerging optimizers have no loss scaling; use --bf16.\n"
        "  --ckpt-convert-format, got torch_dist: a Megatron-FSDP model writes no other format; "
        "drop it.\n"
        "  --muon-fsdp-max-owners: expected a power of two, got 3. "
    )
    assert f"\n{done.stderr}".count(f"\n{text}") == 1
    # torchrun's own, of the process that started the ranks; below it the text once more.
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "raise ChildFailedError" in done.stderr
    assert "megatron_muon/" not in done.stderr, "a frame of this package"
    # Which rank it saw first depends on load: rank 1 waits a while, as the tests below show.
    summary = done.stderr.rpartition("Root Cause (first observed failure)")[2]
    assert "got torch_dist" in summary


class Raising:
    """A ``main`` of the launcher that raises, and a clock that does not wait."""

    def __init__(self, monkeypatch, error, rank="0"):
        self.seconds = []
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(launcher.time, "sleep", self.seconds.append)
        monkeypatch.setattr(launcher, "main", self)
        monkeypatch.setattr(sys, "last_exc", None, raising=False)
        self.error = error

    def __call__(self, argv, enable_cpu_ranks):
        raise self.error


@pytest.mark.parametrize(
    "error", [SettingsError("x: wrong."), IncompatibleMegatronError(["torch: wrong."])]
)
def test_rank_0_says_the_error_of_the_user_at_once(monkeypatch, capsys, tmp_path, error):
    """And hands it to torchrun, which shows the file of the rank that failed first."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    raising = Raising(monkeypatch, error)
    assert launcher.run(["script.py"]) == 1
    assert capsys.readouterr().err == f"megatron_muon: {error}\n"
    assert raising.seconds == []
    assert sys.last_exc is error, "process groups would be destroyed, which waits for peers"
    written = json.loads((tmp_path / "error.json").read_text())["message"]
    assert written["message"] == f"megatron_muon: {error}"
    assert written["extraInfo"].keys() == {"timestamp"}


def test_other_ranks_wait_for_rank_0_and_say_nothing(monkeypatch, capsys, tmp_path):
    """Under torchrun the end of one rank ends all, and rank 0 may not have come so far."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    raising = Raising(monkeypatch, SettingsError("x: wrong."), rank="1")
    assert launcher.run(["script.py"]) == 1
    assert capsys.readouterr().err == ""
    assert len(raising.seconds) == 1 and 1 < raising.seconds[0] <= 10
    assert "x: wrong." in (tmp_path / "error.json").read_text()


def test_other_ranks_speak_where_nobody_reads_their_file(monkeypatch, capsys):
    """Under srun, say: a package that is missing on one node alone would go without a word."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    Raising(monkeypatch, SettingsError("x: wrong."), rank="1")
    assert launcher.run(["script.py"]) == 1
    assert capsys.readouterr().err == "megatron_muon: x: wrong.\n"


@pytest.mark.parametrize("error", [ValueError("ours"), RuntimeError("ranks"), KeyError("k")])
def test_crash_keeps_its_traceback(monkeypatch, capsys, error):
    """Whatever is no UserError is for those who read code."""
    Raising(monkeypatch, error)
    with pytest.raises(type(error)) as caught:
        launcher.run(["script.py"])
    assert caught.value is error
    assert capsys.readouterr().err == ""


def test_missing_script_is_an_error_of_the_user(monkeypatch, capsys):
    """It ended in a traceback."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert launcher.run(["no_such_script.py"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("megatron_muon: SCRIPT: expected the path of a Python file, got no_su")
