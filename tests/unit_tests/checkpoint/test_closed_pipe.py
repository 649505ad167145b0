# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A closed pipe under ``megatron_muon.checkpoint``."""

import pytest

from megatron_muon.checkpoint import __main__ as checkpoint


def test_closed_pipe_is_not_taken_for_an_unreadable_checkpoint(monkeypatch, capsys):
    """Both are OSErrors, and the pipe's was printed as a problem of the checkpoint."""

    def write(_):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(checkpoint, "find_checkpoint", lambda *_: None)
    monkeypatch.setattr(checkpoint, "read_checkpoint", lambda _: None)
    monkeypatch.setattr(checkpoint, "find_problems", write)
    with pytest.raises(BrokenPipeError):
        checkpoint.main(["verify", "folder"])
    assert capsys.readouterr().err == ""
