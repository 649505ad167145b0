# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The command: chooses pieces, runs them, and reports after each."""

import argparse
import datetime
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from evidence import report
from evidence.machine import ROOT, Machine, find_machine
from evidence.nodes import Line, Place, connect, without_torchrun
from evidence.pieces import JSON, PORT, Piece, list_pieces, torchrun_of
from evidence.processes import end_processes, run_limited
from evidence.records import (
    ENDED,
    FAILED,
    NOT_TRIED,
    PASSED,
    Evidence,
    Record,
    locked,
    read_data,
    resume,
)

# For another node to end its processes, and to say so.
_OTHER_NODES_S = 60.0


class Runner:
    """Runs pieces on this node, and tells other nodes.

    Args:
        folder: For logs, figures and the report.
        place: Of this node.
        lines: To the other nodes, or to node 0.
    """

    def __init__(self, folder: Path, place: Place, lines: Sequence[Line]) -> None:
        self.folder, self._place, self._lines = folder, place, lines
        self.mark = f"{folder} node {place.rank}"
        self._has_lost_a_node = False
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._variables = {
            # As docs/gpus.md advises.
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "OMP_NUM_THREADS": "1",
            **without_torchrun(),
            "PYTHONPATH": os.pathsep.join(paths),
        }

    def run(self, piece: Piece, number: int, seconds: float) -> Record:
        """Run a piece for some time at most, and return its result."""
        others = self._lines if piece.spans_nodes else ()
        if others and self._has_lost_a_node:
            return Record(NOT_TRIED, "another node is gone")
        for line in others:
            line.send({"piece": piece.name, "seconds": seconds})
        record = self.run_here(piece, number, seconds)
        wait_s = seconds - record.seconds + _OTHER_NODES_S
        if any(line.receive(wait_s) is None for line in others):
            self._has_lost_a_node = True
        return record

    def run_here(self, piece: Piece, number: int, seconds: float) -> Record:
        """Run the processes of this node."""
        file = self.folder / f"{piece.name}.json"
        if self._place.rank == 0:
            file.unlink(missing_ok=True)
        # A port that closes is not free at once.
        values = {JSON: str(file), PORT: str(self._place.port + 1 + number)}
        command = [values.get(word, word) for word in piece.command]
        suffix = f".node{self._place.rank}" if self._place.rank else ""
        log = self.folder / f"{piece.name}{suffix}.log"
        began_at = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
        ended = run_limited(command, log, seconds, self.mark, self._variables)
        verdict, detail = PASSED, ""
        if ended.exit_code is None:
            verdict, detail = ENDED, f"after {seconds:.0f} s"
        elif ended.exit_code:
            verdict, detail = FAILED, f"exit status {ended.exit_code}"
        data = read_data(file)
        return Record(verdict, detail, piece.shown_command, ended.seconds, began_at, data)

    def follow(self, pieces: Sequence[Piece]) -> None:
        """Run what node 0 names, until it ends."""
        (line,) = self._lines
        by_name = {piece.name: (number, piece) for number, piece in enumerate(pieces)}
        while (word := line.receive(None)) is not None:
            number, piece = by_name[word["piece"]]
            print(f"{piece.name}, for node 0", flush=True)
            self.run_here(piece, number, word["seconds"])
            line.send({"ended": piece.name})


def run_all(
    runner: Runner,
    evidence: Evidence,
    pieces: Sequence[Piece],
    minutes: float,
    only: Sequence[str] = (),
) -> bool:
    """Run what has no result yet, as far as time allows, and report after each piece.

    Args:
        runner: Of node 0.
        evidence: Results of earlier calls.
        pieces: In the order of their value.
        minutes: For this call.
        only: Names of pieces to run, again if they have a result.

    Returns:
        Whether nothing failed, in this call and before.
    """
    end = time.monotonic() + 60 * minutes
    # In the order of pieces, whatever ran first.
    earlier, evidence.records = evidence.records, {}
    for piece in pieces:
        evidence.records[piece.name] = earlier.get(piece.name) or Record(
            NOT_TRIED, "has not run yet"
        )
    for number, piece in enumerate(pieces):
        record, left = evidence.records[piece.name], end - time.monotonic()
        if only and piece.name not in only:
            continue
        if piece.missing:
            record = Record(NOT_TRIED, piece.missing)
        elif is_done(record, piece) and not only:
            print(f"{piece.name}: {record.verdict} before", flush=True)
            continue
        elif left < 60 * piece.minutes:
            record = Record(NOT_TRIED, f"no time: {piece.minutes:g} min expected")
        else:
            about = f"about {piece.minutes:g} min, {piece.limit_s / 60:g} at most"
            print(f"{piece.name}: {about} ...", end=" ", flush=True)
            record = runner.run(piece, number, min(piece.limit_s, left))
            if record.verdict == ENDED and left < piece.limit_s:
                record = Record(NOT_TRIED, f"no time: ended after {record.seconds:.0f} s")
            print(f"{record.verdict} {record.detail} {record.seconds:.0f} s", flush=True)
        evidence.records[piece.name] = record
        report.write(evidence, runner.folder)
    return report.write(evidence, runner.folder)


def is_done(record: Record, piece: Piece) -> bool:
    """Return whether a piece has a result of the same command."""
    return record.verdict != NOT_TRIED and record.command == piece.shown_command


def main(
    arguments: Sequence[str] | None = None,
    pieces_of: Callable[[Machine, tuple[str, ...], Path | None], list[Piece]] = list_pieces,
) -> int:
    """Run pieces and report; return 1 if a piece or a promise of this package fails.

    Args:
        arguments: Of the command line.
        pieces_of: Lists the pieces of a machine.
    """
    parser = argparse.ArgumentParser(prog="bash scripts/evidence.sh", description=__doc__)
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="time for this call")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: by card and commit")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="run these, again")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="packages to compare with")
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["tables"]:
        print(report.tables_of_folders([Path(word) for word in words[1:]]))
        return 0
    options = parser.parse_args(words)
    # An error that runs the clean-up of a piece.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        place = Place.of(os.environ)
        machine = find_machine(place.nodes)
        torchrun = torchrun_of(machine, place.rank, f"{place.address}:{PORT}")
        pieces = pieces_of(machine, torchrun, options.peers and options.peers.resolve())
        unknown = set(options.only) - {piece.name for piece in pieces}
        if unknown:
            names = ", ".join(piece.name for piece in pieces)
            parser.error(f"--only: expected names of {names}; got {', '.join(sorted(unknown))}")
        # Pieces run in the root of the repository.
        folder = (options.out or ROOT / "evidence_output" / machine.folder_name).resolve()
        with locked(folder, place.rank):
            runner = Runner(folder, place, connect(place, machine.identity))
            # Of a call that was killed.
            end_processes(runner.mark)
            if place.rank > 0:
                runner.follow(pieces)
                return 0
            evidence = resume(folder, machine)
            evidence.calls.append(f"bash scripts/evidence.sh {shlex.join(words)}".strip())
            print(f"{machine.title}, results in {folder}", flush=True)
            is_well = run_all(runner, evidence, pieces, options.minutes, options.only)
            print(f"report: {folder / 'report.md'}")
            return int(not is_well)
    except KeyboardInterrupt:
        print("evidence: interrupted; the same command goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    except (RuntimeError, ValueError) as error:
        print(f"evidence: {error}", file=sys.stderr)
        return 1
