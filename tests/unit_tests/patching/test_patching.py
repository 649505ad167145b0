# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Patches: verified as a whole, applied once, taken back."""

import dataclasses
import inspect
import os
import re
import subprocess
import sys
import types

import pytest

from megatron_muon.mcore import enable as enabling
from megatron_muon.patching import IncompatibleMegatronError, packages
from megatron_muon.patching.patch import Patch, Target, apply_all, revert_all, verify_all
from megatron_muon.patching.versions import TABLE, version_problems, warn_where_untested

GOOD_VERSIONS = TABLE[0].versions
ROW = r"\n  " + " +".join(GOOD_VERSIONS.values()) + r"  works\n"


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


def _patch(name: str, **target: object) -> Patch:
    def wrap(original):
        def replacement(*args, **kwargs):
            return original(*args, **kwargs) + 1

        return replacement

    return Patch(Target("stub_megatron", name, **target), "add one", wrap, tree_line="add one")


def test_apply_and_revert_restore_the_original(stub):
    """The replacement runs, keeps the original, and goes away again; in classes too."""
    patches = [_patch("scale"), _patch("Holder.scale")]
    apply_all(patches)
    assert stub.scale(3) == 7 and stub.scale.__wrapped__ is scale
    assert stub.Holder.scale(3) == 7
    revert_all(patches)
    assert stub.scale is scale and stub.Holder.scale is scale


def test_static_method_stays_one(stub):
    """Megatron calls one through instances, which would pass themselves to a plain function."""
    stub.Holder.scale = staticmethod(scale)
    patches = [_patch("Holder.scale", parameters=("x", "factor"))]
    verify_all([patches[0].target])
    apply_all(patches)
    assert stub.Holder().scale(3) == 7
    revert_all(patches)
    assert stub.Holder().scale(3) == 6 and stub.Holder.scale is scale


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"name": "gone"}, "stub_megatron.gone: expected it to exist, found AttributeError"),
        (
            {"name": "scale", "parameters": ("x",)},
            r"stub_megatron.scale: expected parameters \('x',\), found \('x', 'factor'\)",
        ),
        (
            {"name": "scale", "source_lines": ("scaled = x + factor",)},
            "expected the source line 'scaled = x [+] factor', found none",
        ),
    ],
)
def test_mismatch_names_symbol_expected_found_and_tested_versions(stub, target, message):
    """What upstream changed is said, with the versions that work."""
    with pytest.raises(IncompatibleMegatronError, match=message) as caught:
        verify_all([Target("stub_megatron", **target)])
    assert re.search(ROW, str(caught.value))
    assert "nothing was changed" in str(caught.value)


def test_later_release_may_have_what_makes_no_difference(stub):
    """One more parameter at the end that is named; any other is refused with its name."""
    known = {"name": "scale", "parameters": ("x",)}
    assert Target("stub_megatron", **known, later_parameters=("factor",)).problems() == []
    (problem,) = Target("stub_megatron", **known, later_parameters=("syrk",)).problems()
    assert "found ('x', 'factor')" in problem


