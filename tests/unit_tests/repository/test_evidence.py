# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The report on a machine: pieces that fail, hang or are killed, and verdicts on promises."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from evidence import promises, report, verdicts
from evidence.command import Runner
from evidence.machine import Machine
from evidence.nodes import Line, Place
from evidence.pieces import Piece, list_pieces
from evidence.promises import PROMISES
from evidence.records import FAILED, NOT_TRIED, PASSED, Evidence, Record
from evidence.verdicts import FAILS, HOLDS, Results
from helpers.commands import run_command
from helpers.ranks import ROOT


def _machine(gpus: int = 2, nodes: int = 1) -> Machine:
    return Machine("a card" if gpus else "a CPU", gpus, nodes, "1", {"torch": "2"}, "abc")


def _results(data: Any = None, log: str = "", verdict: str = PASSED) -> Results:
    return Results(_machine(), Record(verdict, data=data), log)


def _step(**changes: Any) -> dict[str, Any]:
    """Return a row of each peer of fsdp2_step.py, some values of ours changed."""
    ours = {"bytes_by_collective": {"allreduce": 8, "alltoallbase": 100}, "plan_bytes": 100}
    ours |= {"kept_bytes": [50, 52], "update_error": 0.01, **changes}
    adamw = {"kept_bytes": [100, 104]}
    peers = {"dion": {"over_ours": 0.9, "update_error": 0.4}, "DistMuon": {"error": "no such"}}
    torch = {"torch.optim.Muon": {"over_ours": 9.0, "update_error": 0.01}}
    return {"layouts": {"even": {"megatron_muon": ours, "AdamW": adamw, **peers, **torch}}}


def _parity(**changes: Any) -> dict[str, Any]:
    row = {"relative": 1e-6, "tolerance": {"rtol": 1e-5}, "iterations": 8, "holds": True}
    skipped = {"skipped": "needs four ranks"}
    return {"cases": {"bf16": {**row, **changes}, "hsdp": skipped}}


def _memory(holds: bool) -> dict[str, Any]:
    return {"rows": [{"optimizer": "Muon", "peak_bytes": 5, "planned_bytes": 6, "holds": holds}]}


def _killed(**changes: Any) -> dict[str, Any]:
    row = {"others_ended": True, "seconds_until_all_ended": 1.0, "message": "Signal 9"}
    row |= {"holds": True, "equal": True, "resumed_at": 4, "largest_difference": 0.5, **changes}
    return {"cases": {"step": row, "restart": row}}


