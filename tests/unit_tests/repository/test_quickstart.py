# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The quickstart: data set, log, table, plot, sweep, command line, and one call of all."""

import json
import math
import sys
from pathlib import Path

import byte_dataset
import comparison_report
import learning_rate_sweep
import pytest
import quickstart
from helpers.commands import run_command
from training_log import TrainingLog
from training_run import RunConfig

LOG_LINES = """
[default0]:[before the start of training step] datetime: 2026-01-01 00:00:00
[default1]: [2026-01-01 00:00:01.000000] iteration        1/       3 | consumed samples:           \
16 | elapsed time per iteration (ms): 1900.5 | learning rate: 1.000000E-03 | global batch size:    \
16 | lm loss: 5.500000E+00 | loss scale: 1.0 | grad norm: 1.200 | number of skipped iterations: 0 |
[default1]:INFO:megatron.core.timers:max time across ranks (ms):
[default1]:    forward-backward ...............................: 150.20
[default1]:    optimizer-inner-step ...........................: 22.00
[default1]:    optimizer ......................................: 25.77
[default1]: [2026-01-01 00:00:02.000000] iteration        2/       3 | consumed samples:           \
32 | elapsed time per iteration (ms): 210.0 | learning rate: 1.000000E-03 | global batch size:    \
16 | lm loss: 4.500000E+00 | loss scale: 1.0 | grad norm: 1.100 | number of skipped iterations: 0 |
[default1]:INFO:megatron.core.timers:max time across ranks (ms):
[default1]:    optimizer ......................................: 20.00
[default1]: validation loss at iteration 2 | lm loss value: 4.400000E+00 | lm loss PPL: 8.1E+01 |
[default1]: [2026-01-01 00:00:03.000000] iteration        3/       3 | consumed samples:           \
48 | elapsed time per iteration (ms): 190.0 | learning rate: 1.000000E-03 | global batch size:    \
16 | loss scale: 1.0 | grad norm: nan | number of skipped iterations: 0 |
[default1]: validation loss at iteration 3 on validation set | lm loss value: 4.3E+00 | lm loss \
PPL: 7.3E+01 |
""".strip().splitlines(keepends=True)


def parsed(lines: list[str]) -> TrainingLog:
    log = TrainingLog()
    for line in lines:
        log.feed(line)
    return log


def synthetic_results(num_iterations: int = 60) -> list[tuple[RunConfig, TrainingLog]]:
    results = []
    for optimizer, speed in (("muon", 0.05), ("adam", 0.04)):
        config = RunConfig(
            optimizer, 1e-3, num_iterations, 2, "optim_grads_params", 1, Path("x/bytes")
        )
        log = TrainingLog(iteration=num_iterations, is_complete=True)
        for i in range(1, num_iterations + 1):
            log.losses[i] = 2 + 3 * math.exp(-speed * i)
            log.step_ms[i], log.optimizer_ms[i] = 200.0 + i, 20.0 + i
        log.validation_losses = {30: 2.6, 60: 2.25}
        results.append((config, log))
    return results


def text_files(folder: Path) -> dict[str, bytes]:
    """Write files of different sizes, one of them empty, and return their contents."""
    contents = {f"{i:02d}.txt": bytes((i + j) % 256 for j in range(3000 + i)) for i in range(60)}
    contents["empty.txt"] = b""
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return contents


