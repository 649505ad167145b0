# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Commands whose output is cut by ``| head``."""

import subprocess
import sys

import pytest
from helpers.ranks import ROOT

from megatron_muon.checkpoint import __main__ as checkpoint
from megatron_muon.closed_pipe import run_until_closed_pipe

# A checkpoint of more lines than a pipe holds.
INSPECT = """
import runpy, sys
from megatron_muon.checkpoint import folders, report, storage
folders.find_checkpoint = storage.read_checkpoint = lambda *_: None
report.describe = lambda _: ["tensor"] * 100_000
sys.argv = ["checkpoint", "inspect", "folder"]
runpy.run_module("megatron_muon.checkpoint", run_name="__main__")
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "megatron_muon.plan", "--preset", "llama3-8b", "--dp", "64"],
        ["-c", INSPECT],
    ],
    ids=["plan", "checkpoint"],
)
def test_command_ends_quietly_when_its_reader_is_gone(arguments):
    """``python -m megatron_muon.plan ... | head`` ended in the traceback of a BrokenPipeError."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=120) == 1


def test_closed_pipe_is_not_taken_for_an_unreadable_checkpoint(monkeypatch, capsys):
    """Both are OSErrors, and the pipe's was printed as a problem of the checkpoint."""

    def describe(_):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(checkpoint, "find_checkpoint", lambda *_: None)
    monkeypatch.setattr(checkpoint, "read_checkpoint", lambda _: None)
    monkeypatch.setattr(checkpoint, "describe", describe)
    with pytest.raises(BrokenPipeError):
        checkpoint.main(["inspect", "folder"])
    assert capsys.readouterr().err == ""


def test_exit_status_and_other_errors_pass():
    """Only the pipe is special."""
    assert run_until_closed_pipe(lambda: 3) == 3
    with pytest.raises(KeyError):
        run_until_closed_pipe(lambda: {}["absent"])
