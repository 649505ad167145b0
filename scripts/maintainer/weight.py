# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Print the weight of the package by folder, in nodes of its syntax trees.

    .venv/bin/python scripts/maintainer/weight.py [REVISION]

Packing of lines does not change it. With a revision of git, also the difference from it.
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def git(*arguments: str) -> str:
    """Return what a command of git prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def weights(revision: str | None = None) -> Counter[str]:
    """Return the nodes by folder, of the working tree or of a revision."""
    if revision is None:
        paths = (ROOT / "megatron_muon").rglob("*.py")
        sources = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    else:
        names = git("ls-tree", "-r", "--name-only", revision, "megatron_muon").splitlines()
        names = [name for name in names if name.endswith(".py")]
        sources = {name: git("show", f"{revision}:{name}") for name in names}
    nodes: Counter[str] = Counter()
    for name, source in sources.items():
        folder = Path(name).parts[1] if name.count("/") > 1 else "(top)"
        nodes[folder] += sum(1 for _ in ast.walk(ast.parse(source)))
    return nodes


def main(revision: str | None = None) -> None:
    """Print a line per folder, and the sum."""
    now = weights()
    before = weights(revision) if revision else now
    rows = [*sorted(now.keys() | before.keys())]
    for name, count, old in (
        *((name, now[name], before[name]) for name in rows),
        ("all", now.total(), before.total()),
    ):
        print(f"{name:14} {count:8,}" + (f" {count - old:+8,}" if revision else ""))


if __name__ == "__main__":
    main(*sys.argv[1:])
