# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Each module imports only what its layer may, and in its package only files drawn above it.

The order inside of a package is the one that its docstring draws: lines ``name   what it is`` of
the literal block below a sentence such as "Files, each importing only those above it::".
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.ranks import ROOT

PACKAGE = ROOT / "megatron_muon"
# Other packages of megatron_muon that a package may import, and whether torch and megatron too.
LAYERS: dict[str, tuple[str, str]] = {
    "user_errors": ("", ""),
    "newton_schulz": ("", "torch"),
    "plan": ("newton_schulz", ""),
    "runtime": ("newton_schulz plan", "torch"),
    "rows": ("plan runtime", "torch"),
    "step": ("newton_schulz plan runtime rows", "torch"),
    "fsdp2": ("newton_schulz plan runtime rows step", "torch"),
    "mcore": ("user_errors newton_schulz plan runtime rows step", "torch megatron"),
    "bridge": ("mcore", "torch megatron"),
    "launcher": ("user_errors mcore", "torch megatron"),
    # Commands, which no training process imports.
    "tools": (
        "user_errors newton_schulz plan runtime rows step fsdp2 mcore",
        "torch megatron",
    ),
    "check": ("tools", ""),
    "checkpoint": ("tools", ""),
    # Names that are imported at first use.
    "__init__": ("plan mcore", ""),
    "__main__": ("launcher", ""),
}
# The command has the name of the package whose plans it reports; the package has the version.
EXCEPTIONS = {
    ("plan/__main__.py", "megatron_muon.tools.plan.command"),
    ("step/dependencies.py", "megatron_muon"),
}
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
}


def imports_of(path: Path) -> Iterator[str]:
    """Yield the absolute name of each import, also of those inside of functions.

    ``from a import b`` yields ``a.b`` where that is a module of the package, else ``a``.
    """
    above = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = above[: len(above) - node.level + 1] if node.level else ()
            source = ".".join([*parents, *filter(None, [node.module])])
            names = (f"{source}.{alias.name}" for alias in node.names)
            yield from (name if name in MODULES else source for name in names)


def drawn_order(folder: Path) -> list[str]:
    """Return the names that a package's docstring draws, in their order."""
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    block = re.search(r"\bimport\w* only\b[^\n]*::\n\n((?: +.*\n?|\n)+)", docstring)
    assert block, f"{folder.name}: expected 'Files, each importing only those above it::'"
    indent = len(block[1]) - len(block[1].lstrip(" "))
    return re.findall(rf"^ {{{indent}}}(\w+)", block[1], re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_layers_import_only_what_they_may(path):
    """Each module imports only layers, torch and megatron that its layer may import."""
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    packages, others = (words.split() for words in LAYERS[own])
    for name in imports_of(path):
        first, _, rest = name.partition(".")
        if first == PACKAGE.name and (str(path.relative_to(PACKAGE)), name) not in EXCEPTIONS:
            assert (rest.partition(".")[0] or "__init__") in {own, *packages}, name
        elif first in ("torch", "megatron"):
            assert first in others, name


FOLDERS = [
    path.parent for path in PACKAGE.glob("*/**/__init__.py") if path.parent != PACKAGE / "tools"
]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(PACKAGE)))
def test_files_import_only_files_drawn_above_them(folder):
    """The docstring of each package draws its files in an order that imports keep."""
    order = drawn_order(folder)
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    assert set(order) - {"__main__"} == files
    inside = ".".join(folder.relative_to(ROOT).parts) + "."
    for number, file in enumerate(order):
        for name in imports_of(folder / f"{file}.py"):
            if name.startswith(inside):
                assert name.removeprefix(inside) in order[:number], f"{file} imports {name}"


def test_package_draws_its_layers_in_their_order():
    """The package's docstring draws the layers, each below what it imports."""
    order = drawn_order(PACKAGE)
    assert {*order, "__init__", "__main__"} == LAYERS.keys()
    for number, name in enumerate(order):
        assert set(LAYERS[name][0].split()) <= set(order[:number]), name


def test_fsdp2_imports_no_code_of_megatron_and_no_tool():
    """Importing megatron_muon.fsdp2 loads the core alone."""
    code = "import sys, megatron_muon.fsdp2; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    assert "megatron_muon.fsdp2.muon" in loaded
    assert not [
        name for name in loaded if re.match(r"megatron\b|megatron_muon\.(mcore|tools)", name)
    ]
