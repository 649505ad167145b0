# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Patches: verified as a whole, applied once, taken back."""

import ast
import dataclasses
import importlib
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import megatron.core
import pytest
from helpers.ranks import ROOT, run_ranks

from megatron_muon.mcore import enable as enabling
from megatron_muon.mcore import patching, versions
from megatron_muon.mcore.patching import Patch, Patches
from megatron_muon.mcore.versions import IncompatibleMegatronError

GOOD_VERSIONS = {"megatron-core": "0.19.2", "emerging-optimizers": "0.3.0", "torch": "2.15.0"}


def scale(x: int, factor: int = 2) -> int:
    """Stand for a function of megatron."""
    scaled = x * factor
    return scaled


@pytest.fixture
def stub(monkeypatch):
    """A module to patch."""
    module = types.ModuleType("stub_megatron")
    module.scale = scale
    module.Holder = type("Holder", (), {"scale": scale})
    monkeypatch.setitem(sys.modules, "stub_megatron", module)
    return module


def _patch(name: str, **settings: object) -> Patch:
    def replacement(original, *args, **kwargs):
        return original(*args, **kwargs) + 1

    return Patch(f"stub_megatron:{name}", "add one", replacement, **settings)


def test_apply_and_revert_restore_the_original(stub):
    """A replacement runs, keeps the original, and is taken back, in classes too."""
    patches = Patches()
    patches.apply([_patch("scale"), _patch("Holder.scale")])
    assert stub.scale(3) == 7 and stub.scale.__wrapped__ is scale
    assert stub.Holder.scale(3) == 7
    patches.revert()
    assert stub.scale is scale and stub.Holder.scale is scale


def test_importers_get_the_replacement(stub, monkeypatch):
    """Modules that imported a function by name get its replacement too."""
    monkeypatch.setattr(scale, "__module__", "stub_megatron")
    importer = types.ModuleType("megatron.importer")
    importer.scale, importer.times, importer.other = scale, scale, len
    monkeypatch.setitem(sys.modules, "megatron.importer", importer)
    patches = Patches()
    patches.apply([_patch("scale")])
    assert importer.scale is importer.times is stub.scale and importer.other is len
    late = types.ModuleType("megatron.late")
    late.scale = stub.scale
    monkeypatch.setitem(sys.modules, "megatron.late", late)
    # One that names an importer changes it alone.
    own = Patches()
    own.apply([dataclasses.replace(_patch("scale"), symbol="megatron.late:scale")])
    assert late.scale(3) == 8 and importer.scale(3) == 7
    own.revert()
    patches.revert()
    assert importer.scale is importer.times is stub.scale is scale


def test_patch_waits_for_the_import_of_its_module(stub, monkeypatch):
    """A patch of a module that is imported later is verified and applied then."""
    name = "megatron.bridge.stub"
    waiting = dataclasses.replace(_patch("scale"), symbol=f"{name}:scale")
    patches = Patches([_patch("scale"), waiting])
    patches.update()
    assert stub.scale(3) == 7 and waiting not in patches.applied
    module = types.ModuleType(name)
    module.scale = scale
    monkeypatch.setitem(sys.modules, name, module)
    with mock.patch("pkgutil.resolve_name", lambda symbol: scale if ":" in symbol else module):
        patches.update()
        patches.update()
    assert module.scale(3) == 7 and waiting in patches.applied
    patches.revert()
    wrong = _patch("scale", source_lines=("scaled = x + factor",))
    with pytest.raises(IncompatibleMegatronError, match="scaled = x . factor"):
        Patches([wrong]).update()
    assert stub.scale is scale


def test_replacement_for_the_time_of_a_call_ends_with_it(stub):
    """A replacement for the time of a call is listed, and not applied with the others."""
    patch = _patch("scale", applies_to="call")
    assert not patch.is_needed()
    with patching.replaced(patch):
        assert stub.scale(3) == 7
    assert stub.scale is scale


def test_static_method_stays_one(stub):
    """A patched static method stays one, as Megatron calls it through instances."""
    stub.Holder.scale = staticmethod(scale)
    patches = Patches([_patch("Holder.scale")])
    patches.update()
    assert stub.Holder().scale(3) == 7
    patches.revert()
    assert stub.Holder().scale(3) == 6 and stub.Holder.scale is scale


