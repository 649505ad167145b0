# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The commands that measure promises of the documents read and judge numbers as they say."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import killed_rank
import overlap
import parity
import peak_memory
import pytest
from helpers.commands import run_command, train_forked
from helpers.ranks import ROOT, launch
from torch.autograd import DeviceType

BENCHMARKS = ROOT / "benchmarks"


def test_overlap_is_the_time_of_messages_under_computation():
    """Spans that overlap count once, and a message is hidden while anything is computed."""
    messages = [(10.0, 20.0), (15.0, 30.0), (50.0, 60.0)]
    # The second one ends inside of the first one, and the last one after all messages.
    compute = [(0.0, 12.0), (5.0, 8.0), (28.0, 52.0), (58.0, 70.0)]
    assert overlap.union([*messages, (30.0, 31.0)]) == [(10.0, 31.0), (50.0, 60.0)]
    assert overlap.length(messages) == 30.0
    # 2 of the first message, 2 of the second, and 2 at each end of the last.
    assert overlap.common(messages, compute) == overlap.common(compute, messages) == 8.0
    found = overlap.figures(overlap.Spans(messages, compute[:1], compute))
    assert found == {
        "step_ms": 0.07, "message_ms": 0.03, "hidden_ms": 0.008,
        "hidden_share": pytest.approx(8 / 30), "exposed_ms": pytest.approx(0.022),
        "products_ms": 0.012,
    }  # fmt: skip


def test_step_without_messages_has_no_share_that_is_hidden():
    """A rank alone sends nothing, and a step without events lasts no time."""
    found = overlap.figures(overlap.Spans([], [(0.0, 1000.0)], [(0.0, 1000.0)]))
    assert (found["message_ms"], found["hidden_share"], found["step_ms"]) == (0.0, None, 1.0)
    assert overlap.figures(overlap.Spans([], [], []))["step_ms"] == 0.0


def _event(name: str, begin: float, *, on_gpu: bool, is_range: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=begin, end=begin + 1),
        device_type=DeviceType.CUDA if on_gpu else DeviceType.CPU,
        is_user_annotation=is_range,
    )


def test_kernels_of_a_gpu_are_sorted_by_name():
    """Kernels of NCCL are messages; copies, and ranges drawn over kernels, are nothing."""
    names = [
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT",
        "_move",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
    ]
    events = [_event(name, 10.0 * i, on_gpu=True) for i, name in enumerate(names)]
    events += [_event("Muon.orthogonalize", 90.0, on_gpu=True, is_range=True)]
    events += [_event("nccl:all_to_all", 90.0, on_gpu=True)]
    events += [_event("aten::mm", 90.0, on_gpu=False)]
    found = overlap.spans_of(events, on_gpu=True)
    assert found.messages == [(0.0, 1.0), (10.0, 11.0)]
    assert found.products == [(20.0, 21.0)]
    assert found.compute == [(20.0, 21.0), (30.0, 31.0)]


def _measured(script: str, flags: str, folder: Path) -> Any:
    """Run a benchmark on two ranks, and return the figures that it writes."""
    path = folder / "figures.json"
    launch(2, [*flags.split(), "--json", str(path)], script=BENCHMARKS / script).check()
    return json.loads(path.read_text())


@pytest.mark.ranks
@pytest.mark.cpu_only
def test_overlap_reads_messages_and_products_of_gloo_ranks(tmp_path):
    """On gloo ranks the profile has messages and products, and hidden time is part of both."""
    found = _measured("overlap.py", "--hidden 32 --layers 2 --rounds 1", tmp_path)
    (found,) = found["optimizers"].values()
    assert len(found["ranks"]) == 2
    for rank in found["ranks"]:
        assert rank["message_ms"] > 0 and 0 < rank["products_ms"] < rank["step_ms"]
        assert 0 <= rank["hidden_share"] <= 1
        assert rank["hidden_ms"] + rank["exposed_ms"] == pytest.approx(rank["message_ms"])
    worst = max(found["ranks"], key=lambda rank: rank["exposed_ms"])
    assert found["worst"] == worst


