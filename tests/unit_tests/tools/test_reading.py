# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints read and verified without megatron, also those of an attacker."""

import argparse
import contextlib
import io
import multiprocessing
import os
import pickle
import random
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.checkpoint_runs import ARGS, WEIGHT, save_matrix
from helpers.commands import run_command
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_muon.mcore.checkpoint_folders import TRACKER, CheckpointError, find_checkpoint
from megatron_muon.mcore.checkpoint_reading import read_checkpoint
from megatron_muon.tools.checkpoint.command import main
from megatron_muon.tools.checkpoint.reading import find_problems, is_tiled, read_chunk, read_object


class _Harmful:
    """Pickles as a call that would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


# Against hangs alone.
_LIMIT_SECONDS = 120


@pytest.fixture
def folder(tmp_path) -> Path:
    """A --save folder of one checkpoint, written by torch alone, with code in it."""
    args = argparse.Namespace(**ARGS, evil=_Harmful(tmp_path / "ran"))
    save_matrix(tmp_path / "iter_0000003", args=args)
    (tmp_path / TRACKER).write_text("3")
    return tmp_path


def test_verify_runs_no_code_of_a_checkpoint(folder):
    """The command verify does not run the code in a checkpoint that torch's own reader runs."""
    assert main(["verify", str(folder)]) == 0
    assert not (folder / "ran").exists()
    dcp.load({"args": None}, checkpoint_id=folder / "iter_0000003", no_dist=True)
    assert (folder / "ran").exists()


NAMES = ("os.path.join", "builtins.getattr", "torch.load", "pathlib.os")


@pytest.mark.parametrize("where", ["planner_data", "storage_data", "storage_meta", *NAMES])
def test_metadata_that_names_another_function_is_refused(where, folder):
    """Metadata that names functions outside of the list, in any way, is refused uncalled."""
    path, name = folder / "iter_0000003" / ".metadata", f"{os.system.__module__}.system"
    if where in NAMES:
        module, _, attribute = where.rpartition(".")
        path.write_bytes(f"c{module}\n{attribute}\n.".encode())
        name = where
    else:
        metadata = pickle.loads(path.read_bytes())
        setattr(metadata, where, _Harmful(folder / "ran"))
        path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"{name}, which may run code"):
        read_checkpoint(path.parent)
    assert main(["verify", str(folder)]) == 1
    assert not (folder / "ran").exists()


def test_object_reads_without_its_classes(folder):
    """Arguments of a checkpoint are read without the classes of Megatron and of users."""
    args = read_object(read_checkpoint(folder / "iter_0000003"), "args")
    assert ARGS.items() <= vars(args).items() and "evil" in vars(args)
    assert not (folder / "ran").exists()


@pytest.mark.slow
def test_command_needs_no_megatron(folder):
    """The command verifies a checkpoint where megatron cannot be imported."""
    code = (
        "import sys; sys.modules['megatron'] = None; "
        "from megatron_muon.tools.checkpoint.command import main; sys.exit(main(sys.argv[1:]))"
    )
    done = run_command(sys.executable, "-c", code, "verify", str(folder))
    assert done.returncode == 0, done.stderr


def test_flipped_byte_is_found_or_changes_nothing(folder):
    """Each of 80 random flips is reported, or the tensors that are read keep their bits."""
    checkpoint = read_checkpoint(folder / "iter_0000003")
    path = next(folder.glob("*/*.distcp"))
    sound = path.read_bytes()

    def contents() -> list:
        return [
            read_chunk(checkpoint, key, chunk).view(torch.uint8).tolist()
            for key, tensor in checkpoint.tensors.items()
            for chunk in tensor.chunks
        ]

    expected, found, rng = contents(), 0, random.Random(0)
    for _ in range(80):
        data = bytearray(sound)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        if find_problems(checkpoint):
            found += 1
        else:
            assert contents() == expected
    assert found > 8


