# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run the tests of ``patches/upstream`` on a checkout of Megatron-LM, without and with each diff.

    .venv/bin/python scripts/maintainer/upstream_patches.py ~/Megatron-LM [NAME ...]

It prints a table. The tests run on CPUs, in a copy of the checkout, which stays as it is. The exit
status is 1 if a test passes without its diff or fails with it, or if a diff does not apply.
"""

import contextlib
import importlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

# Imported once, as they take most of the time. Nothing here imports megatron.
IMPORTED = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor")
IMPORTED += ("emerging_optimizers", "transformers")
PATCHES = Path(__file__).resolve().parents[2] / "patches" / "upstream"


def _run_pytest(tree: Path, arguments: Sequence[str]) -> None:
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    with (tree / "output.txt").open("w") as output, contextlib.redirect_stdout(output):
        pytest.main([*arguments])


def run_tests(tree: Path, tests: Sequence[Path]) -> dict[str, Counter[str]]:
    """Run files of tests in a tree, in a fork, which need not import torch again.

    Upstream's conftest.py is left out: it downloads data that these tests do not need.

    Returns:
        Numbers of tests that passed, failed and were skipped, by the stem of the file.
    """
    report = tree / "report.xml"
    arguments = ["-c", os.devnull, "--rootdir", str(tree), "--noconftest", f"--junitxml={report}"]
    arguments += ["-p", "no:cacheprovider", *map(str, tests)]
    process = multiprocessing.get_context("fork").Process(
        target=_run_pytest, args=(tree, arguments)
    )
    process.start()
    process.join()
    counts: dict[str, Counter[str]] = {test.stem: Counter() for test in tests}
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case} & {"failure", "error", "skipped"}
        names = {"failure": "failed", "error": "failed"}
        outcome = next((names.get(tag, tag) for tag in tags), "passed")
        # A file that cannot be imported is a case without a class.
        parts = (case.get("classname") or case.get("name", "")).split(".")
        counts[next(part for part in parts if part in counts)][outcome] += 1
    return counts


def main() -> int:
    """Check the named folders, or all."""
    checkout, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    folders = [PATCHES / name for name in names] or sorted(p.parent for p in PATCHES.glob("*/*.md"))
    for name in IMPORTED:
        importlib.import_module(name)
    is_good = True
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        # Git would take a repository around the folder for the checkout.
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
        shutil.copytree(checkout / "megatron", tree / "megatron")
        tests = {}
        for folder in folders:
            (test,) = folder.rglob("test_*.py")
            tests[folder] = tree / test.relative_to(folder)
            tests[folder].parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(test, tests[folder])
        without = run_tests(tree, list(tests.values()))
        print("| defect | its test alone | with the diff |\n| --- | --- | --- |")
        for folder, test in tests.items():
            diff = str(folder / "repair.patch")
            before, after = without[test.stem], Counter[str]()
            apply = subprocess.run(["git", "apply", diff], cwd=tree, env=environment)
            if apply.returncode == 0:
                after = run_tests(tree, [test])[test.stem]
                subprocess.run(["git", "apply", "-R", diff], cwd=tree, env=environment, check=True)
            is_expected = before["failed"] > 0 and set(after) == {"passed"}
            is_good &= is_expected
            cells = [
                ", ".join(
                    f"{c[name]} {name}" for name in ("failed", "passed", "skipped") if c[name]
                )
                for c in (before, after)
            ]
            mark = "" if is_expected else " (unexpected)"
            print(f"| `{folder.name}` | {cells[0]} | {cells[1] or 'none'}{mark} |", flush=True)
    return not is_good


if __name__ == "__main__":
    sys.exit(main())
