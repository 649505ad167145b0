# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Patches: verified as a whole, applied once, taken back."""

import dataclasses
import inspect
import os
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import megatron.core
import pytest
from helpers.ranks import ROOT, run_ranks

from megatron_muon.mcore import enable as enabling
from megatron_muon.mcore import patching, versions
from megatron_muon.mcore.patching import Patch, apply_all, exists, revert_all
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
    def wrap(original):
        def replacement(*args, **kwargs):
            return original(*args, **kwargs) + 1

        return replacement

    return Patch(f"stub_megatron:{name}", "add one", wrap, **settings)


def test_apply_and_revert_restore_the_original(stub):
    """A replacement runs, keeps the original, and is taken back, in classes too."""
    patches = [_patch("scale"), _patch("Holder.scale")]
    apply_all(patches)
    assert stub.scale(3) == 7 and stub.scale.__wrapped__ is scale
    assert stub.Holder.scale(3) == 7
    revert_all(patches)
    assert stub.scale is scale and stub.Holder.scale is scale


def test_importers_get_the_replacement(stub, monkeypatch):
    """Modules that imported a function by name get its replacement too."""
    monkeypatch.setattr(scale, "__module__", "stub_megatron")
    importer = types.ModuleType("megatron.importer")
    importer.scale, importer.times, importer.other = scale, scale, len
    monkeypatch.setitem(sys.modules, "megatron.importer", importer)
    patches = [_patch("scale")]
    apply_all(patches)
    assert importer.scale is importer.times is stub.scale and importer.other is len
    # Whichever module is imported while the patch is applied loses it again, too.
    late = types.ModuleType("megatron.late")
    late.scale = stub.scale
    monkeypatch.setitem(sys.modules, "megatron.late", late)
    # One that names an importer changes it alone.
    own = [dataclasses.replace(_patch("scale"), symbol="megatron.late:scale")]
    apply_all(own)
    assert late.scale(3) == 8 and importer.scale(3) == 7
    revert_all(own)
    revert_all(patches)
    assert importer.scale is importer.times is late.scale is stub.scale is scale


def test_patch_waits_for_the_import_of_its_module(stub, monkeypatch):
    """A patch of a module that is imported later is verified and applied then."""
    waiting = [_patch("scale"), dataclasses.replace(_patch("scale"), symbol="not_imported:scale")]
    monkeypatch.setattr(patching, "PATCHED", patching.Patches(waiting=waiting))
    patching.apply_to_imported()
    patching.apply_to_imported()
    assert stub.scale(3) == 7
    assert (patching.PATCHED.applied, patching.PATCHED.waiting) == (waiting[:1], waiting[1:])
    revert_all(waiting[:1])
    wrong = _patch("scale", source_lines=("scaled = x + factor",))
    monkeypatch.setattr(patching, "PATCHED", patching.Patches(waiting=[wrong]))
    with pytest.raises(IncompatibleMegatronError, match="scaled = x . factor"):
        patching.apply_to_imported()
    assert stub.scale is scale


def test_static_method_stays_one(stub):
    """A patched static method stays one, as Megatron calls it through instances."""
    stub.Holder.scale = staticmethod(scale)
    patches = [_patch("Holder.scale")]
    assert patches[0].problems() == []
    apply_all(patches)
    assert stub.Holder().scale(3) == 7
    revert_all(patches)
    assert stub.Holder().scale(3) == 6 and stub.Holder.scale is scale


