# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints read without megatron: table of contents, checksums, command line."""

import argparse
import io
import os
import pickle
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.ranks import ROOT
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.checkpoint.__main__ import main
from megatron_muon.checkpoint.folders import CheckpointError, find_checkpoint
from megatron_muon.checkpoint.storage import (
    Item,
    StoredTensor,
    _Inert,
    _Unpickler,
    load_object,
    load_tensor,
    read_checkpoint,
)
from megatron_muon.checkpoint.verify import _is_tiled, find_misfits, find_problems

NAME = "module.module.decoder.layers.0.mlp.linear_fc2.weight"


class _Harmful:
    """Pickles as a call that would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def _state(folder: Path) -> dict:
    generator = torch.Generator().manual_seed(0)
    args = argparse.Namespace(
        optimizer="muon", world_size=8, tensor_model_parallel_size=2, evil=_Harmful(folder / "ran")
    )
    return {
        "args": args,
        "iteration": 30,
        "model": {NAME.removeprefix("module."): torch.randn(12, 5, generator=generator)},
        "optimizer": {
            "state": {
                NAME: {"momentum_buffer": torch.full((12, 5), 2.0)},
                "module.embedding.weight": {
                    "exp_avg": torch.ones(3, dtype=torch.bfloat16),
                    "exp_avg_sq": torch.ones(3),
                    "step": torch.tensor(7.0),
                },
            },
            "param_to_group_meta": {NAME: {"lr": 0.1, "betas": (0.9, 0.95)}},
        },
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    """A --save folder of one checkpoint, written by torch alone."""
    dcp.save(_state(tmp_path), checkpoint_id=tmp_path / "iter_0000030", no_dist=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("30")
    return tmp_path


def test_verify_runs_no_code_of_a_checkpoint(folder):
    """The fixture is what it claims: torch's own reader does run it."""
    assert main(["verify", str(folder)]) == 0
    assert not (folder / "ran").exists()
    dcp.load({"args": None}, checkpoint_id=folder / "iter_0000030", no_dist=True)
    assert (folder / "ran").exists()


def test_objects_that_are_no_archive_are_refused_without_running_them(tmp_path):
    """torch.load once took raw pickles by another way, and ran them."""
    raw = pickle.dumps(_Harmful(tmp_path / "ran"))
    archive = io.BytesIO()
    torch.save({"a": 1}, archive)
    for data in (raw, raw[:-1]):
        with pytest.raises(CheckpointError, match="expected an archive of torch.save"):
            load_object(data, "args")
    assert load_object(raw + archive.getvalue(), "args") == {"a": 1}
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["numpy.ndarray", "pathlib.PosixPath", "torch.load", "os.system"])
def test_names_of_classes_and_functions_are_inert(name):
    """No object of this process is reachable from a pickle, so none is called or changed."""
    module, _, attribute = name.rpartition(".")
    text = f"c{module}\n{attribute}\n.".encode()
    found = _Unpickler(io.BytesIO(text)).load()
    assert issubclass(found, _Inert)
    assert found("anything").arguments == ("anything",)


@pytest.mark.parametrize("file", ["../../secret", "/etc/hostname", "a/b.distcp"])
def test_files_outside_of_the_folder_are_refused(file, folder):
    """The table of contents names files of the checkpoint only."""
    path = folder / "iter_0000030" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    index = next(iter(metadata.storage_data))
    metadata.storage_data[index] = replace(metadata.storage_data[index], relative_path=file)
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="in place of a file of the folder"):
        read_checkpoint(folder / "iter_0000030")


def test_verify_reads_every_byte(folder, capsys):
    """A sound checkpoint: the bytes it counts are those on disk."""
    assert main(["verify", str(folder), "--ckpt-step", "30"]) == 0
    size = sum(path.stat().st_size for path in folder.glob("*/*.distcp"))
    assert f"sound; 5 tensors, 4 objects, {size:,} bytes in 1 files" in capsys.readouterr().out


