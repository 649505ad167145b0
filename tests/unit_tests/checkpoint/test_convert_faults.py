# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A conversion that meets another process, or a fault, writes nothing and replaces nothing."""

import argparse
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_muon.checkpoint import reading
from megatron_muon.checkpoint.__main__ import main
from megatron_muon.checkpoint.folders import CheckpointError
from megatron_muon.checkpoint.reading import find_problems, read_checkpoint
from megatron_muon.checkpoint.writing import LazyPlanner, replacing

HIDDEN = ".new.converting-"
NAME = "module.module.decoder.layers.0.w"
ARGS = {
    "bf16": False,
    "fp16": False,
    "swiglu": False,
    "transformer_impl": "local",
    "moe_grouped_gemm": False,
    "num_layers": 1,
    "num_experts": None,
}


def _save(path: Path, value: float = 1.0) -> Path:
    """Save a checkpoint of Megatron-FSDP whose bytes have the same places for every value."""
    state = {
        f"model.{NAME.removeprefix('module.')}": torch.full((20, 30), value),
        f"optimizer.state.{NAME}.momentum_buffer": torch.full((20, 30), value),
        f"optimizer.param_to_group_meta.{NAME}.lr": 0.1,
        "args": argparse.Namespace(**ARGS),
        "iteration": 3,
    }
    dcp.save(state, checkpoint_id=path / "saved", no_dist=True)
    return path / "saved"


def _convert(source: Path, target: Path) -> int:
    return main(["convert", str(source), str(target), "--to", "torch_dist"])


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

    monkeypatch.setattr(LazyPlanner, "lookup_object", after(LazyPlanner.lookup_object))


def test_source_that_is_saved_again_meanwhile_is_refused(tmp_path, capsys, monkeypatch):
    """The result had tensors of two saves, and verify called it sound."""
    source = _save(tmp_path)
    _meanwhile(monkeypatch, lambda: _save(tmp_path, 2.0))
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
def test_target_that_appears_meanwhile_is_not_replaced(kind, tmp_path, capsys, monkeypatch):
    """A file was replaced by the result, and so was a dangling link, at any time."""
    source, new = _save(tmp_path), tmp_path / "new"
    _meanwhile(monkeypatch, lambda: APPEARING[kind](new))
    assert _convert(source, new) == 1
    assert "FileExistsError" in capsys.readouterr().err
    before = new.lstat()
    assert _convert(source, new) == 1
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
    assert left.name.startswith(HIDDEN)


def test_flipped_bit_is_not_converted(tmp_path, capsys):
    """Convert copied damaged bytes, and wrote a new checksum for them."""
    source = _save(tmp_path)
    path = source / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[data.index(torch.ones(600).numpy().tobytes()) + 1000] ^= 4
    path.write_bytes(data)
    assert _convert(source, tmp_path / "new") == 1
    assert "expected the checksum of its record" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]


def test_full_disk_is_one_line(tmp_path, capsys, monkeypatch):
    """Torch's own error is a traceback of "unexpected pos"."""
    source = _save(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        status = _convert(source, tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 1
    assert capsys.readouterr().err.count("expected to convert it") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    """Its path goes through a file."""
    source = _save(tmp_path)
    (tmp_path / "text").touch()
    assert _convert(source, tmp_path / "text" / "new") == 1
    assert "expected to convert it" in capsys.readouterr().err


def test_target_inside_of_the_source(tmp_path):
    """It is no change of the source, which stays sound."""
    source = _save(tmp_path)
    assert _convert(source, source / "new") == 0
    for folder in (source, source / "new" / "iter_0000003"):
        assert not [*find_problems(read_checkpoint(folder))]


def test_path_through_a_link_of_the_user_is_read(tmp_path):
    """Only links inside of a checkpoint's folder are refused."""
    (tmp_path / "latest").symlink_to(_save(tmp_path))
    assert _convert(tmp_path / "latest", tmp_path / "new") == 0


def test_file_that_is_truncated_while_it_is_read(tmp_path, monkeypatch):
    """Its length is known before, and is not that of what has been read."""
    checkpoint = read_checkpoint(_save(tmp_path))
    item = max(checkpoint.items_by_file()["__0_0.distcp"], key=lambda item: item.offset)
    original = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = original(descriptor)
        os.truncate(tmp_path / "saved" / "__0_0.distcp", item.offset + 10)
        return found

    monkeypatch.setattr(reading.os, "fstat", fstat)
    with pytest.raises(CheckpointError, match="the file is truncated"):
        checkpoint._read_item(item)