def test_find_checkpoint_says_what_could_be_loaded(folder):
    """An unfinished save is refused with the iterations that are finished."""
    (folder / "iter_0000040").mkdir()
    for tracker in ("40", "40\n"):
        (folder / TRACKER).write_text(tracker)
        with pytest.raises(CheckpointError, match=r"Finished in .*: 3; load one with --ckpt-step"):
            find_checkpoint(folder)
    assert find_checkpoint(folder, 3) == folder / "iter_0000003"
    assert find_checkpoint(folder / "iter_0000003") == folder / "iter_0000003"


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 4), st.data())
def test_tiling_is_recognized(rows, num_column_blocks, data):
    """Row shards of column blocks tile a matrix; moved, doubled or dropped ones do not."""
    width = 3
    chunks = [
        ((sum(rows[:index]), width * block), (count, width))
        for index, count in enumerate(rows)
        for block in range(num_column_blocks)
        if count
    ]
    shape = (sum(rows), width * num_column_blocks)
    assert is_tiled(shape, chunks)
    if not chunks:
        return
    index = data.draw(st.integers(0, len(chunks) - 1))
    (start, column), sizes = chunks[index]
    moved = ((start + 1, column), sizes)
    others = [*chunks[:index], *chunks[index + 1 :]]
    for wrong in ([*others, moved], others, [*chunks, chunks[index]]):
        assert not is_tiled(shape, wrong)


# A line of its own, a control sequence, and text that runs from right to left.
ODD = "model.a\n/x: sound; 5 tensors\x1b[2J\u202eb\ud800"


def test_keys_are_printed_on_one_line_without_control_characters(tmp_path, capsys):
    """Keys are printed without line breaks and control sequences."""
    path = save_matrix(tmp_path / "saved", **{ODD: torch.ones(2, 2), f"{ODD}2": torch.ones(3)})
    path /= ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata[f"{ODD}2"].size = torch.Size([4])
    path.write_bytes(pickle.dumps(metadata))
    to = (str(tmp_path / "new"), "--to", "torch_dist")
    for command, more in (("verify", ()), ("convert", to)):
        assert main([command, str(tmp_path / "saved"), *more]) == 1
        text = "".join(capsys.readouterr())
        assert "a\\n/x: sound; 5 tensors\\x1b[2J\\u202eb\\ud800" in text
        assert all(line.isprintable() for line in text.splitlines())


SECRET = "a secret of this machine"


def _printed(*arguments: object) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main([*map(str, arguments)])
    return status, out.getvalue()