def test_peak_is_the_largest_sum_of_allocations_and_releases():
    """The peak counts what is there at once, and nothing that was released before."""
    assert peak_memory.growth_of(iter([100, 50, -100, 30, -80, 20])) == (150, 20)
    assert peak_memory.growth_of(iter([-40, 30])) == (0, -10)


@pytest.mark.ranks
@pytest.mark.cpu_only
def test_peak_memory_finds_states_and_temporaries_to_the_byte(tmp_path):
    """States and AdamW's temporaries are as large as the shards say, and no step exceeds a plan."""
    found = _measured("peak_memory.py", "--hidden 64 --layers 2", tmp_path)
    rows = {row["optimizer"]: row for row in found["rows"]}
    # Rows divide by two ranks.
    matrices, embedding = 2 * 12 * 64**2 // 2, peak_memory.VOCAB * 64 // 2
    kept = {
        "Megatron-FSDP, Muon": 4 * matrices,
        "fsdp2.Muon": 4 * matrices,
        "fsdp2.MuonAdamW": 4 * matrices + 8 * embedding,
        "torch.optim.AdamW": 8 * (matrices + embedding),
    }
    for name, expected in kept.items():
        # Beside them numbers of steps, and small tables.
        assert 0 <= rows[name]["kept_bytes"] - expected < 0.05 * expected, rows[name]
        assert rows[name]["holds"] and rows[name]["planned_bytes"] > 0
        # Far below the slack that a step of this size may take.
        assert 0 <= rows[name]["peak_bytes"] - rows[name]["planned_bytes"] < 10_000
        assert 0 < rows[name]["used_bytes"] <= rows[name]["peak_bytes"]
    adamw = rows["torch.optim.AdamW"]
    assert 0 <= adamw["peak_bytes"] - 4 * (matrices + embedding) < 10_000


DDP = [4.0, 3.9, 3.8, 3.7]


def _judged(fsdp: list[float], noise: float, *, is_exact: bool = False) -> dict[str, Any]:
    others = [loss * (1 + noise) for loss in DDP]
    return parity.judge({"ddp": DDP, "fsdp": fsdp}, others, is_exact=is_exact)


def test_parity_allows_what_ddp_runs_differ_by():
    """A difference within three times the noise holds, and a larger one fails."""
    close, far = [loss * (1 + 2.9e-4) for loss in DDP], [loss * (1 + 3.2e-4) for loss in DDP]
    row = _judged(close, 1e-4)
    assert row["holds"] and not row["equal"] and row["iterations"] == 4
    assert row["relative"] == pytest.approx(2.9e-4) and row["noise"] == pytest.approx(1e-4)
    assert row["tolerance"] == {"atol": 0.0, "rtol": pytest.approx(3e-4)}
    assert row["largest_difference"] == pytest.approx(4 * 2.9e-4)
    assert not _judged(far, 1e-4)["holds"]
    # Without noise a few units in the last place are allowed, unless losses must be equal.
    last_place = [*DDP[:3], DDP[3] * (1 + 4e-7)]
    assert _judged(last_place, 0.0)["holds"]
    assert not _judged(last_place, 0.0, is_exact=True)["holds"]
    assert _judged(DDP, 0.0, is_exact=True)["equal"]


def test_parity_fails_for_losses_that_do_not_decrease_or_are_not_finite():
    """Equal losses of runs that do not learn show nothing."""
    flat = [4.0] * 4
    assert not parity.judge({"ddp": flat, "fsdp": flat}, flat, is_exact=False)["holds"]
    row = _judged([*DDP[:2], math.nan, DDP[3]], 1.0)
    assert not row["holds"] and row["relative"] == math.inf


def test_noise_of_later_iterations_does_not_excuse_early_ones():
    """The tolerance of an iteration is that of the noise until shortly after it."""
    ddp = [4.0 - 0.01 * i for i in range(30)]
    noise = [*ddp[:20], *(loss * 1.01 for loss in ddp[20:])]
    early, late = ddp.copy(), ddp.copy()
    early[3] *= 1.001
    late[25] *= 1.001
    judged = [
        parity.judge({"ddp": ddp, "fsdp": fsdp}, noise, is_exact=False) for fsdp in (early, late)
    ]
    assert [row["holds"] for row in judged] == [False, True]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.cpu_only
