# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's compiled dataset helpers on CPU ranks, in trees that do not ship them.

The tools are stand-ins: a script in place of make, and a module in place of pybind11.
"""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest
from helpers.ranks import ROOT

from megatron_muon.cpu_ranks.dataset_helpers import compile_where_missing_from
from megatron_muon.user_errors import UserError

RELEASED = Path(megatron.core.__file__).parents[1]
(COMPILED,) = RELEASED.glob("core/datasets/helpers_cpp*.so")

MAKE = """#!/bin/sh
echo "$@" > make.log
[ "$1" = -C ] || exit 2
case "$4" in LIBEXT=*) cp "{compiled}" "$2/helpers_cpp${{4#LIBEXT=}}" ;; *) exit 2 ;; esac
"""
BROKEN_MAKE = "#!/bin/sh\necho 'helpers.cpp:3: fatal error: no such header'\nexit 2\n"


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder of programs that is the whole PATH, and a pybind11 that says where it lies."""
    folder = tmp_path / "tools"
    (folder / "pybind11").mkdir(parents=True)
    (folder / "pybind11" / "__init__.py").touch()
    (folder / "pybind11" / "__main__.py").write_text("print('-I/of/pybind11')")
    for name, text in (("make", MAKE.format(compiled=COMPILED)), ("g++", "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for name in ("cp", "sh"):
        (folder / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def compile_helpers(tmp_path, monkeypatch):
    """What takes the place of ``compile_helpers`` of a package without compiled helpers."""
    package = tmp_path / "toy_datasets"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "utils.py").write_text("def compile_helpers():\n    raise SystemExit(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    utils = importlib.import_module("toy_datasets.utils")
    yield compile_where_missing_from(utils.compile_helpers)
    for name in ("toy_datasets.utils", "toy_datasets"):
        sys.modules.pop(name)


def test_helpers_are_compiled_once_for_this_interpreter(tools, compile_helpers, tmp_path):
    """The Makefile asks the python3 of PATH, which may be another Python."""
    compile_helpers()
    log = tmp_path / "make.log"
    folder = tmp_path / "toy_datasets"
    assert log.read_text().startswith(f"-C {folder} CPPFLAGS=-I/of/pybind11 LIBEXT=.cpython-3")
    assert (folder / COMPILED.name).is_file()
    log.unlink()
    compile_helpers()
    assert not log.exists(), "compiled what is there"


@pytest.mark.parametrize("missing", ["pybind11", "make", "g++"])
def test_missing_tool_is_named_with_what_to_install(tools, compile_helpers, missing):
    """The run ended with a module that cannot be found, and no word of what to do."""
    if missing == "pybind11":
        # The one that is installed is behind this one.
        (tools / missing / "__main__.py").write_text("raise ImportError")
    else:
        (tools / missing).unlink()
    with pytest.raises(UserError, match="Install what is missing") as caught:
        compile_helpers()
    assert f"got no {missing}. " in str(caught.value)
    assert str(caught.value).startswith("toy_datasets.helpers_cpp: expected it compiled in ")


def test_failed_make_is_shown(tools, compile_helpers):
    """What the compiler said is what helps."""
    (tools / "make").write_text(BROKEN_MAKE)
    with pytest.raises(UserError, match="got exit status 2 with\nhelpers.cpp:3: fatal error"):
        compile_helpers()


@pytest.mark.slow
def test_cpu_ranks_compile_the_helpers_of_a_checkout(tools, tmp_path):
    """A Megatron-LM checkout died with ``No module named 'megatron.core.datasets.helpers_cpp'``."""
    shutil.copytree(
        RELEASED, tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__", COMPILED.name)
    )
    code = (
        "from megatron_muon import cpu_ranks; cpu_ranks.enable(force=True)\n"
        "from megatron.core.datasets.utils import compile_helpers; compile_helpers()\n"
        "from megatron.core.datasets import helpers_cpp; print(helpers_cpp.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{tmp_path}/megatron/core/datasets/{COMPILED.name}" in done.stdout