def test_commands_need_neither_megatron_nor_a_process_group(folder):
    """As a user runs them."""
    code = (
        "import runpy, sys, atexit\n"
        "atexit.register(lambda: print('MEGATRON', any(m == 'megatron' for m in sys.modules)))\n"
        f"sys.argv = ['checkpoint', 'verify', {str(folder)!r}]\n"
        "runpy.run_module('megatron_muon.checkpoint', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "MEGATRON False" in done.stdout


def test_flipped_byte_is_found_or_changes_nothing(folder):
    """200 flips at random: each is reported, or what is read stays the same bit for bit."""
    checkpoint = read_checkpoint(folder / "iter_0000030")
    path = next(folder.glob("*/*.distcp"))
    sound = path.read_bytes()

    def contents() -> list:
        tensors = [
            load_tensor(checkpoint.read_item(chunk), key)
            for key, tensor in checkpoint.tensors.items()
            for chunk in tensor.chunks
        ]
        return [tensor.view(torch.uint8).tolist() if tensor.dim() else tensor for tensor in tensors]

    expected, found, rng = contents(), 0, random.Random(0)
    for _ in range(200):
        data = bytearray(sound)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        if list(find_problems(checkpoint)):
            found += 1
        else:
            assert contents() == expected
    assert found > 20


def test_every_flip_inside_of_a_tensor_is_found(folder):
    """Where torch.load notices nothing."""
    checkpoint = read_checkpoint(folder / "iter_0000030")
    path = next(folder.glob("*/*.distcp"))
    sound = path.read_bytes()
    start = sound.index(torch.full((12, 5), 2.0).numpy().tobytes())
    for position in range(start, start + 240, 7):
        data = bytearray(sound)
        data[position] ^= 16
        path.write_bytes(data)
        problems = list(find_problems(checkpoint))
        assert len(problems) == 1
        assert f"optimizer.state.{NAME}.momentum_buffer: expected the checksum" in problems[0]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 1), "the file is truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "bytes, got"),
        (lambda path: path.unlink(), "expected a file, got none"),
        (lambda path: os.truncate(path.parent / ".metadata", 100), "expected the metadata of"),
        (lambda path: (path.parent / ".metadata").unlink(), "its save was cut short"),
        (
            lambda path: (path.parent / ".metadata").write_bytes(pickle.dumps({"a": 1})),
            "dict in place of Metadata",
        ),
    ],
)
def test_verify_names_the_damaged_file(damage, text, folder, capsys):
    """Exit status 1, one line a problem."""
    path = next(folder.glob("*/*.distcp"))
    damage(path)
    assert main(["verify", str(folder)]) == 1
    error = capsys.readouterr().err
    assert text in error and str(folder / "iter_0000030") in error


@pytest.mark.parametrize("num_shares", [1, 2, 3, 50])
def test_shares_find_together_what_one_finds(num_shares, folder):
    """Each problem once, by whichever rank's share it is."""
    path = next(folder.glob("*/*.distcp"))
    path.write_bytes(path.read_bytes()[:-10])
    checkpoint = read_checkpoint(folder / "iter_0000030")
    tensors = {key: replace(each, chunks=()) for key, each in checkpoint.tensors.items()}
    checkpoint = replace(checkpoint, tensors=tensors)
    alone = sorted(find_misfits(checkpoint))
    shared = [find_misfits(checkpoint, share, num_shares) for share in range(num_shares)]
    assert sorted(problem for problems in shared for problem in problems) == alone
    assert len(alone) > 3


def test_find_checkpoint_says_what_could_be_loaded(folder):
    """An unfinished save beside a finished one."""
    (folder / "iter_0000040").mkdir()
    for tracker in ("40", "40\n"):
        (folder / "latest_checkpointed_iteration.txt").write_text(tracker)
        with pytest.raises(CheckpointError, match=r"Finished in .*: 30; load one with --ckpt-step"):
            find_checkpoint(folder)
    assert find_checkpoint(folder, 30) == folder / "iter_0000030"
    assert find_checkpoint(folder / "iter_0000030") == folder / "iter_0000030"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 4), st.data())
def test_tiling_is_recognized(rows, num_column_blocks, data):
    """Row shards of column blocks tile a matrix; moved, doubled or dropped ones do not."""
    width = 3
    chunks = [
        Item("key", "file", 0, 0, (sum(rows[:index]), width * block), (count, width))
        for index, count in enumerate(rows)
        for block in range(num_column_blocks)
        if count
    ]
    shape = (sum(rows), width * num_column_blocks)
    tensor = StoredTensor(shape, torch.float32, tuple(chunks))
    assert _is_tiled(tensor)
    if not chunks:
        return
    index = data.draw(st.integers(0, len(chunks) - 1))
    start, column = chunks[index].offsets
    moved = replace(chunks[index], offsets=(start + 1, column))
    others = [*chunks[:index], *chunks[index + 1 :]]
    for wrong in ([*others, moved], others, [*chunks, chunks[index]]):
        assert not _is_tiled(replace(tensor, chunks=tuple(wrong)))


# A line of its own, a control sequence, and text that runs from right to left.
ODD = "model.a\n/x: sound; 5 tensors\x1b[2J\u202eb\ud800"


def test_keys_are_printed_on_one_line_without_control_characters(tmp_path, capsys):
    """Control sequences of a key reached the terminal, and a line break began another line."""
    state = _state(tmp_path) | {ODD: torch.ones(2, 2), f"{ODD}2": torch.ones(3)}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    path = tmp_path / "saved" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata[f"{ODD}2"].size = torch.Size([4])
    path.write_bytes(pickle.dumps(metadata))
    to = (str(tmp_path / "new"), "--from", "fsdp_dtensor", "--to", "torch_dist")
    for command, more in (("verify", ()), ("convert", to)):
        assert main([command, str(tmp_path / "saved"), *more]) == 1
        text = "".join(capsys.readouterr())
        assert "a\\n/x: sound; 5 tensors\\x1b[2J\\u202eb\\ud800" in text
        assert all(line.isprintable() for line in text.splitlines())
