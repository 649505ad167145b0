# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu_checks.py: its checks without a GPU, its runner, and that a check can fail."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu_checks import command, newton_schulz_bits, norms
from gpu_checks.catalogue import CHECKS, Check
from gpu_checks.ranks import run_ranks
from gpu_checks.report import Context, Findings, NotPossibleError, Report, read_findings
from gpu_checks.runner import Runner
from gpu_checks.tables import Line, document
from helpers import ranks
from helpers.idle_commands import FOLDER, IdleCommand, ended
from helpers.ranks import ROOT

from megatron_muon.newton_schulz.call import Call
from megatron_muon.newton_schulz.standard import Standard

SCRIPT = ROOT / "scripts" / "gpu_checks.py"


def passes(context: Context, report: Report) -> None:
    """A check that finds what it expects, and leaves a part out."""
    report.expect(True, "never said")
    report.figure(f"on {context.device}")
    report.leave_out("the rest", "expected a card, found none")


def fails(context: Context, report: Report) -> None:
    """A check that finds something else, and goes on."""
    report.expect(False, "expected 2, got 3")
    report.figure("later")


def raises(context: Context, report: Report) -> None:
    """A check that ends with an exception."""
    print("printed before")
    raise ValueError("expected a number")


def hangs(context: Context, report: Report) -> None:
    """A check that waits for a process in a session of its own, as torchrun's ranks are."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    report.data("pid", process.pid)
    process.wait()


def crashes(context: Context, report: Report) -> None:
    """A check whose process dies."""
    report.figure("before the crash")
    os.kill(os.getpid(), signal.SIGKILL)


def is_not_possible(context: Context, report: Report) -> None:
    """A check that lacks something."""
    raise NotPossibleError("expected a thing, found none")


def lacks_a_package(context: Context, report: Report) -> None:
    """A check that imports what is not there."""
    import no_such_package  # noqa: F401


def has_a_rank_that_hangs(context: Context, report: Report) -> None:
    """A check of two ranks, one of which never ends."""
    run_ranks(context, 2, _hang_on_rank_1, timeout_s=2.0)


def has_a_rank_that_fails(context: Context, report: Report) -> None:
    """A check of two ranks, one of which waits for the other."""
    run_ranks(context, 2, _fail_on_rank_1, timeout_s=60.0)


def has_results_of_ranks(context: Context, report: Report) -> None:
    """A check of two ranks that end well."""
    report.expect(run_ranks(context, 2, _own_rank, timeout_s=60.0) == [0, 1], "wrong results")


def has_ranks_as_on_a_gpu(context: Context, report: Report) -> None:
    """A check whose ranks are not forked: CUDA cannot be."""
    on_gpu = Context("cuda", context.limit_s)
    report.expect(run_ranks(on_gpu, 2, _own_rank, timeout_s=60.0) == [0, 1], "wrong results")


def replaces_collectives(context: Context, report: Report) -> None:
    """A check of two ranks on which gloo fails at first."""
    found = run_ranks(context, 2, _replace_collectives, timeout_s=60.0)
    report.expect(
        found == [[["all_reduce", "all_to_all_single"], [], [2, 4], [0, 1]]] * 2, f"{found}"
    )


def _replace_collectives() -> list:
    """Return what was replaced, what fails afterwards, and results of what was replaced."""
    import torch.distributed as dist
    from gpu_checks import bounce

    dist.init_process_group("gloo")
    for name in ("all_reduce", "all_to_all_single"):
        setattr(dist, name, _fails_once(getattr(dist, name)))
    cpu = torch.device("cpu")
    replaced = bounce.replace_missing(cpu)
    reduced, received = torch.tensor([1, 2]), torch.zeros(2, dtype=torch.int64)
    dist.all_reduce(reduced, group=dist.group.WORLD)
    own = torch.full((2,), _own_rank())
    dist.all_to_all_single(received, own, [1, 1], [1, 1], group=None, async_op=True).wait()
    return [replaced, bounce.replace_missing(cpu), reduced.tolist(), received.tolist()]


def _fails_once(original):
    calls = []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("not for this device")
        return original(*args, **kwargs)

    return call


def _own_rank() -> int:
    return int(os.environ["RANK"])


def _hang_on_rank_1() -> None:
    if _own_rank() == 1:
        time.sleep(600)


def _fail_on_rank_1() -> None:
    if _own_rank() == 1:
        raise RuntimeError("rank 1 has had enough")
    time.sleep(600)


def _check(function: str, limit_s: float = 60.0, **more) -> Check:
    return Check("0", function, "a stand-in", f"{__name__}:{function}", limit_s, **more)


@pytest.fixture
def runner() -> Runner:
    """Return a runner whose processes come from the server of the other tests."""
    ranks._context()
    return Runner("cpu")


@pytest.mark.parametrize(
    ("function", "word", "text"),
    [
        ("passes", "passed", "on cpu; not possible here: the rest: expected a card, found none"),
        ("fails", "failed", "expected 2, got 3; later"),
        ("raises", "failed", "ValueError: expected a number"),
        ("crashes", "failed", "expected an end, got a crash with SIGKILL; before the crash"),
        ("is_not_possible", "not possible here", "expected a thing, found none"),
        ("lacks_a_package", "failed", "expected the package no_such_package, got none. Put it on"),
        ("has_results_of_ranks", "passed", ""),
        ("has_ranks_as_on_a_gpu", "passed", ""),
        ("replaces_collectives", "passed", ""),
        ("has_a_rank_that_hangs", "failed", "within 2 s, got ranks [1] still running"),
        pytest.param(
            "has_a_rank_that_fails",
            "failed",
            "rank 1 of 2: RuntimeError: rank 1 has had enough",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_runner_has_a_line_for_each_end_of_a_check(runner, function, word, text):
    """Whatever ends a check, its line says what it was, and what was found before."""
    line = runner.run(_check(function))
    assert line.word == word, line
    assert text in line.text
    assert ("printed before" in line.output) == (function == "raises")


def test_runner_ends_a_check_that_hangs_with_all_its_processes(runner):
    """Also those that torchrun puts into sessions of their own."""
    line = runner.run(_check("hangs", limit_s=4.0))
    assert line.word == "failed" and line.text == "expected an end within 4 s, got none"
    pid = line.findings.data["pid"]
    deadline = time.monotonic() + 30.0
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    try:
        # Killed and waited for by nobody it is a zombie.
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_runner_goes_on_after_a_crash_and_keeps_timed_checks_apart(runner):
    """The other checks are run, those that need to be alone last."""
    alone = _check("passes", is_alone=True)
    lines = list(runner.run_all([alone, _check("crashes"), _check("fails")]))
    assert sorted(line.word for line in lines[:2]) == ["failed", "failed"]
    assert lines[2].check is alone and lines[2].word == "passed"


def test_runner_runs_nothing_that_needs_a_gpu_on_a_cpu_and_nothing_after_its_limit():
    """Both say so in their lines."""
    line = Runner("cpu").run(_check("fails", needs_gpu="it reads a card"))
    assert (line.word, line.text) == ("not possible here", "it reads a card")
    line = Runner("cpu", limit_s=0.0).run(_check("passes"))
    assert line.word == "failed" and "got none left" in line.text


def test_document_has_a_row_for_each_line_and_the_tables_of_figures():
    """Bars and line ends in a text stay inside of its cell."""
    findings = Findings(problems=["a | b\nc"], tables=[("Sizes", ["n"], [["1"], ["2"]])])
    line = Line(_check("fails"), "failed", 1.4, findings)
    text = document("Title", {"card": "none"}, "python3 x.py", [line])
    assert text.startswith("# Title\n\n    python3 x.py\n\n|  |  |\n| --- | --- |\n| card | none |")
    assert "| 0 fails | a stand-in | failed | a \\| b c | 1 |" in text
    assert text.endswith("## Sizes\n\n| n |\n| --- |\n| 1 |\n| 2 |\n")


@pytest.mark.parametrize(("function", "status"), [("passes", 0), ("fails", 1)])
def test_exit_status_says_whether_a_check_failed(monkeypatch, tmp_path, capsys, function, status):
    """And both files are written."""
    ranks._context()
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    monkeypatch.setattr(command, "CHECKS", (_check(function),))
    assert command.main(["--cpu", "--out", str(tmp_path)]) == status
    assert f"| 0 {function} | a stand-in |" in capsys.readouterr().out
    assert f"| 0 {function} |" in (tmp_path / "gpu_checks.md").read_text()
    data = json.loads((tmp_path / "gpu_checks.json").read_text())
    assert data["machine"]["torch"] == torch.__version__
    assert [each["word"] for each in data["checks"]] == ["failed" if status else "passed"]


def test_python_without_the_packages_is_told_which_are_missing(tmp_path):
    """A bare Python lists the checks, and names what to install."""
    bare = [sys.executable, "-S", "-E", str(SCRIPT)]
    env = {"PATH": os.environ["PATH"]}
    listed = subprocess.run([*bare, "--list"], capture_output=True, text=True, env=env)
    assert listed.returncode == 0, listed.stderr
    assert len(listed.stdout.splitlines()) == len(CHECKS)
    done = subprocess.run([*bare, "--cpu"], capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert "expected torch, megatron-core, emerging-optimizers" in done.stderr


def test_gpu_is_asked_for_where_there_is_none():
    """Without --cpu the checks are those of a card."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command_line = [sys.executable, str(SCRIPT), "--only", "elementwise"]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "expected a GPU that torch can use, got none. Use --cpu" in done.stderr


