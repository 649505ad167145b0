# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Each module imports only what its layer may, and in its package only files drawn above it.

The order inside of a package is the one that its docstring draws: lines ``name   what it is`` of
the literal block below a sentence such as "Files, each importing only those above it::".
"""

import ast
import re
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
    "report": ("user_errors newton_schulz plan", ""),
    "runtime": ("newton_schulz plan", "torch"),
    "rows": ("plan runtime", "torch"),
    "step": ("newton_schulz plan report runtime rows", "torch"),
    "fsdp2": ("newton_schulz plan report runtime rows step", "torch"),
    "checkpoint": ("", "torch"),
    "mcore": ("user_errors newton_schulz plan runtime rows step checkpoint", "torch megatron"),
    "bridge": ("mcore", "torch megatron"),
    "check": (
        "newton_schulz plan report runtime rows step fsdp2 mcore",
        "torch",
    ),
    "launcher": ("user_errors mcore", "torch megatron"),
    # What it exports. All but mcore.enable and mcore.versions is imported at first use.
    "__init__": ("plan mcore", ""),
    "__main__": ("launcher", ""),
}
_REPORTS = ("model_shape", "rank_report", "simulation", "summary", "timeline")
# A command has the name of what users ask for, and may import anything.
EXCEPTIONS = {
    ("plan/__main__.py", f"megatron_muon.{name}")
    for name in ("user_errors", "fsdp2.groups", "fsdp2.preview", *(f"report.{n}" for n in _REPORTS))
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
    """Plans know no torch, runtime no megatron, and only mcore knows all of them."""
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    packages, others = (words.split() for words in LAYERS[own])
    for name in imports_of(path):
        first, _, rest = name.partition(".")
        if first == PACKAGE.name and (str(path.relative_to(PACKAGE)), name) not in EXCEPTIONS:
            assert (rest.partition(".")[0] or "__init__") in {own, *packages}, name
        elif first in ("torch", "megatron"):
            assert first in others, name


FOLDERS = [folder for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_files_import_only_files_drawn_above_them(folder):
    """The docstring of each package draws every file, and the order holds."""
    order = drawn_order(folder)
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    assert set(order) - {"__main__"} == files
    inside = f"{PACKAGE.name}.{folder.name}."
    for number, file in enumerate(order):
        for name in imports_of(folder / f"{file}.py"):
            if name.startswith(inside):
                assert name.removeprefix(inside) in order[:number], f"{file} imports {name}"


def test_package_draws_its_layers_in_their_order():
    """What the package's docstring draws are the layers, each below what it imports."""
    order = drawn_order(PACKAGE)
    assert {*order, "__init__", "__main__"} == LAYERS.keys()
    for number, name in enumerate(order):
        assert set(LAYERS[name][0].split()) <= set(order[:number]), name