def _run(*arguments: object) -> tuple[int, str]:
    """Run a command in a process of its own, and return its status and what it prints."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply_async(_printed, arguments).get(_LIMIT_SECONDS)


def test_the_checkpoint_itself_is_sound(tmp_path):
    """The checkpoint from which each damaged one differs by one fault is accepted."""
    saved = save_matrix(tmp_path / "saved")
    # Reached by a link of the user's own, as `latest -> iter_0000010`.
    (tmp_path / "latest").symlink_to(saved)
    # Inside of the source too, which stays sound.
    for target in (tmp_path / "new", saved / "new"):
        status, text = _run("convert", tmp_path / "latest", target, "--to", "torch_dist")
        assert status == 0, text
        assert find_problems(read_checkpoint(target / "iter_0000003")) == []
        assert _run("verify", saved)[0] == 0


def _link_to_secret(path: Path) -> None:
    (path.parent.parent / "secret").write_text(SECRET * 1000)
    path.symlink_to(path.parent.parent / "secret")


def _zeros(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _replaced(damage: Callable[[Path], object], file: str = "__0_0.distcp") -> Callable:
    """Return a damage that moves a file of a checkpoint outside, and puts something there."""

    def replace_file(saved: Path) -> None:
        (saved / file).rename(saved.parent / "outside")
        damage(saved / file)

    return replace_file


def _flip_a_bit(saved: Path) -> None:
    data = bytearray((saved / DATA).read_bytes())
    data[data.index(torch.ones(600).numpy().tobytes()) + 1000] ^= 4
    (saved / DATA).write_bytes(data)


def _shorter(file: str, num_bytes: int) -> Callable[[Path], object]:
    return lambda saved: os.truncate(saved / file, (saved / file).stat().st_size - num_bytes)


DATA, TABLE = "__0_0.distcp", ".metadata"
# What is done to the folder, and what is said.
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shorter": (_shorter(DATA, 1), "expected an archive of torch.save"),
    # Convert once copied damaged bytes, and wrote a new checksum for them.
    "flipped bit": (_flip_a_bit, "expected the checksum of its record"),
    "gone": (lambda saved: (saved / DATA).unlink(), "expected a file, got none"),
    "link to a secret": (_replaced(_link_to_secret), ""),
    "device": (_replaced(lambda path: path.symlink_to("/dev/zero")), ""),
    "pipe": (_replaced(os.mkfifo), ""),
    "folder": (_replaced(os.mkdir), ""),
    "shorter metadata": (_shorter(TABLE, 100), "expected the metadata of"),
    "no metadata": (lambda saved: (saved / TABLE).unlink(), "its save was cut short"),
    "other metadata": (
        lambda saved: (saved / TABLE).write_bytes(pickle.dumps({"a": 1})),
        "dict in place of Metadata",
    ),
    "metadata of zeros": (_replaced(_zeros, TABLE), ""),
}


def _nested(depth: int = 60) -> list[Any]:
    nested: list[Any] = [1]
    for _ in range(depth):
        nested = [nested, nested]
    return nested


def _index(metadata: Metadata, key: str = WEIGHT) -> MetadataIndex:
    return next(index for index in metadata.storage_data if index.fqn == key)


def _set(entry: Callable[[Metadata], object], **changes: Any) -> Callable[[Metadata], None]:
    """Return a function that sets attributes of an entry, frozen or not."""

    def change(metadata: Metadata) -> None:
        for name, value in changes.items():
            object.__setattr__(entry(metadata), name, value)

    return change


def _place(**changes: Any) -> Callable[[Metadata], None]:
    """Change the place of the weight's one chunk."""
    return _set(lambda metadata: metadata.storage_data[_index(metadata)], **changes)


def _shape(*shape: Any) -> Callable[[Metadata], None]:
    return _set(lambda metadata: metadata.state_dict_metadata[WEIGHT], size=shape)


def _chunks(*boxes: tuple[Any, Any]) -> Callable[[Metadata], None]:
    """Give the weight other chunks, all with the same bytes."""

    def change(metadata: Metadata) -> None:
        place = metadata.storage_data.pop(_index(metadata))
        chunk = metadata.state_dict_metadata[WEIGHT].chunks[0]
        metadata.state_dict_metadata[WEIGHT].chunks = chunks = []
        for offsets, sizes in boxes:
            chunks.append(replace(chunk, offsets=offsets, sizes=sizes))
            index = MetadataIndex(WEIGHT)
            object.__setattr__(index, "offset", offsets)
            metadata.storage_data[index] = place

    return change


# Changes of the table of contents.
TABLES = {
    "length of 2**40": _place(length=2**40),
    "length of 2**64": _place(length=2**64),
    "length of -1": _place(length=-1),
    "length of 1.5": _place(length=1.5),
    "no length": _place(length=None),
    "offset of 2**64": _place(offset=2**64),
    "offset of lists": _place(offset=_nested()),
    "parent": _place(relative_path=".."),
    "absolute": _place(relative_path="/etc/hostname"),
    "NUL": _place(relative_path="a\0b"),
    "long name": _place(relative_path="n" * 300),
    "number as name": _place(relative_path=3),
    "control sequence": _place(relative_path="\x1b[2J"),
    "lists as shape": _shape(*_nested()),
    "name of lists": _set(_index, fqn=_nested()),
    "outside": _chunks(((2, 0), (20, 30))),
    "overlap": _chunks(((0, 0), (19, 30)), ((10, 0), (10, 30))),
    "hole": _chunks(((0, 0), (19, 30))),
    "negative": _chunks(((-1, 0), (21, 30))),
    "negative sizes": _chunks(((0, 0), (-20, -30))),
    "three dimensions": _chunks(((0, 0, 0), (20, 30, 1))),
    "large": _chunks(((0, 0), (2**31, 2**31))),
    "large shape": _shape(2**40, 30),
    "60 dimensions": _shape(*[1] * 60),
}