@pytest.mark.parametrize(
    ("name", "relied_on", "message"),
    [
        ("gone", {}, "stub_megatron:gone: expected it to exist, found none"),
        (
            *("scale", {"source_lines": ("scaled = x + factor",)}),
            "expected the source line 'scaled = x + factor', found none",
        ),
        ("scale", {"source_lines": ("scaled = x * factor",)}, ""),
    ],
)
def test_mismatch_names_symbol_expected_and_found(stub, name, relied_on, message):
    """A missing symbol, or another source line, is named as expected and found."""
    problems = _patch(name, **relied_on).problems()
    assert len(problems) == bool(message) and message in "".join(problems)


class Later:
    """A class that needs no change."""

    def scale(self):
        """Is what an older release has, too."""

    def own_norm(self):
        """Is new."""


def test_change_that_a_release_has_made_is_not_made_again(stub):
    """A repair is left out where the source of the class shows that upstream has made it."""
    stub.Later = Later
    repaired = dataclasses.replace(_patch("Later.scale"), repaired_text="def own_norm(")
    assert repaired.is_repaired() and not _patch("Later.scale").is_repaired()
    assert not dataclasses.replace(repaired, repaired_text="def other_norm(").is_repaired()
    gone = dataclasses.replace(repaired, symbol="stub_megatron:Gone.scale")
    assert not gone.is_repaired()


def test_revert_leaves_what_somebody_wrapped(stub):
    """Nothing is restored under a later wrapper, which would undo it."""
    patches = Patches()
    patches.apply([_patch("Holder.scale"), _patch("scale")])
    stub.scale = later = lambda x: 0
    patches.revert()
    assert stub.scale is later and stub.Holder.scale is scale


@pytest.mark.parametrize(
    ("package", "found"),
    [
        ("megatron-core", "0.18.2"),
        ("megatron-core", "0.20.1"),
        ("megatron-core", None),
        ("emerging-optimizers", "0.2.0"),
        ("emerging-optimizers", None),
        ("torch", "2.8.0"),
        ("torch", "2.8.0+cu130"),
        ("torch", None),
    ],
)
def test_enable_refuses_a_misfit_of_any_package(monkeypatch, package, found):
    """The error names the installed version, the tested ranges and the remedy."""
    monkeypatch.setattr(versions, "installed_versions", lambda: {**GOOD_VERSIONS, package: found})
    monkeypatch.setattr(enabling.PATCHED, "applied", [])
    with pytest.raises(IncompatibleMegatronError) as caught:
        enabling.enable()
    (problem,) = caught.value.problems
    assert problem.startswith(f"{package}: expected a version ")
    assert f"found {found or 'none installed'}" in problem
    assert not enabling.is_enabled()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"megatron-core": "0.19.2+abc1234", "torch": "2.11.0+cu130"},
        {"megatron-core": "0.19.3"},
        # Megatron-LM's main has this version at every commit.
        {"megatron-core": "0.20.0"},
        {"megatron-core": "0.20.0rc1"},
        {"emerging-optimizers": "0.6.0"},
        {"torch": "2.11.0a0+eb65b36914.nv26.02"},
        {"torch": "3.0.0"},
    ],
    ids=str,
)
def test_versions_in_the_ranges_are_accepted(changes):
    """A patch release, or a container's build, is tried: its symbols are verified all the same."""
    assert versions.version_problems({**GOOD_VERSIONS, **changes}) == []


IMPORT_AND_ENABLE = """
import sys, megatron_muon
assert not {"torch", "megatron"} & sys.modules.keys() and not megatron_muon.is_enabled()
megatron_muon.enable()
"""


