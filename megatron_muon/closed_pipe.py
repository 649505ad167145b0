# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Exit quietly if the reader of standard output closes the pipe, as ``... | head`` does."""

import os
import sys
from collections.abc import Callable


def run_until_closed_pipe(main: Callable[[], int]) -> int:
    """Run a command that writes to standard output.

    Args:
        main: The command; must not catch BrokenPipeError.

    Returns:
        Its exit status; 1 if the pipe was closed.

    Source: the note on SIGPIPE in the documentation of Python's ``signal`` module.
    """
    try:
        try:
            return main()
        finally:
            # So that buffered output fails here; argparse raises SystemExit.
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
