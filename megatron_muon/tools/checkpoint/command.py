# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Verify or convert a checkpoint: ``python -m megatron_muon.checkpoint COMMAND DIR``."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_muon.mcore.checkpoint_folders import (
    TRACKER,
    CheckpointError,
    expecting,
    find_checkpoint,
    iteration_folder,
)
from megatron_muon.mcore.checkpoint_reading import read_checkpoint
from megatron_muon.tools.checkpoint.conversion import from_ddp, to_ddp
from megatron_muon.tools.checkpoint.reading import find_misfits, find_problems
from megatron_muon.tools.checkpoint.writing import write

# Formats to convert to, and from.
_SOURCES = {"fsdp_dtensor": "torch_dist", "torch_dist": "fsdp_dtensor"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0; 1 when the checkpoint cannot be read or is not sound; 2 for a wrong command line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron_muon.checkpoint",
        description="Verify or convert a checkpoint, without GPU or process group. Nothing in it "
        "is executed.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("verify", "read every byte and compare checksums"),
        ("convert", "write it anew for Megatron-FSDP, or for DDP"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("dir", type=Path, help="a --save folder, or one checkpoint in it")
        command.add_argument("--ckpt-step", type=int, help="iteration; without it, the tracker's")
    # The last one.
    command.add_argument("target", type=Path, help="a --save folder to write; must not exist")
    command.add_argument("--to", choices=_SOURCES, required=True, help="format to write")
    options = parser.parse_args(arguments)
    run = _convert if options.command == "convert" else _verify
    try:
        with expecting(f"to {options.command} it", options.dir):
            sys.stdout.write(_printable(run(options)))
    except CheckpointError as error:
        sys.stderr.writelines(map(_printable, error.args))
        return 1
    return 0


def _printable(line: str) -> str:
    # Keys may contain control sequences.
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line) + "\n"


def _verify(options: argparse.Namespace) -> str:
    checkpoint = read_checkpoint(find_checkpoint(options.dir, options.ckpt_step))
    if problems := find_problems(checkpoint):
        raise CheckpointError(*problems)
    return (
        f"{checkpoint.folder}: sound; {len(checkpoint.tensors)} tensors, "
        f"{len(checkpoint.objects)} objects"
    )


def _convert(options: argparse.Namespace) -> str:
    """Convert a checkpoint; nothing is left of a conversion that fails."""
    path = find_checkpoint(options.dir, options.ckpt_step, _SOURCES[options.to])
    before = _stamps(path)
    with replacing(options.target) as folder:
        checkpoint = read_checkpoint(path)
        if problems := find_misfits(checkpoint):
            raise CheckpointError(problems[0])
        convert = from_ddp if options.to == "fsdp_dtensor" else to_ddp
        values, iteration = convert(checkpoint)
        inner = iteration_folder(folder, iteration)
        write(values, inner)
        if options.to == "torch_dist":
            text = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
            (inner / "metadata.json").write_text(text)
        (folder / TRACKER).write_text(str(iteration))
        if _stamps(path) != before:
            raise CheckpointError(
                f"{path}: expected files that do not change while they are read, got new ones: "
                "another process saves there. Wait until it has ended."
            )
    return (
        f"{path}: iteration {iteration} converted; load it with --no-load-rng, as random states "
        "are left out"
    )


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path of a folder beside ``target``, renamed to it unless there is an error.

    Raises:
        CheckpointError: ``target`` exists.
        FileExistsError: It has come to exist meanwhile; it is not replaced.
    """
    if os.path.lexists(target):
        raise CheckpointError(
            f"{target}: expected a path to write to, got one that exists. Choose another one."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.converting-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as folder:
        temporary = Path(folder, target.name)
        yield temporary
        # A rename alone would replace an empty folder that has appeared meanwhile.
        target.mkdir()
        temporary.rename(target)


def _stamps(folder: Path) -> dict[Path, int]:
    """Return the time of change of every file."""
    return {path: path.stat().st_mtime_ns for path in filter(Path.is_file, folder.iterdir())}