def test_every_check_has_a_name_of_its_own_and_its_numbers_are_one_to_ten():
    """--only takes names."""
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert {check.number for check in CHECKS} == {str(number) for number in range(1, 11)}


# Limits are against hangs: idle commands may take long.
COMMAND = (sys.executable, str(SCRIPT), "--limit-s", "1700", "--out", FOLDER)
ON_A_CPU = IdleCommand((*COMMAND, "--cpu"))
FOR_A_GPU = [check.name for check in CHECKS if check.needs_gpu]
REHEARSAL = IdleCommand((*COMMAND, "--rehearse", "--only", *FOR_A_GPU))


def idle_commands(name, params):
    """Yield the checks of a CPU, and the rehearsal of others."""
    if name == test_checks_without_a_gpu_pass.__name__:
        yield ON_A_CPU
    if name == test_code_of_the_checks_that_need_a_gpu_runs.__name__:
        yield REHEARSAL


@pytest.mark.slow
@pytest.mark.ranks
def test_checks_without_a_gpu_pass():
    """The command of docs/performance.md; what needs a GPU says why it is not possible here."""
    done = ended(ON_A_CPU)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((done.folder / "gpu_checks.json").read_text())
    words = {each["check"]["name"]: each["word"] for each in data["checks"]}
    for check in CHECKS:
        assert words[check.name] == ("not possible here" if check.needs_gpu else "passed")
    text = (done.folder / "gpu_checks.md").read_text()
    for row in text.splitlines():
        assert not row.startswith("| 1") or row.split(" | ")[3], f"expected a reason: {row}"
    assert "    python3 scripts/gpu_checks.py --cpu" in text
    for name in ("card", "torch", "megatron-core", "emerging-optimizers", "transformer-engine"):
        assert f"| {name} | " in text


