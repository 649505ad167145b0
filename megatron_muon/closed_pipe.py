# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""End quietly where the reader of standard output went away, as ``... | head`` does."""

import os
import sys
from collections.abc import Callable


def run_until_closed_pipe(main: Callable[[], int]) -> int:
    """Run a command that writes to standard output.

    Args:
        main: The command; lets BrokenPipeError pass.

    Returns:
        Its exit status; 1 where the reader went away.

    Source: the note on SIGPIPE in the documentation of Python's ``signal`` module.
    """
    try:
        try:
            return main()
        finally:
            # What is buffered, so that it fails here; argparse ends with SystemExit.
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
