# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The same changes as diffs for source trees: all or none, and the same training."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest
from helpers import forked_losses
from helpers.ranks import ROOT, UNIT_TESTS

from megatron_muon.mcore import enable as enabling
from megatron_muon.mcore.patches import PATCHES
from megatron_muon.patching import IncompatibleMegatronError

RELEASED = Path(megatron.core.__file__).parents[1]
FOLDER = ROOT / "patches" / "core_v0.19.2"
DIFFS = sorted(FOLDER.glob("*.patch"))


def apply_patches(tree, *options):
    command = ["bash", str(ROOT / "scripts" / "apply_patches.sh"), str(tree), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """The release's own package."""
    tree = tmp_path_factory.mktemp("release")
    # With what Python compiled of it: to do so again takes longer than the runs below.
    shutil.copytree(RELEASED, tree / "megatron")
    return tree


@pytest.fixture
def tree(pristine, tmp_path):
    """A copy to change."""
    shutil.copytree(pristine / "megatron", tmp_path / "megatron")
    return tmp_path


def contents(tree):
    return {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def test_diffs_are_numbered_and_say_what_they_are():
    """A header with release, purpose and upstream's issue; small."""
    assert [diff.name[:4] for diff in DIFFS] == [f"{n:04d}" for n in range(1, len(DIFFS) + 1)]
    for diff in DIFFS:
        header, _, body = diff.read_text().partition("\n---\n")
        for field in ("Base:    megatron-core 0.19.2", "Purpose: ", "Issue:   "):
            assert field in header, (diff.name, field)
        assert ("Needs:   the megatron_muon package" in header) == (
            "import megatron_muon" in body or "from megatron_muon" in body
        )
        added = [line for line in body.splitlines() if line[:1] == "+" and line[:3] != "+++"]
        assert 0 < len(added) < 25, diff.name


def test_every_patch_has_its_line_in_a_diff_of_its_module():
    """What enable() takes for the mark of a patched tree is what the diffs add."""
    added = {}
    for diff in DIFFS:
        for line in diff.read_text().partition("\n---\n")[2].splitlines():
            if line.startswith("+++ b/"):
                lines = added.setdefault(line.removeprefix("+++ b/"), [])
            elif line.startswith("+"):
                lines.append(line[1:].strip())
    for patch in PATCHES:
        module = (patch.tree_module or patch.target.module).replace(".", "/")
        lines = added.get(f"{module}.py") or added[f"{module}/__init__.py"]
        assert patch.tree_line in lines, patch.target.symbol
        assert not patch.is_in_tree(), patch.target.symbol


def test_applying_twice_is_once_and_reverting_restores(tree, pristine):
    """Each call says what it did; ``--check`` changes nothing."""
    before = contents(tree)
    assert "patches absent" in apply_patches(tree, "--check").stdout
    assert contents(tree) == before
    assert f"applied {len(DIFFS)} patches" in apply_patches(tree).stdout
    after = contents(tree)
    assert after != before
    assert after.keys() == before.keys()
    assert "nothing to do" in apply_patches(tree).stdout
    assert "patches present" in apply_patches(tree, "--check").stdout
    assert contents(tree) == after
    assert "reverted" in apply_patches(tree, "--revert").stdout
    assert contents(tree) == before
    done = apply_patches(tree, "--revert")
    assert done.returncode == 0 and "nothing to do" in done.stdout


def test_tree_that_differs_is_refused_and_left_alone(tree):
    """Somebody's own change where a patch goes, or a tree with some of the patches."""
    path = tree / "megatron" / "training" / "checkpointing.py"
    released = path.read_text()
    path.write_text(released.replace("def _load_base_checkpoint(", "def _load_other(", 1))
    before = contents(tree)
    done = apply_patches(tree)
    assert done.returncode == 1
    assert "patch failed: megatron/training/checkpointing.py" in done.stderr
    assert "Nothing was changed" in done.stderr
    assert contents(tree) == before

    path.write_text(released)
    apply_patches(tree)
    path.write_text(released)
    before = contents(tree)
    for option in ([], ["--revert"], ["--check"]):
        assert apply_patches(tree, *option).returncode == 1
    assert contents(tree) == before


def test_call_that_was_cut_short_is_undone_by_the_next(tree):
    """Killed while git writes: some files are changed, and the backup of all stands."""
    before = contents(tree)
    names = {
        line.removeprefix("+++ b/").strip()
        for diff in DIFFS
        for line in diff.read_text().splitlines()
        if line.startswith("+++ b/")
    }
    for name in names:
        saved = tree / ".megatron_muon_patches.backup" / name
        saved.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / name, saved)
    # And an earlier one was killed while it removed its backup, having done its work.
    (tree / ".megatron_muon_patches.backup.done" / "megatron").mkdir(parents=True)
    (tree / sorted(names)[0]).write_text("half of a file")
    done = apply_patches(tree, "--check")
    assert done.returncode == 1 and "interrupted" in done.stderr
    assert "restored" in apply_patches(tree, "--revert").stdout
    assert contents(tree) == before


def set_version(tree, patch):
    """Let the tree say a version, as Megatron-LM's bot does."""
    info = tree / "megatron" / "core" / "package_info.py"
    text, num = re.subn(r"(?m)^PATCH = \d+$", f"PATCH = {patch}", info.read_text())
    assert num == 1
    info.write_text(text)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda tree: shutil.rmtree(tree / "megatron" / "core"), "expected the folder that holds"),
        (
            lambda tree: shutil.rmtree(tree / "megatron" / "training"),
            "expected the source of a release in core_v0.19.2, or that with all of its diffs, got "
            "neither in megatron-core 0.19.2",
        ),
    ],
)
def test_what_is_no_supported_release_is_refused(tree, make, said):
    """A wrong folder, and one whose files are not those of a release."""
    make(tree)
    done = apply_patches(tree)
    assert done.returncode == 1
    assert said in done.stderr