@pytest.mark.parametrize(
    ("name", "relied_on", "message"),
    [
        ("gone", {}, "stub_megatron:gone: expected it to exist, found AttributeError"),
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


def test_argument_of_muon_that_is_not_known_is_refused(monkeypatch):
    """A later argument of upstream's Muon is refused unless this package knows it."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    from megatron_muon.mcore.relied_on import relied_on_problems

    assert relied_on_problems() == []
    init = TensorParallelMuon.__init__
    signature = inspect.signature(init)
    # Megatron-LM's main has use_syrk.
    for name, is_known in (("use_syrk", True), ("ns_batch_size", False)):
        later = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        parameters = {**signature.parameters, name: later}
        changed = signature.replace(parameters=list(parameters.values()))
        monkeypatch.setattr(init, "__signature__", changed, raising=False)
        problems = relied_on_problems()
        assert (problems == []) == is_known
        assert is_known or name in problems[0]


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
    assert not gone.is_repaired() and not exists(gone.symbol) and exists(repaired.symbol)


def test_revert_refuses_when_somebody_wrapped_the_patch(stub):
    """Nothing is restored under a later wrapper, which would undo it."""
    patches = [_patch("Holder.scale"), _patch("scale")]
    apply_all(patches)
    ours = stub.Holder.scale
    stub.scale = lambda x: 0
    with pytest.raises(RuntimeError, match="stub_megatron:scale: expected the replacement"):
        revert_all(patches)
    assert stub.Holder.scale is ours


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
    """The error names what was found, the tested ranges and what to install."""
    monkeypatch.setattr(versions, "installed_versions", lambda: {**GOOD_VERSIONS, package: found})
    monkeypatch.setattr(enabling.PATCHED, "applied", [])
    with pytest.raises(IncompatibleMegatronError) as caught:
        enabling.enable()
    (problem,) = caught.value.problems
    assert problem.startswith(f"{package}: expected a version ")
    assert f"found {found or 'none installed'}" in problem
    repair = f"Run: pip install {'' if package == 'torch' else '--no-deps '}{package}=="
    assert f"{repair}{GOOD_VERSIONS[package]}" in problem
    pins = " ".join(f"{name}=={version}" for name, version in GOOD_VERSIONS.items())
    assert str(caught.value).endswith(f"In a new environment: pip install {pins}")
    assert not enabling.is_enabled()


@pytest.mark.parametrize(
    ("changes", "is_warned"),
    [
        ({}, False),
        ({"megatron-core": "0.19.2+abc1234", "torch": "2.11.0+cu130"}, False),
        ({"megatron-core": "0.19.0", "torch": "2.11.0"}, False),
        ({"megatron-core": "0.19.3"}, True),
        # Megatron-LM's main has this version at every commit.
        ({"megatron-core": "0.20.0"}, True),
        ({"megatron-core": "0.20.0rc1"}, True),
        ({"emerging-optimizers": "0.4.0"}, False),
        ({"emerging-optimizers": "0.6.0"}, True),
        ({"torch": "2.11.0a0+eb65b36914.nv26.02"}, False),
        ({"torch": "3.0.0"}, True),
    ],
)
def test_untested_versions_in_the_ranges_are_accepted_and_named(caplog, changes, is_warned):
    """Untested versions within the ranges are accepted with a warning."""
    installed = {**GOOD_VERSIONS, **changes}
    assert versions.version_problems(installed) == []
    versions.warn_where_untested(installed)
    assert len(caplog.records) == is_warned
    for package, version in changes.items() if is_warned else ():
        assert f"{package} {version}" in caplog.text


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
    from megatron.training import arguments

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
    with mock.patch.object(arguments, "add_megatron_arguments", lambda parser: parser):
        assert "add_megatron_arguments" in refusal()
    # A line of v2 refuses v2 alone.
    problem = "v2: expected another line, found none."
    with (
        mock.patch("megatron_muon.mcore.enable.exists", lambda symbol: True),
        mock.patch("megatron_muon.mcore.patches.LATER_PATCHES", ()),
        mock.patch("megatron_muon.mcore.patches.V2_PATCHES", ()),
        mock.patch("megatron_muon.mcore.relied_on.v2_problems", lambda: [problem]),
    ):
        enabling.enable()
    assert enabling.is_enabled() and enabling.PATCHED.v2_problems == [problem]
    enabling.disable()


@pytest.mark.ranks
def test_enable_is_idempotent_reversible_and_all_or_nothing():
    """enable() can be repeated and taken back, and a refusal changes nothing."""
    run_ranks(1, _enable_and_disable).check()


@pytest.mark.skipif(not megatron.core.__version__.startswith("0.19"), reason="of that release")
def test_diffs_of_the_pull_requests_apply_to_the_release(tmp_path):
    """The diffs of patches/ apply to the release, each alone and all together."""
    diffs = sorted((ROOT / "patches" / "core_v0.19.2").glob("*.patch"))
    release = Path(megatron.core.__file__).parents[2]
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
