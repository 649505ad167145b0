# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A conversion that meets another process, or a fault, writes nothing and replaces nothing."""

import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_muon.checkpoint import convert as module
from megatron_muon.checkpoint import storage
from megatron_muon.checkpoint.__main__ import main
from megatron_muon.checkpoint.folders import CheckpointError
from megatron_muon.checkpoint.storage import read_checkpoint
from megatron_muon.checkpoint.verify import find_problems
from megatron_muon.checkpoint.writing import CheckpointWriter, replacing

FORMS = ("folder", "file")
HIDDEN = ".new.converting-"


def _save(path: Path, form: str, value: float = 1.0) -> Path:
    """Save optimizer state whose bytes have the same places for every value."""
    momentum = {"w": {"momentum_buffer": torch.full((20, 30), value)}}
    group = {"params": ["w"], "lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.0}
    state = {"optim": {"state": momentum, "param_groups": [group]}}
    if form == "file":
        torch.save(state, path / "saved")
    else:
        dcp.save(state, checkpoint_id=path / "saved", no_dist=True)
    return path / "saved"


def _convert(source: Path, target: Path) -> int:
    return main(["convert", str(source), str(target), "--from", "torch", "--to", "fsdp2"])


def _meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Let another process act once, while the result is written."""
    waiting = [act]

    def after(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if waiting:
                waiting.pop()()
            return result

        return call

    monkeypatch.setattr(CheckpointWriter, "add_chunk", after(CheckpointWriter.add_chunk))
    monkeypatch.setattr(module, "_optimizer_states", after(module._optimizer_states))


@pytest.mark.parametrize("form", FORMS)
def test_source_that_is_saved_again_meanwhile_is_refused(form, tmp_path, capsys, monkeypatch):
    """The result had tensors of two saves, and verify called it sound."""
    source = _save(tmp_path, form)
    _meanwhile(monkeypatch, lambda: _save(tmp_path, form, 2.0))
    assert _convert(source, tmp_path / "new") == 1
    assert "expected files that do not change while they are read" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


APPEARING: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_text("kept"),
    "folder": lambda path: (path.mkdir(), (path / "kept").touch()),
    "empty folder": lambda path: path.mkdir(),
    "dangling link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", APPEARING)
@pytest.mark.parametrize("form", FORMS)
def test_target_that_appears_meanwhile_is_not_replaced(form, kind, tmp_path, capsys, monkeypatch):
    """A file was replaced by the result, and so was a dangling link, at any time."""
    source, new = _save(tmp_path, form), tmp_path / "new"
    _meanwhile(monkeypatch, lambda: APPEARING[kind](new))
    assert _convert(source, new) == 1
    assert "FileExistsError" in capsys.readouterr().err
    before = new.lstat()
    assert _convert(source, new) == 1
    assert "expected a path to write to, got one that exists" in capsys.readouterr().err
    assert new.lstat().st_ino == before.st_ino
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "saved"]


@pytest.mark.parametrize("form", FORMS)
def test_folders_of_others_stay_and_are_named(form, tmp_path, caplog):
    """A folder of a process with the same number was deleted; what a kill left was not named."""
    source = _save(tmp_path, form)
    others = [tmp_path / f".new.{os.getpid()}", tmp_path / f"{HIDDEN}abc"]
    for other in others:
        other.mkdir()
        (other / "kept").touch()
    with caplog.at_level(logging.WARNING):
        assert _convert(source, tmp_path / "new") == 0
    assert f"{others[1]}: of a conversion that was killed, or runs" in caplog.text
    assert str(others[0]) not in caplog.text
    assert all((other / "kept").exists() for other in others)
    assert len([*tmp_path.iterdir()]) == 4


def test_killed_conversion_leaves_no_target(tmp_path):
    """Whatever is left beside it has a name that the next conversion looks for."""
    child = os.fork()
    if not child:
        with replacing(tmp_path / "new") as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(HIDDEN)


@pytest.mark.parametrize("form", FORMS)
def test_flipped_bit_is_not_converted(form, tmp_path, capsys):
    """Convert copied damaged bytes, and wrote a new checksum for them."""
    source = _save(tmp_path, form)
    path = source if form == "file" else source / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(torch.ones(600).numpy().tobytes()) + 1000] ^= 4
    path.write_bytes(data)
    assert _convert(source, tmp_path / "new") == 1
    assert "expected the checksum of its record" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("form", FORMS)
def test_full_disk_is_one_line(form, tmp_path, capsys, monkeypatch):
    """A file of torch.save ended in a traceback of "unexpected pos"."""
    source = _save(tmp_path, form)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        status = _convert(source, tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1
    assert capsys.readouterr().err.count("expected to convert it") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("form", FORMS)
def test_folder_that_cannot_be_written_is_one_line(form, tmp_path, capsys):
    """Its path goes through a file."""
    source = _save(tmp_path, form)
    (tmp_path / "text").touch()
    assert _convert(source, tmp_path / "text" / "new") == 1
    assert "expected to convert it" in capsys.readouterr().err


def test_target_inside_of_the_source(tmp_path):
    """It is no change of the source, which stays sound."""
    source = _save(tmp_path, "folder")
    assert _convert(source, source / "new") == 0
    for folder in (source, source / "new"):
        assert not [*find_problems(read_checkpoint(folder))]


@pytest.mark.parametrize("form", FORMS)
def test_path_through_a_link_of_the_user_is_read(form, tmp_path):
    """Only links inside of a checkpoint's folder are refused."""
    (tmp_path / "latest").symlink_to(_save(tmp_path, form))
    assert _convert(tmp_path / "latest", tmp_path / "new") == 0


def test_file_that_is_truncated_while_it_is_read(tmp_path, monkeypatch):
    """Its length is known before, and is not that of what has been read."""
    checkpoint = read_checkpoint(_save(tmp_path, "folder"))
    item = max(checkpoint.items_by_file()["__0_0.distcp"], key=lambda item: item.offset)
    original = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = original(descriptor)
        os.truncate(tmp_path / "saved" / "__0_0.distcp", item.offset + 10)
        return found

    monkeypatch.setattr(storage.os, "fstat", fstat)
    with pytest.raises(CheckpointError, match="the file is truncated"):
        checkpoint.read_item(item)


def test_file_of_lists_that_hold_one_another_is_refused(tmp_path, capsys):
    """A dictionary that held itself was a RecursionError, and shared lists took for ever."""
    cyclic: dict[str, Any] = {}
    cyclic["a"] = [cyclic]
    nested: list[Any] = [1]
    for _ in range(60):
        nested = [nested, nested]
    for number, content in enumerate((cyclic, nested)):
        torch.save(content, tmp_path / f"{number}.pt")
        assert _convert(tmp_path / f"{number}.pt", tmp_path / "new") == 1
        assert "got lists that hold one another or themselves" in capsys.readouterr().err