def test_diffs_are_chosen_by_content_not_by_version(tree):
    """The tag core_v0.19.0 calls itself 0.19.1 and was refused, although every hunk fits."""
    set_version(tree, 1)
    before = contents(tree)
    assert "megatron-core 0.19.1, patches absent" in apply_patches(tree, "--check").stdout
    done = apply_patches(tree)
    assert f"megatron-core 0.19.1, applied {len(DIFFS)} patches" in done.stdout, done.stderr
    set_version(tree, 7)
    assert "megatron-core 0.19.7, patches present" in apply_patches(tree, "--check").stdout
    assert "nothing to do" in apply_patches(tree).stdout
    set_version(tree, 1)
    assert "reverted" in apply_patches(tree, "--revert").stdout
    assert contents(tree) == before


def test_half_patched_source_is_an_error_that_names_both_halves(monkeypatch):
    """Some changes would else be made twice, or not at all."""
    half = {patch.target for patch in PATCHES[:3]}
    monkeypatch.setattr(type(PATCHES[0]), "is_in_tree", lambda patch: patch.target in half)
    with pytest.raises(IncompatibleMegatronError, match=r"Run scripts/apply_patches.sh") as caught:
        enabling.enable()
    assert PATCHES[0].target.symbol in str(caught.value)
    assert PATCHES[3].target.symbol in str(caught.value)
    assert not enabling.is_enabled()


def train_with(path):
    folders = [str(path), str(ROOT), str(ROOT / "scripts"), str(UNIT_TESTS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(
        [sys.executable, "-m", "helpers.forked_losses"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.ranks
@pytest.mark.slow
def test_patched_tree_trains_like_the_patched_process(tree):
    """The same runs, bit for bit; enable() finds the changes in the source and applies nothing."""
    assert apply_patches(tree).returncode == 0
    in_tree, at_run_time = train_with(tree), forked_losses.train_all()
    assert in_tree["history"] == at_run_time["history"]
    assert in_tree["num_files"] == at_run_time["num_files"]
    assert len(in_tree["history"]["resumed"]) == 2
    for found, done in ((in_tree, "carries the patches in its source"), (at_run_time, "patched")):
        (line,) = found["patches"]
        assert f" {done}: {len(PATCHES)} changes (" in line
