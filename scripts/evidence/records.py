# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Results of pieces in a folder, from which a later call goes on."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evidence.machine import Machine

PASSED, FAILED, ENDED, NOT_TRIED = "passed", "failed", "ended", "not tried"
_FILE = "evidence.json"


@dataclass(frozen=True)
class Record:
    """Result of a piece.

    Args:
        verdict: ``PASSED``, ``FAILED`` by its exit status, ``ENDED`` by the time limit, or
            ``NOT_TRIED``.
        detail: Exit status, limit, or why it was not tried.
        command: As a user types it.
        seconds: Wall time.
        began_at: Date and time, UTC.
        data: JSON that the command wrote; None if it wrote none.
    """

    verdict: str
    detail: str = ""
    command: str = ""
    seconds: float = 0.0
    began_at: str = ""
    data: Any = None


@dataclass
class Evidence:
    """All that is known of a run.

    Args:
        machine: Hardware and software.
        records: Results by name of the piece.
        calls: Commands that made them.
    """

    machine: Machine
    records: dict[str, Record]
    calls: list[str]

    @classmethod
    def load(cls, folder: Path) -> "Evidence":
        """Read a folder.

        Raises:
            ValueError: It has no results.
        """
        try:
            data = json.loads((folder / _FILE).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{folder}: expected a folder of scripts/evidence.sh, with {_FILE}, got {error}"
            ) from error
        records = {name: Record(**record) for name, record in data["records"].items()}
        return cls(Machine(**data["machine"]), records, data["calls"])

    def store(self, folder: Path, promises: Mapping[str, Any]) -> None:
        """Write all of it and the verdicts of promises, so that a kill leaves a whole file."""
        data = {
            "machine": asdict(self.machine),
            "calls": self.calls,
            "promises": promises,
            "records": {name: asdict(record) for name, record in self.records.items()},
        }
        partial = folder / f"{_FILE}.partial"
        partial.write_text(json.dumps(data, indent=1) + "\n")
        os.replace(partial, folder / _FILE)


def resume(folder: Path, machine: Machine) -> Evidence:
    """Return the results of earlier calls with the same commit, versions and card.

    Results of another commit or card are kept in a file beside, and not used.
    """
    if not (folder / _FILE).exists():
        return Evidence(machine, {}, [])
    earlier = Evidence.load(folder)
    if earlier.machine == machine:
        return earlier
    os.replace(folder / _FILE, folder / f"evidence_{earlier.machine.identity}.json")
    return Evidence(machine, {}, [])


@contextmanager
def locked(folder: Path, node_rank: int) -> Iterator[None]:
    """Keep other calls of a node out of a folder.

    Raises:
        RuntimeError: Another call runs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".lock{node_rank or ''}").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RuntimeError(
                f"{folder}: expected no other call in this folder, got one that runs. Wait for it,"
                " or choose another folder by --out"
            ) from error
        yield


def read_data(file: Path) -> Any:
    """Return the JSON that a command wrote; None if there is none, or a part of it alone."""
    try:
        return json.loads(file.read_text())
    except (OSError, json.JSONDecodeError):
        return None