def test_parity_has_a_row_per_case(tmp_path, monkeypatch, capsys):
    """Losses in fp32 are equal to the bit on two ranks, and a skipped case says why."""
    path = tmp_path / "parity.json"
    flags = "--iterations 3 --hidden 32 --layers 1 --cases zero3 hsdp --json".split()
    monkeypatch.setattr(parity, "train", train_forked)
    monkeypatch.setattr(sys, "argv", ["parity.py", *flags, str(path)])
    assert parity.main() == 0
    cases = json.loads(path.read_text())["cases"]
    assert cases["zero3"]["equal"] and cases["zero3"]["holds"]
    assert len(set(cases["zero3"]["losses"]["fsdp"])) == 3
    assert cases["hsdp"] == {"skipped": "expected an even number of ranks, four or more, got 2"}
    assert "| hsdp | - |" in capsys.readouterr().out


def test_resumed_losses_are_compared_from_the_last_save_on():
    """A run that resumes elsewhere, ends early or has other losses fails."""
    expected = {i: 5.0 - i / 10 for i in range(1, killed_rank.LAST + 1)}
    resumed = {i: expected[i] for i in (5, 6)}
    found = killed_rank.compare(resumed, expected, is_exact=True)
    assert found == {"resumed_at": 4, "largest_difference": 0.0, "equal": True, "holds": True}
    near = resumed | {6: expected[6] * (1 + 1e-4)}
    verdicts = [killed_rank.compare(near, expected, is_exact=x)["holds"] for x in (False, True)]
    assert verdicts == [True, False]
    for wrong in (expected, {5: expected[5]}, resumed | {6: 4.5}, resumed | {6: math.nan}):
        assert not killed_rank.compare(wrong, expected, is_exact=False)["holds"]


def test_killed_run_waits_for_the_end_of_all_ranks(tmp_path):
    """Time ends with the last rank, and the message has the signal and the others' error."""
    log = (
        "[rank0]: Traceback (most recent call last):\n"
        "[rank0]: RuntimeError: Connection closed by peer\n"
        "  traceback : Signal 9 (SIGKILL) received by PID 7\n"
    )

    def train(environment: dict[str, str]) -> None:
        assert environment[killed_rank.VICTIM] == "1"
        ranks = [subprocess.Popen("cat", stdin=subprocess.PIPE) for _ in range(2)]
        for rank, process in enumerate(ranks):
            (tmp_path / f"pid_{rank}").write_text(str(process.pid))
        (tmp_path / "log.txt").write_text(log)
        (tmp_path / "killed").write_text(repr(time.monotonic()))
        for process in ranks:
            time.sleep(0.1)
            process.communicate()
        raise RuntimeError("exit code 1")

    found = killed_rank.killed_run(2, train, tmp_path)
    assert found["others_ended"] and found["seconds_until_all_ended"] >= 0.2
    assert found["seconds_until_command_ended"] >= 0.2
    message = "Signal 9 (SIGKILL) received by PID 7; RuntimeError: Connection closed by peer"
    assert found["message"] == message


def test_run_that_nothing_kills_is_an_error(tmp_path):
    """A run that ends well, or by another error, is no measurement."""
    with pytest.raises(RuntimeError, match="got one that ended well"):
        killed_rank.killed_run(2, lambda environment: None, tmp_path)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.cpu_only
def test_killed_rank_ends_the_job_and_the_command_resumes(tmp_path):
    """The other rank ends when its peer is killed, and the command resumes to the bit."""
    path = tmp_path / "killed.json"
    script = str(ROOT / "scripts" / "killed_rank.py")
    flags = f"--hidden 32 --layers 1 --json {path}".split()
    done = run_command(sys.executable, script, *flags)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    cases = json.loads(path.read_text())["cases"]
    assert cases["step"]["others_ended"] and "SIGKILL" in cases["step"]["message"]
    assert cases["restart"]["equal"] and cases["restart"]["resumed_at"] == 4