BITS, RATES = "step of Muon, fp32 messages ... PASS: ", "TFLOP/s by side 64: 9, 128: "
KILLED = "| synchronous | rank 0 killed in save 3 | 2 | [-9, 1] |"
CASES = [
    (verdicts.bits, _results(log=f"{BITS}equal bits\n"), HOLDS),
    (verdicts.bits, _results(log=f"{BITS}differs by 2.0e-03 of the norm\n"), FAILS),
    (verdicts.tests, _results(log="=== 12 passed, 3 skipped in 9.10s ==="), HOLDS),
    (verdicts.tests, _results(log="= 1 failed, 2 passed in 1.0s =", verdict=FAILED), FAILS),
    (verdicts.losses, _results(_parity()), HOLDS),
    (verdicts.losses, _results(_parity(holds=False)), FAILS),
    (verdicts.losses, _results({"cases": {"bf16": {"error": "it ended"}}}), FAILS),
    (verdicts.sent_bytes, _results(_step()), HOLDS),
    (verdicts.sent_bytes, _results(_step(plan_bytes=101)), FAILS),
    (verdicts.states, _results(_step()), HOLDS),
    (verdicts.states, _results(_step(kept_bytes=[100, 104])), FAILS),
    (verdicts.updates, _results(_step()), HOLDS),
    (verdicts.updates, _results(_step(update_error=0.3)), FAILS),
    (verdicts.beside("dion", is_faster=True), _results(_step()), HOLDS),
    (verdicts.beside("dion", is_faster=False), _results(_step()), FAILS),
    (verdicts.beside("torch.optim.Muon", is_faster=False), _results(_step()), HOLDS),
    (verdicts.memory, _results(_memory(True)), HOLDS),
    (verdicts.memory, _results(_memory(False)), FAILS),
    (verdicts.rates, _results(log=f"{RATES}90; plans assume 145 for 128"), HOLDS),
    (verdicts.rates, _results(log=f"{RATES}9; plans assume 145 for 128"), FAILS),
    (
        verdicts.rates,
        _results(log=f"{RATES}90; plans assume 145 for 128\ngbps 9, plans assume 450\n"),
        FAILS,
    ),
    (verdicts.killed_save, _results(log=f"{KILLED} equal |\n"), HOLDS),
    (verdicts.killed_save, _results(log=f"{KILLED} losses |\n{KILLED} equal |\n"), FAILS),
    *(
        (
            verdicts.overlap,
            _results({"optimizers": {"owner": {"mean": {"hidden_share": share}}}}),
            v,
        )
        for share, v in ((0.9, HOLDS), (0.1, FAILS))
    ),
    *(
        (
            verdicts.layer_wise,
            _results({"peers": {name: {"over_owner": r} for name in ("all_gather", "layer_wise")}}),
            v,
        )
        for r, v in ((1.5, HOLDS), (0.9, FAILS))
    ),
    *(
        (
            verdicts.launches,
            _results({"llama3-8b-64": {"own_launches": 10, "engine_launches": n}}),
            v,
        )
        for n, v in ((20, HOLDS), (21, FAILS))
    ),
    (verdicts.killed_rank, _results(_killed()), HOLDS),
    (verdicts.killed_rank, _results(_killed(others_ended=False)), FAILS),
    (verdicts.killed_rank, _results(_killed(message="")), FAILS),
    (verdicts.killed_rank, _results({"cases": {"step": {"error": "a run failed"}}}), FAILS),
    (verdicts.restart, _results(_killed()), HOLDS),
    (verdicts.restart, _results(_killed(holds=False, equal=False)), FAILS),
]


@pytest.mark.parametrize(("judge", "results", "expected"), CASES)
def test_verdict_follows_from_the_result(judge, results, expected):
    """Each verdict holds or fails by the figures of its piece."""
    assert judge(results).verdict == expected


def _evidence(records: dict[str, Record], gpus: int) -> Evidence:
    return Evidence(_machine(gpus), records, [])


def test_cpu_ranks_claim_nothing_about_gpus(tmp_path):
    """CPU ranks leave a promise about GPUs untried, whatever they measured."""
    records = {"step": Record(PASSED, data=_step()), "parity": Record(PASSED, data=_parity())}
    for gpus, expected in ((2, {HOLDS}), (0, {HOLDS, NOT_TRIED})):
        evidence = _evidence(records, gpus)
        found = {p.sentence: promises.judge(p, evidence, tmp_path) for p in PROMISES}
        (dion,) = (v for sentence, v in found.items() if "600 matrices" in sentence)
        (losses,) = (v for sentence, v in found.items() if "4 bytes of state" in sentence)
        assert {dion.verdict, losses.verdict} == expected
        assert losses.verdict == HOLDS


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (None, "check has not run"),
        (Record(NOT_TRIED, "no time"), "check: no time"),
        (Record(FAILED, "exit status 1"), "check failed, exit status 1: it printed no such line"),
    ],
)
def test_promise_is_not_tried_where_its_piece_tells_nothing(record, reason, tmp_path):
    """A promise whose piece did not run, or broke, is not tried."""
    records = {} if record is None else {"check": record}
    verdict = promises.judge(PROMISES[0], _evidence(records, 2), tmp_path)
    assert verdict == (NOT_TRIED, reason)


@pytest.mark.parametrize(
    ("judge", "data", "reason"),
    [
        (verdicts.beside("DistMuon", is_faster=True), _step(), "DistMuon: no such"),
        (verdicts.restart, _killed(equal=False), "within the rounding"),
        (verdicts.losses, {"cases": {"hsdp": {"skipped": "two ranks"}}}, "no case ran"),
        (verdicts.memory, None, "it wrote no rows"),
    ],
)
def test_results_that_do_not_tell_are_not_judged(judge, data, reason):
    """A peer that is absent is neither faster nor slower, and losses that are near no bits."""
    with pytest.raises(verdicts.NothingFoundError, match=reason):
        judge(_results(data))


