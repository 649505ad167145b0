# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""scripts/check_compat.py: its cases, what it makes of outputs, and one run without network."""

import sys

import check_compat
import compat_steps
import pytest
from compat_steps import Environment, Outcome, outcome_of
from helpers.idle_commands import IdleCommand, ended
from helpers.ranks import ROOT

from megatron_muon.patching import IncompatibleMegatronError, versions

OK, REFUSED = Outcome("ok"), Outcome("refused", "megatron-core: expected, found.")
WORKS = check_compat.Case("0.19.2", "0.3.0", "2.11.0")
PART = next(case for case in check_compat.CASES if case.is_partial)


def test_source_tree_without_a_wheel_is_in_the_table_and_said_to_be_one():
    """The tag core_v0.19.0 calls itself 0.19.1: its users were warned. pip cannot install it."""
    row, main = (row for row in versions.TABLE if row.tree)
    assert row.megatron_core == "0.19.1"
    assert versions.is_tested(row.versions)
    assert main.commit and not versions.is_tested(main.versions)
    text = next(line for line in versions.table_text().splitlines() if "0.19.1" in line)
    assert "works (source tree, no wheel: Megatron-LM's tag core_v0.19.0)" in text
    assert row is not versions.TABLE[0], "the first row is what the errors say to install"
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert "| 0.19.1 | 0.3.0 | 2.11.0 | works; a source tree" in page
    assert f"| 0.20.0 | 0.3.0 | 2.11.0 | works, tried at commit {main.commit}" in page


def test_outcome_tells_our_refusal_from_other_errors():
    """Through torchrun too, which prefixes what ranks print."""
    error = f"megatron_muon.patching.IncompatibleMegatronError: {IncompatibleMegatronError(['X.'])}"
    assert outcome_of(0, error) == OK
    assert outcome_of(1, f"Traceback\n{error}\nmore") == Outcome("refused", "X.")
    assert outcome_of(1, f"megatron_muon: {IncompatibleMegatronError(['X.'])}") == Outcome(
        "refused", "X."
    )
    prefixed = "\n".join(f"[rank0]: {line}" for line in error.splitlines())
    assert outcome_of(1, prefixed) == Outcome("refused", "X.")
    assert outcome_of(1, "a\nValueError: b\nc") == Outcome("failed", "ValueError: b")
    assert outcome_of(1, "") == Outcome("failed", "no output")


@pytest.mark.parametrize(
    ("case", "outcomes", "is_as_claimed"),
    [
        (WORKS, {"enable": OK, "train": OK}, True),
        (WORKS, {"enable": OK, "train": Outcome("failed", "x")}, False),
        (WORKS, {"enable": REFUSED, "smoke": Outcome("-")}, False),
        (WORKS, {"install": Outcome("failed", "x")}, False),
        (PART, {"enable": REFUSED, "smoke": Outcome("-"), "resume": Outcome("-")}, True),
        (PART, {"enable": REFUSED, "train": Outcome("failed", "x")}, False),
        (PART, {"enable": OK}, False),
        (check_compat.Case("0.18.2", "0.3.0", "2.11.0"), {"enable": REFUSED}, True),
    ],
)
def test_result_is_as_claimed_when_every_step_is(case, outcomes, is_as_claimed):
    """One step that differs fails the case; the table shows it with its reason."""
    result = check_compat.Result(case, outcomes)
    assert result.is_as_claimed == is_as_claimed
    table = check_compat.markdown([result], list(outcomes))
    assert f"| {'yes' if is_as_claimed else 'NO'} |" in table
    for step, outcome in outcomes.items():
        assert not outcome.reason or f"{step} {outcome.word}: {outcome.reason}" in table


def test_steps_after_a_refusal_are_left_out_but_the_launcher(monkeypatch, tmp_path):
    """The launcher has to refuse by itself what enable() refuses."""
    monkeypatch.setattr(
        compat_steps,
        "STEP_FUNCTIONS",
        {name: lambda _: REFUSED for name in compat_steps.STEP_FUNCTIONS},
    )
    environment = Environment(tmp_path / "python", tmp_path, {})
    outcomes = compat_steps.run_steps(environment, list(compat_steps.STEP_FUNCTIONS))
    words = {name: outcome.word for name, outcome in outcomes.items()}
    assert words == {
        **{"enable": "refused", "smoke": "-", "train": "refused"},
        **{"parity": "-", "resume": "-"},
    }