@pytest.mark.slow
@pytest.mark.ranks
def test_code_of_the_checks_that_need_a_gpu_runs():
    """With tiny sizes on a CPU: a name that is gone would otherwise be found on a GPU alone."""
    done = ended(REHEARSAL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| passed |") == len(FOR_A_GPU)
    assert "the figures mean nothing" in (done.folder / "gpu_checks.md").read_text()


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--out", str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.fixture
def report(tmp_path) -> Report:
    """Return an empty report."""
    return Report(tmp_path / "findings.json")


CPU = Context("cpu", 60.0)


class _SumsInFp32:
    """Sums of squares as they would be without float64."""

    def __init__(self, device: torch.device) -> None:
        pass

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.square().sum().double() for tensor in tensors]


def test_check_of_norms_fails_for_sums_in_fp32(monkeypatch, report, tmp_path):
    """They are off, and depend on how a matrix is cut."""
    monkeypatch.setattr(norms, "SumOfSquares", _SumsInFp32)
    norms.check(CPU, report)
    problems = read_findings(tmp_path / "findings.json").problems
    assert any("sum is off by" in problem for problem in problems)
    assert any("cut into" in problem for problem in problems)


@pytest.mark.parametrize(
    ("breaks", "problem"),
    [
        (lambda stack, found: found * 1.01, "a stack of one differs from emerging-optimizers'"),
        (lambda stack, found: found + stack[-1:] * 1e-2, "slots or neighbours change the bits"),
        (
            lambda stack, found: found if len(stack) == 1 else found * 1.2,
            "a stack differs from singles by",
        ),
    ],
)
def test_check_of_bits_fails_for_other_bits(monkeypatch, report, tmp_path, breaks, problem):
    """Of one matrix, of one beside others, of a stack."""
    original = Standard.run

    def broken(self, stack: torch.Tensor, call: Call) -> torch.Tensor:
        result = original(self, stack, call)
        return breaks(stack, result) if call.is_normalized else result

    monkeypatch.setattr(Standard, "run", broken)
    newton_schulz_bits.check(CPU, report)
    assert any(problem in each for each in read_findings(tmp_path / "findings.json").problems)