@pytest.mark.parametrize("is_well", [True, False])
def test_broken_promise_fails_the_run_and_a_faster_peer_does_not(is_well, tmp_path):
    """A run fails by a promise of this package, and not by a peer that wins or loses."""
    data = _step(plan_bytes=100 if is_well else 101)
    data["layouts"]["even"]["dion"]["over_ours"] = 7.0
    losses = _parity(losses={"ddp": [3.0, 2.5], "fsdp": [3.0, 2.6]})
    records = {"step": Record(PASSED, data=data), "parity": Record(PASSED, data=losses)}
    assert report.write(_evidence(records, 2), tmp_path) == is_well
    assert (tmp_path / "parity.svg").read_text().count("<polyline") == 2
    text = (tmp_path / "report.md").read_text()
    assert "| dion | **fails** |" in text and ("| bytes | **fails** |" in text) != is_well


def test_promises_stand_in_their_documents():
    """Every promise is a sentence of its document, and a piece shows it, if any."""
    names = {piece.name for piece in list_pieces(_machine())}
    for promise in PROMISES:
        text = " ".join((ROOT / promise.document).read_text().split())
        assert " ".join(promise.sentence.split()) in text, promise
        assert promise.piece in {"", *names}


def test_document_lists_the_pieces_and_their_minutes():
    """The table of pieces in docs/gpus.md has names, minutes and order of the list."""
    text = (ROOT / "docs" / "gpus.md").read_text()
    listed = re.findall(r"^\| `(\w+\*?)` \| .* \| (\d+)(?: each)? \|$", text, re.M)
    minutes = {piece.name: f"{piece.minutes:g}" for piece in list_pieces(_machine())}
    tests = {minutes.pop(name) for name in [*minutes] if name.startswith("tests_")}
    assert dict(listed).pop("tests_*") in tests and len(tests) == 1
    assert [row for row in listed if row[0] != "tests_*"] == [*minutes.items()]


@pytest.mark.parametrize(("gpus", "nodes"), [(0, 1), (1, 1), (2, 1), (8, 1), (8, 4)])
def test_pieces_name_files_that_exist(gpus, nodes):
    """Pieces for any number of GPUs run files of the repository, all ranks of a node each."""
    machine = _machine(gpus, nodes)
    for piece in list_pieces(machine):
        files = [word for word in piece.command if word.startswith(f"{ROOT}/")]
        assert all(Path(file).exists() for file in files)
        assert str(ROOT) not in piece.shown_command and sys.executable not in piece.shown_command
        if piece.spans_nodes:
            number = piece.command.index("--nproc-per-node") + 1
            assert piece.command[number] == str(machine.gpus or 2)
    by_name = {piece.name: piece for piece in list_pieces(machine)}
    assert bool(by_name["overlap"].missing) == (gpus == 1)
    assert by_name["device"].missing == ("" if gpus else "no GPU")


def test_lost_node_leaves_the_pieces_of_one_node(tmp_path):
    """After a node is gone, pieces that span nodes are not tried, and all others run."""
    here, there = socket.socketpair()
    runner = Runner(tmp_path, Place(2, 0, "here", 1), [Line(here)])
    there.close()
    spanning, alone = (Piece("p", ("true",), 1, spans_nodes=spans) for spans in (True, False))
    found = [runner.run(piece, 0, 10).verdict for piece in (spanning, spanning, alone)]
    assert found == [PASSED, NOT_TRIED, PASSED]