def _archive(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _compressed(value: object) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(_archive(value))) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _cyclic() -> dict[str, Any]:
    cyclic: dict[str, Any] = {}
    cyclic["a"] = [cyclic]
    return cyclic


def _deep(depth: int = 50_000) -> bytes:
    """Return an archive of nested lists, deeper than Python's pickle writes them."""
    nested = b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"."
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        archive.writestr("archive/data.pkl", nested)
    return buffer.getvalue()


# The key, and its bytes or a value that torch saves. Verify compares only their checksums.
ITEMS: dict[str, tuple[str, Callable[[], Any]]] = {
    "compressed": (WEIGHT, lambda: _compressed(torch.zeros(20, 1 << 20))),
    "view": (WEIGHT, lambda: torch.ones(1).expand(1 << 40)),
    "meta": (WEIGHT, lambda: torch.empty(1 << 20, 1 << 20, device="meta")),
    "list": (WEIGHT, lambda: [1]),
    "nested": (WEIGHT, _nested),
    "raw pickle": (WEIGHT, lambda: pickle.dumps(_nested())),
    "other shape": (WEIGHT, lambda: torch.ones(20, 31)),
    "lists as iteration": ("iteration", _nested),
    "text as iteration": ("iteration", lambda: "\x1b[2J"),
    "cyclic args": ("args", _cyclic),
    "deep args": ("args", _deep),
    "number as args": ("args", lambda: 3),
}


def _put(saved: Path, metadata: Metadata, key: str, value: Any) -> None:
    """Replace the bytes of a key, and leave no hole, so that nothing else is wrong."""
    (saved / "z.distcp").write_bytes(value if isinstance(value, bytes) else _archive(value))
    index, size = _index(metadata, key), (saved / "z.distcp").stat().st_size
    old = metadata.storage_data[index]
    sound = (saved / DATA).read_bytes()
    (saved / DATA).write_bytes(sound[: old.offset] + sound[old.offset + old.length :])
    for other, place in metadata.storage_data.items():
        if place.offset > old.offset:
            metadata.storage_data[other] = replace(place, offset=place.offset - old.length)
    metadata.storage_data[index] = replace(old, relative_path="z.distcp", offset=0, length=size)


@pytest.mark.parametrize("case", [*FILES, *TABLES, *ITEMS])
def test_damaged_checkpoint_is_refused_in_one_line(case, tmp_path):
    """No file outside is read, nothing hangs or ends in a traceback, and convert writes nothing."""
    saved = save_matrix(tmp_path / "iter_0000003")
    (tmp_path / TRACKER).write_text("3")
    metadata = pickle.loads((saved / TABLE).read_bytes())
    key, value = ITEMS.get(case, (WEIGHT, None))
    damage, said = FILES.get(case, (None, ""))
    if damage is not None:
        damage(saved)
    else:
        TABLES[case](metadata) if value is None else _put(saved, metadata, key, value())
        (saved / TABLE).write_bytes(pickle.dumps(metadata))
    names = sorted(tmp_path.iterdir())
    to = (tmp_path / "new", "--to", "torch_dist")
    for command, more in (("verify", ()), ("convert", to))[value is not None :]:
        status, text = _run(command, tmp_path, *more)
        assert status == 1, (command, text)
        assert said in text and SECRET not in text and "Traceback" not in text
        lines = [line for line in text.splitlines() if "expected" in line]
        assert len(lines) == 1 or (lines and command == "verify"), text
        assert not said or str(saved) in text or WEIGHT in text
        assert sorted(tmp_path.iterdir()) == names
