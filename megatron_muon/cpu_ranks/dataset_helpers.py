# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's dataset helpers in C++: the wheel ships them compiled, a source tree does not."""

import functools
import importlib.util
import inspect
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from megatron_muon.user_errors import UserError

_INSTALL = (
    "Install what is missing (pip install pybind11; make and g++ with the system's package "
    "manager), or use megatron-core's wheel, which ships it."
)


def compile_where_missing_from(original: Callable[[], None]) -> Callable[[], None]:
    """Return ``compile_helpers`` that only calls make if the helpers cannot be imported.

    The original always does, and the wheel has no Makefile. Megatron calls it on rank 0, and the
    other ranks wait (``megatron.training.initialize``).
    """
    module = f"{original.__module__.rpartition('.')[0]}.helpers_cpp"

    @functools.wraps(original)
    def compile_helpers() -> None:
        """Compile the helpers if they cannot be imported."""
        if importlib.util.find_spec(module) is None:
            _compile(module, Path(inspect.getfile(original)).parent)

    return compile_helpers


def _compile(module: str, folder: Path) -> None:
    """Run make in a folder, for this interpreter.

    The Makefile asks the ``python3`` and the ``python3-config`` of PATH, which may belong to
    another Python. Variables on make's command line override its own.

    Raises:
        UserError: Something needed for it is missing, or it failed.
    """
    includes = subprocess.run(
        [sys.executable, "-m", "pybind11", "--includes"], capture_output=True, text=True
    )
    # The default of make is g++. CXX may also hold a wrapper and options ("ccache g++ -m64").
    compiler = (shlex.split(os.environ.get("CXX", "")) or ["g++"])[0]
    missing = ["pybind11"] if includes.returncode else []
    missing += [program for program in ("make", compiler) if shutil.which(program) is None]
    if missing:
        raise UserError(
            f"{module}: expected it compiled in {folder}, or pybind11, make and {compiler} to "
            f"compile it, got no {' and no '.join(missing)}. {_INSTALL}"
        )
    made = subprocess.run(
        ["make", "-C", str(folder)]
        + [f"CPPFLAGS={includes.stdout.strip()}"]
        + [f"LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    importlib.invalidate_caches()
    if made.returncode or importlib.util.find_spec(module) is None:
        raise UserError(
            f"{module}: expected make to compile it in {folder}, got exit status "
            f"{made.returncode} with\n{made.stdout[-2000:].rstrip()}\n{_INSTALL}"
        )