PIECES = """
import os, sys
from evidence import command
from evidence.machine import Machine
from evidence.pieces import Piece
# No look for GPUs, which imports torch.
command.find_machine = lambda nodes: Machine("a CPU", 0, nodes, "", {}, "abc")
count = "from pathlib import Path; import sys; "
count += "file = Path(sys.argv[1]); file.open('a').write(sys.argv[2])"

def pieces(machine, torchrun, peers):
    def counted(name, *more, **options):
        words = (sys.executable, "-c", count, os.environ["COUNTS"], name + " ")
        return Piece(name, words, 1, **options)
    sleep = f"setsid sleep {os.environ['SLEEP']} &"
    hang = ("bash", "-c", f"{sleep} {sleep} wait")
    return [
        counted("first"),
        Piece("fails", (sys.executable, "-c", "print('| a |'); raise SystemExit(3)"), 1),
        Piece("hangs", hang, float(os.environ["MINUTES"])),
        counted("everywhere", spans_nodes=True),
        Piece("long", ("true",), 1000),
        Piece("absent", ("true",), 1, "no GPU"),
    ]

sys.exit(command.main(sys.argv[1:], pieces))
"""


# As no other process sleeps.
SLEEP = str(100_000 + os.getpid())


def _sleepers() -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes() == f"sleep\0{SLEEP}\0".encode():
                found.append(int(folder.name))
        except OSError:  # it ended
            pass
    return found


def _start(tmp_path: Path, *flags: str, **variables: str) -> subprocess.Popen[str]:
    paths = [str(ROOT / "scripts"), str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    env = {"MINUTES": "0.05", **env, "COUNTS": str(tmp_path / "counts"), "SLEEP": SLEEP}
    command = [sys.executable, "-c", PIECES, "--minutes", "30", *flags]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _wait_for(condition: Any) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.cpu_only
def test_failed_hanging_and_killed_pieces_are_rows(tmp_path):
    """A piece that fails or hangs is a row, and a run that was killed goes on where it was."""
    folder = tmp_path / "out"
    # Killed before its limit, however slow the machine is.
    first = _start(tmp_path, "--out", str(folder), MINUTES="9")
    _wait_for(lambda: len(_sleepers()) == 2)
    first.kill()
    first.communicate()
    assert len(_sleepers()) == 2, "the kill leaves them"
    second = _start(tmp_path, "--out", str(folder))
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 1, output
    assert _sleepers() == []
    assert (tmp_path / "counts").read_text() == "first everywhere "
    records = json.loads((folder / "evidence.json").read_text())["records"]
    found = {name: (record["verdict"], record["detail"]) for name, record in records.items()}
    assert found == {
        "first": ("passed", ""),
        "fails": ("failed", "exit status 3"),
        "hangs": ("ended", "after 9 s"),
        "everywhere": ("passed", ""),
        "long": ("not tried", "no time: 1000 min expected"),
        "absent": ("not tried", "no GPU"),
    }
    text = (folder / "report.md").read_text()
    assert all(f"| {name} | {verdict}" in text for name, (verdict, _) in found.items())
    assert "\n| a |\n" in text and "CPU ranks with tiny models" in text
    again = _start(tmp_path, "--out", str(folder), "--only", "first")
    again.communicate(timeout=300)
    assert (tmp_path / "counts").read_text() == "first everywhere first "
    assert report.tables_of_folders([folder]).startswith("### 2 CPU ranks")


@pytest.mark.slow
@pytest.mark.cpu_only
def test_nodes_run_what_the_first_one_names(tmp_path):
    """A piece that spans nodes runs on each of them, all others on the first one alone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    flags = ("--out", str(tmp_path / "out"), "--only", "first", "everywhere")
    nodes = [_start(tmp_path, *flags, NODE_RANK=str(rank), **place) for rank in (1, 0)]
    outputs = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert (tmp_path / "counts").read_text() == "first everywhere everywhere "
    assert "# Evidence: 4 CPU ranks" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.cpu_only
def test_script_reports_on_cpu_ranks(tmp_path):
    """The script runs a piece of its own on CPU ranks, and reports what it shows."""
    script = str(ROOT / "scripts" / "evidence.sh")
    flags = ("--out", "out", "--minutes", "30", "--only", "check")
    env = {"MEGATRON_MUON_PYTHON": sys.executable}
    done = run_command("bash", script, *flags, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| bits of a step | **holds** | equal bits |" in text and "rates: " in text
    assert "needs a GPU, these are CPU ranks" in text