@pytest.mark.parametrize(
    ("resumed", "word"),
    [
        ({3: 1.0, 4: 0.9, 5: 0.8}, "ok"),
        ({3: 1.0, 4: 0.9, 5: 0.7}, "failed"),
        ({4: 0.9, 5: 0.8}, "failed"),
        ({}, "failed"),
        # Nothing was loaded, and the same seed gives the same losses.
        ({1: 3.0, 2: 2.0, 3: 1.0, 4: 0.85, 5: 0.8}, "failed"),
    ],
)
def test_resume_compares_with_the_run_that_never_stopped(monkeypatch, tmp_path, resumed, word):
    """The first and the last loss after loading."""
    losses = {"save": {1: 3.0, 2: 2.0, 3: 1.0, 4: 0.85, 5: 0.8}, "load": resumed}
    monkeypatch.setattr(Environment, "train", lambda self, name, *flags: (OK, losses[name]))
    environment = Environment(tmp_path / "python", tmp_path, {})
    assert compat_steps.STEP_FUNCTIONS["resume"](environment).word == word


@pytest.mark.parametrize(
    ("whole", "word"),
    [
        ({1: 4.0, 2: 3.0, 3: 2.0, 4: 1.5, 5: 1.0}, "ok"),
        ({1: 4.0, 2: 3.0, 3: 2.0, 4: 1.5, 5: 1.000002}, "failed"),
        ({1: 4.0}, "failed"),
    ],
)
def test_parity_compares_every_loss_with_ddp(monkeypatch, tmp_path, whole, word):
    """Within 5e-7, and only where both runs have all steps."""
    losses = {"sharded": {1: 4.0, 2: 3.0, 3: 2.0, 4: 1.5, 5: 1.0}, "whole": whole}
    monkeypatch.setattr(Environment, "train", lambda self, name, **options: (OK, losses[name]))
    environment = Environment(tmp_path / "python", tmp_path, {})
    assert compat_steps.STEP_FUNCTIONS["parity"](environment).word == word


def test_checkout_without_megatron_is_refused(tmp_path, capsys):
    """A wrong folder would otherwise check the installed release, and say so of the checkout."""
    with pytest.raises(SystemExit):
        check_compat.main(["--megatron", str(tmp_path)])
    assert "expected a folder with megatron/core" in capsys.readouterr().err


def test_table_gives_one_reason_for_steps_that_share_it():
    """What enable() and the launcher say alike is printed once, and what was found below it."""
    result = check_compat.Result(PART, {"enable": REFUSED, "train": REFUSED}, ("found it",))
    table = check_compat.markdown([result], ["enable", "train"])
    notes = table.partition("\n\n")[2]
    title = f"0.19.2 / 0.3.0 / 2.11.0 / {PART.transformer_engine}"
    assert notes == f"- {title}, enable, train refused: {REFUSED.reason}\n  - found it"


def test_unknown_case_is_refused(capsys):
    """A typo in --only would otherwise check nothing and succeed."""
    with pytest.raises(SystemExit):
        check_compat.main(["--only", "0.42"])
    assert "expected text of a case, got 0.42" in capsys.readouterr().err


def test_smoke_tests_are_there():
    """A file that moved would fail the step in every environment."""
    for name in compat_steps.SMOKE_TESTS:
        assert (ROOT / "tests" / "unit_tests" / f"{name}.py").is_file(), name


HERE = IdleCommand(
    (sys.executable, str(ROOT / "scripts" / "check_compat.py"), "--here", "--steps", "train")
)


def idle_commands(name, params):
    """Yield the check of the environment of the tests."""
    if name == test_check_here_trains.__name__:
        yield HERE


@pytest.mark.slow
def test_check_here_trains():
    """The command of docs/compatibility.md, in the environment of the tests."""
    done = ended(HERE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("| as it is | ok | yes |")
