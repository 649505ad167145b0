# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's tracker, the file that names the newest checkpoint, is never half-written."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

from megatron_muon.checkpoint.folders import TRACKER


def open_in_one_step(
    path: str | os.PathLike[str] | int, mode: str = "r", *args: object, **options: object
) -> IO[Any] | AbstractContextManager[IO[str]]:
    """Open any file as ``open`` does; a tracker to write takes the old one's place when closed.

    Otherwise an interruption between opening and writing would leave an empty tracker.
    """
    if isinstance(path, str | os.PathLike) and mode == "w" and Path(path).name == TRACKER:
        return _replaced(Path(path))
    return open(path, mode, *args, **options)  # type: ignore[call-overload]


@contextmanager
def _replaced(path: Path) -> Iterator[IO[str]]:
    """Open a file that takes the place of another when it is closed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
