# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Verify or convert a checkpoint: ``python -m megatron_muon.checkpoint COMMAND DIR``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.checkpoint.convert import FORMATS, convert
from megatron_muon.checkpoint.folders import (
    CheckpointError,
    escaped,
    expecting,
    find_checkpoint,
)
from megatron_muon.checkpoint.storage import read_checkpoint
from megatron_muon.checkpoint.verify import find_problems


def _parser() -> argparse.ArgumentParser:
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
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument(
            "dir", type=Path, help="a --save folder, or that of one checkpoint in it"
        )
        command.add_argument("--ckpt-step", type=int, help="iteration; without it, the tracker's")
    # The last one.
    command.add_argument("target", type=Path, help="where to write; must not exist")
    command.add_argument("--from", dest="source", choices=FORMATS, required=True)
    command.add_argument("--to", dest="destination", choices=FORMATS, required=True)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run a command.

    Returns:
        0; 1 when the checkpoint cannot be read or is not sound; 2 for a wrong command line.
    """
    arguments = _parser().parse_args(argv)
    try:
        with expecting(f"to {arguments.command} it", arguments.dir):
            sys.stdout.write(escaped(_run(arguments)) + "\n")
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _run(arguments: argparse.Namespace) -> str:
    """Run a command, and return the line that it prints."""
    if arguments.command == "convert":
        return convert(
            arguments.dir,
            arguments.target,
            arguments.source,
            arguments.destination,
            iteration=arguments.ckpt_step,
        )
    checkpoint = read_checkpoint(find_checkpoint(arguments.dir, arguments.ckpt_step))
    if problems := list(find_problems(checkpoint)):
        raise CheckpointError(*problems)
    files = checkpoint.items_by_file()
    num_bytes = sum(item.length for items in files.values() for item in items)
    return (
        f"{checkpoint.folder}: sound; {len(checkpoint.tensors)} tensors, "
        f"{len(checkpoint.objects)} objects, {num_bytes:,} bytes in {len(files)} files"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