def test_version_is_read_from_the_package_that_would_be_imported(tmp_path):
    """The version is read from the first megatron on the path, and nothing is imported."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise RuntimeError('imported')")
    (core / "package_info.py").write_text("__version__ = '0.18.2+abc1234'")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_ENABLE],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
    )
    assert "megatron-core: expected a version <=0.20.0,>=0.19, found 0.18.2." in done.stderr


def _enable_and_disable() -> None:
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import optimizer as module
    from megatron.training import arguments, checkpointing

    def targets() -> tuple[object, ...]:
        return (arguments.validate_args, optimizer._get_megatron_emerging_optimizer)

    def refusal() -> str:
        with pytest.raises(IncompatibleMegatronError) as caught:
            enabling.enable()
        assert targets() == originals and not enabling.is_enabled()
        return caught.value.problems[0]

    originals = targets()
    with mock.patch.dict(vars(module)), mock.patch.dict(sys.modules):
        # Imported again, without a name that this package imports.
        del module.copy_optimizer_param_metadata
        for name in [name for name in sys.modules if name.startswith("megatron_muon.mcore.")]:
            del sys.modules[name]
        assert "copy_optimizer_param_metadata" in refusal()
    enabling.enable()
    enabled = targets()
    assert all(now.__wrapped__ is before for now, before in zip(enabled, originals, strict=True))
    enabling.enable()
    assert targets() == enabled
    enabling.disable()
    assert targets() == originals
    enabling.disable()
    with mock.patch.object(checkpointing, "save_checkpoint", lambda: None):
        assert "save_checkpoint" in refusal()
    # A line of v2 refuses v2 alone.
    wrong = Patch("megatron.core:nothing", "v2", applies_to="v2")
    with (
        mock.patch("megatron_muon.mcore.patching._V2_FLAG", "megatron.core"),
        mock.patch("megatron_muon.mcore.patches.PATCHES", (wrong, *_always())),
    ):
        enabling.enable()
    (problem,) = enabling.PATCHED.v2_problems
    assert enabling.is_enabled() and problem.startswith("megatron.core:nothing: expected")
    enabling.disable()


def _always() -> list[Patch]:
    from megatron_muon.mcore.patches import PATCHES

    return [patch for patch in PATCHES if patch.applies_to != "v2"]


@pytest.mark.ranks
def test_enable_is_idempotent_reversible_and_all_or_nothing():
    """enable() can be repeated and taken back, and a refusal changes nothing."""
    run_ranks(1, _enable_and_disable).check()


@pytest.mark.skipif(not megatron.core.__version__.startswith("0.19"), reason="of that release")
def test_diffs_of_the_pull_requests_apply_to_the_release(tmp_path):
    """The diffs of patches/ apply to the release, alone and together, and use names that exist."""
    diffs = sorted((ROOT / "patches" / "core_v0.19.2").glob("*.patch"))
    release = Path(megatron.core.__file__).parents[2]
    # Names of this package in the first diff.
    text = diffs[0].read_text()
    flags = ", ".join(re.findall(r"muon_arguments\.(\w+)", text))
    used = re.findall(r"from (megatron_muon\S*) import ((?:\w+, )*\w+)", text)
    for module, names in (("megatron_muon.mcore.arguments", flags), *used):
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name)
    for group in (*([diff] for diff in diffs), diffs):
        tree = tmp_path / str(len(list(tmp_path.iterdir())))
        for diff in group:
            for line in diff.read_text().splitlines():
                if line.startswith("+++ b/"):
                    path = tree / line.removeprefix("+++ b/").strip()
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes((release / path.relative_to(tree)).read_bytes())
        command = ["git", "apply", "-p1", *map(str, group)]
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)}
        subprocess.run(command, check=True, cwd=tree, env=environment, timeout=60)


# The launcher starts a script as Python does.
OF_THE_LAUNCHER = {"launcher.py: sys.argv", "launcher.py: sys.last_exc"}


def _replacements(path: Path) -> Iterator[str]:
    """Yield assignments to attributes of what a file imports, and of functions to any object's."""
    tree = ast.parse(path.read_text())
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        if not (getattr(node, "module", None) or "").startswith("megatron_muon")
        for alias in node.names
    }
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets, value = getattr(node, "targets", [getattr(node, "target", None)]), node.value
            targets = [each for target in targets for each in getattr(target, "elts", [target])]
            targets = [target for target in targets if isinstance(target, ast.Attribute)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            targets, value = [node.args[0]], node.args[2]
        else:
            continue
        text = ast.unparse(value) if value is not None else ""
        is_function = text in functions or text.startswith(("lambda", "functools.partial"))
        for target in map(ast.unparse, targets):
            root = target.partition(".")[0]
            if root in imported or (is_function and root != "self"):
                yield f"{path.name}: {target}"


def test_objects_of_others_are_replaced_in_one_file_alone():
    """Only ``patching.py`` replaces objects of other packages, so that the list is complete.

    Five replacements were in no list, among them one of torch and one of argparse.
    """
    package = ROOT / "megatron_muon"
    files = [path for path in sorted(package.rglob("*.py")) if path.name != "patching.py"]
    assert {found for path in files for found in _replacements(path)} == OF_THE_LAUNCHER