@pytest.mark.filterwarnings("ignore")
def test_dataset_reads_back_as_the_bytes_of_its_files(tmp_path: Path) -> None:
    """Megatron's reader gives every file's bytes and an end token after each, once."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    contents = text_files(tmp_path)
    files = byte_dataset.files_below([tmp_path])
    data = byte_dataset.build_byte_dataset(files, tmp_path / "out", 10_000_000)
    tokens = [document.tolist() for document in IndexedDataset(str(data.prefix))]

    assert all(document[-1] == byte_dataset.END_OF_DOCUMENT for document in tokens)
    written = sorted(bytes(document[:-1]) for document in tokens)
    assert written == sorted(content for content in contents.values() if content)
    assert data.num_documents == len(tokens) == len(contents) - 1
    assert data.num_bytes == sum(map(len, contents.values()))
    assert not list((tmp_path / "out").glob("*partial*"))


def test_log_is_read_into_numbers() -> None:
    """Losses and times land at their iterations; a loss left out was NaN."""
    log = parsed(LOG_LINES)
    assert log.iteration == 3
    assert log.losses[1] == 5.5
    assert log.losses[2] == 4.5
    assert math.isnan(log.losses[3])
    assert log.step_ms == {1: 1900.5, 2: 210.0, 3: 190.0}
    assert log.optimizer_ms == {1: 25.77, 2: 20.0}
    assert log.validation_losses == {2: 4.4, 3: 4.3}
    assert log.final_validation_loss() == 4.3
    assert log.median_step_ms() == 210.0
    assert log.mean_loss(2) == 5.0


def test_comparison_writes_table_numbers_and_plot(tmp_path: Path) -> None:
    """All three files come out, and the table holds what the logs hold."""
    results = synthetic_results()
    results[1][1].losses[60] = float("nan")
    table = comparison_report.write_comparison(results, tmp_path, "bash scripts/quickstart.sh")
    assert table in (tmp_path / "results.md").read_text()
    rows = {line.split("|")[1].strip(): line.split("|")[2:4] for line in table.splitlines()}
    assert [cell.strip() for cell in rows["validation loss, final"]] == ["2.2500", "2.2500"]
    assert rows["training loss at 60 (mean of 10)"][1].strip() == "diverged"
    assert [float(cell) for cell in rows["ms per step (median)"]] == [233.0, 233.0]
    assert [float(cell) for cell in rows["optimizer ms per step (median)"]] == [53.0, 53.0]
    numbers = json.loads((tmp_path / "results.json").read_text())
    assert numbers["runs"][0]["config"]["optimizer"] == "muon"
    assert numbers["runs"][1]["log"]["losses"]["60"] is None
    assert "</svg>" in (tmp_path / "results.svg").read_text()


def test_runs_differ_only_in_what_belongs_to_their_optimizer() -> None:
    """A fair comparison: apart from the optimizer's own flags the command lines are equal."""
    (muon, _), (adam, _) = synthetic_results()
    muon_flags, adam_flags = muon.megatron_arguments(), adam.megatron_arguments()
    at = adam_flags.index("--optimizer") + 1
    assert (muon_flags[at], adam_flags[at]) == ("muon", "adam")
    assert muon_flags[:at] == adam_flags[:at]
    rest = muon_flags[at + 1 :]
    assert rest[: len(adam_flags) - at - 1] == adam_flags[at + 1 :]
    extra = rest[len(adam_flags) - at - 1 :]
    assert all(flag.startswith("--muon-") for flag in extra if flag.startswith("--"))


def test_sweep_widens_one_grid_for_all_until_every_optimum_is_inside() -> None:
    """An optimizer whose best point is on the edge makes the grid grow for the others too."""
    optimum = {"muon": 3.2e-2, "adam": 5e-4}
    runs: list[tuple[str, float]] = []

    def run(optimizer: str, rate: float) -> float:
        runs.append((optimizer, rate))
        return abs(math.log2(rate / optimum[optimizer]))

    losses = learning_rate_sweep.run_sweep(["muon", "adam"], [1e-3 * 2**i for i in range(5)], run)
    assert sorted(losses["muon"]) == sorted(losses["adam"])
    assert sorted(losses["muon"]) == pytest.approx([2.5e-4 * 2**i for i in range(9)])
    assert learning_rate_sweep.best(losses["muon"]) == pytest.approx(3.2e-2)
    assert learning_rate_sweep.best(losses["adam"]) == pytest.approx(5e-4)
    assert len(runs) == len(set(runs)) == 18
    assert learning_rate_sweep.is_bracketed(losses)


@pytest.mark.ranks
@pytest.mark.slow
def test_quickstart_trains_with_both_optimizers_and_reports(tmp_path: Path) -> None:
    """The script itself, two iterations each.

    It took ten minutes on CPUs without bf16 instructions, where a product of bf16 was fifty times
    slower than of fp32.
    """
    flags = ("--iterations", "2", "--max-megabytes", "0.5", "--output", str(tmp_path))
    # Held to AVX2: any CPU then lacks bf16 instructions.
    env = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = run_command(sys.executable, quickstart.__file__, *flags, env=env)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "Took" in done.stdout
    numbers = json.loads((tmp_path / "results.json").read_text())
    assert [run["config"]["optimizer"] for run in numbers["runs"]] == ["muon", "adam"]
    first = [run["log"]["losses"]["1"] for run in numbers["runs"]]
    # Before the first update both are one model: the bytes and the seed are the same.
    assert first[0] == first[1]
    assert all(math.isfinite(x) for run in numbers["runs"] for x in run["log"]["losses"].values())
    assert (tmp_path / "results.svg").exists()
