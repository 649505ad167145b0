# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Links, paths and names of tests in the documents lead somewhere."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from helpers.documents import DOCUMENTS
from helpers.ranks import ROOT

# Written by runs, not part of the repository.
OUTPUT_FOLDERS = ("quickstart_output", "fsdp2_output", ".venv", ".uv")


def _repository_files() -> list[str]:
    """List what git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    return listed.stdout.splitlines()


def _names(files: Sequence[str]) -> set[str]:
    """List every file and folder by each end of its path: ``a/b/c``, ``b/c``, ``c``."""
    names = set()
    for file in files:
        parts = file.split("/")
        for stop in range(1, len(parts) + 1):
            names |= {"/".join(parts[start:stop]) for start in range(stop)}
    return names


def _prose(path: Path) -> str:
    """Return a document without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_links_lead_somewhere():
    """Relative links name files; a fragment names a heading."""
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)\s]+)\)", _prose(path)):
            if "://" in target or target.startswith("mailto:"):
                continue
            file, _, fragment = target.partition("#")
            linked = path.parent / file if file else path
            assert linked.exists(), f"{path.name}: expected {target} to exist"
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
            assert fragment in {"", *slugs}, f"{path.name}: {target}: no such heading"


def test_paths_in_backticks_exist():
    """What looks like a path of the repository is one, by its end at least.

    It looks like one where it has the suffix of a source file, or begins with one of the
    repository's folders. Patterns and places to fill in are left out.
    """
    files = _repository_files()
    names, folders = _names(files), {file.split("/")[0] for file in files if "/" in file}
    for path in DOCUMENTS:
        for quoted in re.findall(r"`([^`\n]+)`", _prose(path)):
            is_file = re.fullmatch(r"[\w./-]+\.(py|md|sh|toml|lock|in|json|txt|yaml|patch)", quoted)
            first = quoted.split("/")[0]
            is_folder = "/" in quoted and first in folders and re.fullmatch(r"[\w./-]+", quoted)
            if not (is_file or is_folder) or first in OUTPUT_FOLDERS:
                continue
            assert quoted.rstrip("/") in names, (
                f"{path.name}: expected {quoted} in the repository, got no such path. Correct it, "
                "or quote only a part that is no path."
            )


def test_tests_named_in_documents_exist():
    """A test that a document points to can be found."""
    sources = "".join(
        file.read_text() for file in (ROOT / "tests" / "unit_tests").rglob("test_*.py")
    )
    for path in DOCUMENTS:
        for name in set(re.findall(r"`(test_\w+)`", _prose(path))):
            assert f"def {name}(" in sources, f"{path.name}: no test {name}"


def test_documents_are_plain_text():
    """ASCII alone, and no absolute path of somebody's machine."""
    for path in DOCUMENTS:
        text = path.read_text()
        assert text.isascii()
        assert not re.search(r"(?<![\w.])/(home|root|tmp|work|mnt|Users)/", text)
