# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Each module imports only what its layer may, and in its package only files drawn above it.

The order inside of a package is the one that its docstring draws: lines ``name   what it is`` of
the literal block below a sentence such as "Files, each importing only those above it::".
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from helpers.commands import run_command
from helpers.ranks import ROOT, UNIT_TESTS

PACKAGE = ROOT / "megatron_muon"


class Layer(NamedTuple):
    """What a part of the package may import.

    Args:
        parts: Other parts of the package.
        barred: Packages of others that it may not import.
    """

    parts: frozenset[str] = frozenset()
    barred: frozenset[str] = frozenset()


TORCH, MEGATRON = "torch", "megatron"
LAYERS = {
    "user_errors": Layer(barred=frozenset({TORCH, MEGATRON})),
    "newton_schulz": Layer(barred=frozenset({MEGATRON})),
    "plan": Layer(frozenset({"newton_schulz"}), frozenset({TORCH, MEGATRON})),
    "report": Layer(
        frozenset({"user_errors", "newton_schulz", "plan"}), frozenset({TORCH, MEGATRON})
    ),
    "runtime": Layer(frozenset({"newton_schulz", "plan"}), frozenset({MEGATRON})),
    "rows": Layer(frozenset({"plan", "runtime"}), frozenset({MEGATRON})),
    "step": Layer(
        frozenset({"newton_schulz", "plan", "report", "runtime", "rows"}), frozenset({MEGATRON})
    ),
    "fsdp2": Layer(
        frozenset({"newton_schulz", "plan", "runtime", "rows", "step"}), frozenset({MEGATRON})
    ),
    "checkpoint": Layer(barred=frozenset({MEGATRON})),
    "mcore": Layer(
        frozenset({"user_errors", "newton_schulz", "plan", "runtime", "rows", "step", "checkpoint"})
    ),
    "launcher": Layer(frozenset({"user_errors", "mcore"})),
    # What it exports. All but mcore.enable and mcore.versions is imported at first use.
    "__init__": Layer(
        frozenset({"plan", "mcore"}),
        frozenset({TORCH, MEGATRON}),
    ),
    "__main__": Layer(frozenset({"launcher"})),
}
# The command of report/ has the name of what users ask for: ``python -m megatron_muon.plan``.
EXCEPTIONS = {("plan/__main__.py", "megatron_muon.report.command")}


def modules_of(package: Path) -> dict[str, Path]:
    """Return every module of a package by its dotted name below the package; "" for itself."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(package: Path, module: str, path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and absolute name of each import, also of those inside of functions.

    ``from a import b`` yields ``a.b`` where that is a module of the package, else ``a``.
    """
    known = modules_of(package)
    here = f"{package.name}.{module}".rstrip(".").split(".")
    if path.stem != "__init__":
        here.pop()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                is_module = name.removeprefix(f"{package.name}.") in known
                yield node.lineno, name if is_module else source


def drawn_order(path: Path) -> list[str]:
    """Return the names that a package's docstring draws, in their order; [] where it draws none."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    block = re.search(r"\bimport\w* only\b[^\n]*::\n\n((?: +.*\n?|\n)+)", docstring)
    if not block:
        return []
    indent = len(block[1]) - len(block[1].lstrip(" "))
    lines = [line[indent:] for line in block[1].splitlines() if line[:indent].isspace()]
    return [line.split()[0].rstrip("/") for line in lines if line[:1].strip()]


def layer_violations(package: Path, layers: Mapping[str, Layer]) -> list[str]:
    """List the imports that a layer may not have."""
    found = []
    for module, path in modules_of(package).items():
        part = module.partition(".")[0] or "__init__"
        if part not in layers:
            found.append(f"{module}: expected a part of {sorted(layers)}")
            continue
        for line, name in imports_of(package, module, path):
            first, _, rest = name.partition(".")
            target = rest.partition(".")[0] or "__init__"
            is_wrong = (
                target not in {part, *layers[part].parts}
                if first == package.name
                else first in layers[part].barred
            )
            if is_wrong and (str(path.relative_to(package)), name) not in EXCEPTIONS:
                found.append(f"{path.relative_to(package)}:{line}: {part} imports {name}")
    return found


def order_violations(package: Path, folder: str) -> list[str]:
    """List the imports between files of a folder that point up or sideways in its drawing."""
    init = package / folder / "__init__.py"
    order, inside = drawn_order(init), f"{package.name}.{folder.replace('/', '.')}"
    is_there = {path.stem for path in init.parent.glob("*.py")} - {"__init__", "__main__"}
    is_there |= {path.parent.name for path in init.parent.glob("*/__init__.py")}
    drawn = [name for name in order if name not in {*is_there, "__main__"}]
    found = [f"{folder}: draws {name}, which is not there" for name in drawn]
    found += [f"{folder}: does not draw {name}" for name in sorted(is_there - set(order))]
    rank = {name: number for number, name in enumerate(order)}
    for module, path in modules_of(package).items():
        below = f"{package.name}.{module}".removeprefix(f"{inside}.")
        file = below.partition(".")[0]
        if not f"{package.name}.{module}".startswith(f"{inside}.") or file == "__main__":
            continue
        for line, name in imports_of(package, module, path):
            if name != inside and not name.startswith(f"{inside}."):
                continue
            target = name.removeprefix(inside).strip(".").partition(".")[0]
            if target != file and rank.get(target, len(order)) >= rank.get(file, -1):
                found.append(f"{path.relative_to(package)}:{line}: {file} imports {name}")
    return found


def test_layers_import_only_what_they_may():
    """Plans know no torch, runtime no megatron, and only mcore knows all of them."""
    assert layer_violations(PACKAGE, LAYERS) == []


def test_no_test_imports_another():
    """What tests share is in helpers/: a test can be moved or dropped without a look at others."""
    found = [
        f"{path.relative_to(UNIT_TESTS)}:{line}: {name}"
        for module, path in modules_of(UNIT_TESTS).items()
        for line, name in imports_of(UNIT_TESTS, module, path)
        if any(part.startswith("test_") for part in name.split("."))
    ]
    assert found == []


def test_files_import_only_files_drawn_above_them():
    """The docstring of each package draws every file, and the order holds."""
    drawn = [path.parent for path in PACKAGE.rglob("__init__.py") if drawn_order(path)]
    folders = {path.relative_to(PACKAGE).as_posix() for path in drawn} - {"."}
    assert folders >= {"newton_schulz", "plan", "runtime", "checkpoint", "mcore"}
    assert [x for folder in sorted(folders) for x in order_violations(PACKAGE, folder)] == []


def test_package_draws_its_layers_in_their_order():
    """What the package's docstring draws are the layers, each below what it imports."""
    order = drawn_order(PACKAGE / "__init__.py")
    assert {*order, "__init__", "__main__"} == LAYERS.keys()
    for number, name in enumerate(order):
        assert LAYERS[name].parts <= set(order[:number]), name


def test_import_of_fsdp2_does_not_load_torchs_compiler():
    """Lion did, whose update is compiled: 5 s and 89 MB a process for all who never use it."""
    modules = "[name for name in sys.modules if name.startswith('torch._inductor')]"
    code = f"import sys, megatron_muon.fsdp2; print({modules})"
    run = run_command(sys.executable, "-c", code)
    assert (run.returncode, run.stdout.strip()) == (0, "[]"), run.stderr
