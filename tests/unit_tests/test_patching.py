# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Patches: verified as a whole, applied once, taken back."""

import subprocess
import sys
import types

import pytest

from megatron_muon.patching import IncompatibleMegatronError
from megatron_muon.patching.patch import Patch, Target, apply_all, revert_all, verify_all
from megatron_muon.patching.versions import version_problems

GOOD_VERSIONS = {"megatron-core": "0.19.2", "emerging-optimizers": "0.3.0"}


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
    assert "Tested with megatron-core 0.19.2; emerging-optimizers 0.3.0" in str(caught.value)
    assert "nothing was changed" in str(caught.value)


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
    ("versions", "problems"),
    [
        (GOOD_VERSIONS, []),
        ({**GOOD_VERSIONS, "megatron-core": "0.19.2+abc1234"}, []),
        ({**GOOD_VERSIONS, "megatron-core": "0.18.2"}, ["megatron-core: expected a version"]),
        ({**GOOD_VERSIONS, "megatron-core": "0.20.0rc1"}, ["megatron-core: expected a version"]),
        ({**GOOD_VERSIONS, "emerging-optimizers": None}, ["emerging-optimizers: expected"]),
    ],
)
def test_versions_outside_of_the_range_are_named(versions, problems):
    """A release that was not tested is refused with what was found."""
    found = version_problems(versions)
    assert len(found) == len(problems)
    assert all(text.startswith(start) for text, start in zip(found, problems, strict=True))


ENABLE_TWICE = """
import sys
import megatron_muon
assert not any(name.split(".")[0] in ("torch", "megatron") for name in sys.modules)
assert not megatron_muon.is_enabled()
import megatron.training.arguments as arguments
import megatron.core.optimizer as optimizer
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


def test_enable_is_idempotent_reversible_and_all_or_nothing():
    """On the real megatron-core; importing the package imports neither torch nor megatron."""
    done = subprocess.run([sys.executable, "-c", ENABLE_TWICE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
