# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The documents: links lead somewhere, commands have the flags they name, plans are today's."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.ranks import ROOT

from megatron_muon.mcore.unsupported import UNSUPPORTED
from megatron_muon.tools.plan.command import _parser, main

DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "patches" / "README.md",
    ROOT / "tests" / "functional" / "README.md",
]
# Their flags are Megatron's, pytest's, or those of a script that they call.
PASSES_FLAGS_ON = (
    "pretrain_gpt.py",
    "scripts/quickstart.sh",
    "scripts/test.sh",
    "functional/run.sh",
)


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=ids)
def test_links_and_paths_lead_somewhere(path: Path) -> None:
    """Links name files and headings, and paths in backticks folders of the repository."""
    text = path.read_text()
    for target in re.findall(r"\]\(([^)\s:]+)\)", text):
        file, _, fragment = target.partition("#")
        linked = path.parent / file if file else path
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
        assert fragment in {"", *slugs}, f"{target}: no such heading"
    for quoted in re.findall(r"`([\w.-]+/[\w./-]+)`", text):
        if quoted.split("/")[0] in {"benchmarks", "docs", "megatron_muon", "scripts", "tests"}:
            assert (ROOT / quoted).exists(), quoted


def test_documents_are_in_the_navigation_of_the_site() -> None:
    """Every document has a line in the navigation of the site."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [name for name in map(ids, DOCUMENTS) if f": {name}\n" not in navigation] == []


def commands() -> Iterator[tuple[str, str]]:
    """Yield document and command, on one line, of all code blocks that are indented."""
    for path in DOCUMENTS:
        text = re.sub(r" \\\n +", " ", path.read_text())
        for line in re.findall(r"^    ((?:bash|torchrun|\.venv/bin/\w+) .*)$", text, re.MULTILINE):
            yield ids(path), re.split(r"\s+# ", line)[0]


@pytest.mark.parametrize(("document", "command"), list(commands()))
def test_commands_have_the_flags_that_they_name(document: str, command: str) -> None:
    """Commands of the documents name scripts and options that exist."""
    words = shlex.split(command)
    if any(name in command for name in PASSES_FLAGS_ON):
        return
    if "megatron_muon.plan" in words:
        _parser().parse_args(words[words.index("megatron_muon.plan") + 1 :])
        return
    # python -m megatron_muon.NAME runs megatron_muon/tools/NAME/command.py.
    modules = {
        word: f"megatron_muon/tools/{word.partition('.')[2]}/command.py"
        for word in words
        if word.startswith("megatron_muon.")
    }
    modules |= dict.fromkeys(
        ("scripts/evidence", "scripts/evidence.sh"), "scripts/evidence/command.py"
    )
    *_, script = (word for word in words if (ROOT / modules.get(word, word)).is_file())
    source = (ROOT / modules.get(script, script)).read_text()
    options = [word for word in words[words.index(script) :] if word.startswith("--")]
    assert [word for word in options if f'"{word}"' not in source] == []


PLAN_ROW = re.compile(r"\| `(--preset .*?)` \| (.*) \|")
# Plans of the smallest model are always tested.
PLAN_ROWS = [
    pytest.param(*row, marks=[] if "llama3-8b" in row[0] else pytest.mark.slow)
    for row in PLAN_ROW.findall((ROOT / "docs" / "performance.md").read_text())
    if "--dp 2048" not in row[0]  # half a minute
]


@pytest.mark.parametrize(("flags", "figures"), PLAN_ROWS, ids=lambda value: value)
def test_plans_of_performance_are_those_of_today(flags: str, figures: str, capsys) -> None:
    """Each row of the table of plans is what its command prints."""
    assert main([*shlex.split(flags), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    sent, *most = (
        [rank[name] for rank in report["ranks"]]
        for name in ("bytes_sent", "newton_schulz_ns", "step_ns", "staging_bytes")
    )
    newton_schulz_ns, step_ns, staging_bytes = map(max, most)
    assert figures.split(" | ") == [
        f"{len(report['matrices']):,}",
        f"{report['busiest_over_ideal']:.2f}",
        f"{report['moved_fraction']:.1%}",
        f"{sum(sent) / len(sent) / 1e6:,.0f}",
        f"{newton_schulz_ns / 1e6:.1f}",
        f"{step_ns / 1e6:.1f}",
        f"{staging_bytes / 1e9:.1f}",
    ]


def test_refused_settings_are_documented() -> None:
    """A setting that is refused has its row in docs/support.md, with reason and advice."""
    documented = (ROOT / "docs" / "support.md").read_text().replace("`", "")
    rows = [f"| {row.flag} | {row.reason} | {row.instead} |" for row in UNSUPPORTED]
    assert [row for row in rows if row.replace("`", "") not in documented] == []