def test_argument_of_muon_that_is_not_known_is_refused(monkeypatch):
    """It would be ignored: --muon-use-syrk of later releases is known, and chooses a backend."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    from megatron_muon.mcore.requirements import REQUIREMENTS

    (target,) = (each for each in REQUIREMENTS if each.name == "TensorParallelMuon.__init__")
    assert target.problems() == []
    signature = inspect.signature(TensorParallelMuon.__init__)
    for name, is_known in (("use_syrk", True), ("ns_batch_size", False)):
        later = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        # Megatron-LM's main has use_syrk.
        parameters = {**signature.parameters, name: later}.values()
        monkeypatch.setattr(
            TensorParallelMuon.__init__,
            "__signature__",
            signature.replace(parameters=list(parameters)),
            raising=False,
        )
        assert (target.problems() == []) == is_known
        assert is_known or name in target.problems()[0]


class Later:
    """A class that needs no change."""

    def scale(self):
        """Is what an older release has, too."""

    def own_norm(self):
        """Is new."""


def test_change_that_a_release_has_made_is_not_made_again(stub):
    """Found by a text of the class, also of another method; without it the change is needed."""
    stub.Later = Later
    repaired = dataclasses.replace(_patch("Later.scale"), repaired_text="def own_norm(")
    assert repaired.is_repaired() and not _patch("Later.scale").is_repaired()
    assert not dataclasses.replace(repaired, repaired_text="def other_norm(").is_repaired()
    gone = dataclasses.replace(repaired, target=Target("stub_megatron", "Gone.scale"))
    assert not gone.is_repaired() and not gone.target.exists() and repaired.target.exists()


def test_all_mismatches_are_reported_at_once(stub):
    """One message for the whole of an incompatible release."""
    targets = [
        Target("stub_megatron", "gone"),
        Target("no_such_module", "x"),
        Target("stub_megatron", "scale"),
    ]
    with pytest.raises(IncompatibleMegatronError) as caught:
        verify_all(targets)
    assert len(caught.value.problems) == 2


def test_revert_refuses_when_somebody_wrapped_the_patch(stub):
    """Restoring under a later wrapper would silently undo it, so nothing is restored."""
    patches = [_patch("Holder.scale"), _patch("scale")]
    apply_all(patches)
    ours = stub.Holder.scale
    stub.scale = lambda x: 0
    with pytest.raises(RuntimeError, match="stub_megatron.scale: expected the replacement"):
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
def test_enable_refuses_a_misfit_of_any_package_with_the_table(monkeypatch, package, found):
    """What was found is named, then what was run together and what to install."""
    versions = {**GOOD_VERSIONS, package: found}
    monkeypatch.setattr(packages, "installed_versions", lambda: versions)
    monkeypatch.setattr(enabling, "_applied", [])
    with pytest.raises(IncompatibleMegatronError) as caught:
        enabling.enable()
    (problem,) = caught.value.problems
    assert problem.startswith(f"{package}: expected a version ")
    assert f"found {found or 'none installed'}" in problem
    assert re.search(ROW, str(caught.value))
    assert re.search(r"\n  0.18.2 +0.3.0 +2.11.0  no: ", str(caught.value))
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
        ({"megatron-core": "0.19.0rc3"}, True),
        # Main has this version at every commit; one was tried.
        ({"megatron-core": "0.20.0+d98e8a64dd", "torch": "2.11.0"}, False),
        ({"megatron-core": "0.20.0+d98e8a6", "torch": "2.11.0"}, False),
        # The documents said that it was run, and the start that nobody has.
        ({"megatron-core": "0.20.0+d98e8a64dd", "torch": "2.15.0"}, False),
        ({"megatron-core": "0.20.0+abc1234"}, True),
        ({"megatron-core": "0.20.0"}, True),
        ({"megatron-core": "0.20.0rc1"}, True),
        ({"emerging-optimizers": "0.3.1"}, True),
        ({"emerging-optimizers": "0.6.0"}, True),
        ({"torch": "2.11.1"}, True),
        ({"torch": "2.12.0", "megatron-core": "0.19.0"}, True),
        ({"torch": "2.11.0a0+eb65b36914.nv26.02"}, False),
        ({"torch": "2.13.0a0+8145d630e8"}, False),
        ({"torch": "3.0.0"}, True),
    ],
)
def test_versions_in_the_ranges_are_accepted_and_named_where_untested(caplog, changes, is_warned):
    """A patch release, or a container's build, is tried: its symbols are verified all the same."""
    versions = {**GOOD_VERSIONS, **changes}
    assert version_problems(versions) == []
    warn_where_untested(versions)
    assert len(caplog.records) == is_warned
    for package, version in changes.items() if is_warned else ():
        assert f"{package} {version}" in caplog.text and re.search(ROW, caplog.text)


def test_accepted_ranges_hold_the_rows_that_work_and_no_other():
    """The table, the ranges and what ``enable()`` does never say different things."""
    for row in TABLE:
        assert bool(row.refusal) == bool(version_problems(row.versions))


def test_version_is_read_from_the_package_that_would_be_imported(tmp_path):
    """A Megatron-LM checkout before the wheel on the path; nothing of it is imported."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("raise RuntimeError('imported')")
    (core / "package_info.py").write_text("__version__ = '0.18.2+abc1234'")
    done = _python(tmp_path, "from megatron_muon import enable; enable()")
    assert "megatron-core: expected a version <0.20,>=0.19, found 0.18.2." in done.stderr


def _python(folder, code: str) -> subprocess.CompletedProcess:
    """Run code with a folder first on the path."""
    path = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
    )


ENABLE_TWICE = """
import sys
import megatron_muon
assert not any(name.split(".")[0] in ("torch", "megatron") for name in sys.modules)
assert not megatron_muon.is_enabled()
import megatron.training.arguments as arguments
import megatron.core.optimizer as optimizer
from megatron.core.optimizer import optimizer as module

renamed = module.copy_optimizer_param_metadata
del module.copy_optimizer_param_metadata
try:
    megatron_muon.enable()
except megatron_muon.IncompatibleMegatronError as error:
    assert "copy_optimizer_param_metadata" in error.problems[0], error
else:
    raise SystemExit("expected a refusal")
module.copy_optimizer_param_metadata = renamed

originals = (arguments.validate_args, optimizer._get_megatron_emerging_optimizer)
megatron_muon.enable()
enabled = (arguments.validate_args, optimizer._get_megatron_emerging_optimizer)
assert all(now.__wrapped__ is before for now, before in zip(enabled, originals))
megatron_muon.enable()
assert enabled == (arguments.validate_args, optimizer._get_megatron_emerging_optimizer)
megatron_muon.disable()
assert originals == (arguments.validate_args, optimizer._get_megatron_emerging_optimizer)
megatron_muon.disable()

def shrunk(parser):
    return parser

arguments.add_megatron_arguments = shrunk
try:
    megatron_muon.enable()
except megatron_muon.IncompatibleMegatronError as error:
    assert "add_megatron_arguments" in str(error), error
else:
    raise SystemExit("expected a refusal")
assert originals == (arguments.validate_args, optimizer._get_megatron_emerging_optimizer)
assert not megatron_muon.is_enabled()
"""


@pytest.mark.slow
def test_enable_is_idempotent_reversible_and_all_or_nothing():
    """On the real megatron-core; importing the package imports neither torch nor megatron."""
    done = subprocess.run([sys.executable, "-c", ENABLE_TWICE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
