# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The quickstart's results as a table, a JSON file and a plot."""

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from loss_plot import write_plot
from training_log import TrainingLog
from training_run import RunConfig

Results = Sequence[tuple[RunConfig, TrainingLog]]


def machine() -> str:
    """Return processor, number of cores and versions in one line."""
    model = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        names = [x for x in cpu_info.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    versions = []
    for package in ("torch", "megatron-core", "emerging-optimizers", "megatron-muon"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} not installed")
    python = f"Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores; {', '.join([python, *versions])}"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table whose columns line up as plain text, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        """Return one row."""
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join([first, *rest]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def number(value: float, digits: int = 4) -> str:
    """Return ``value`` with a fixed number of digits, or that there is none."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "diverged"


def comparison_table(results: Results) -> str:
    """Return the table of all runs: a column each."""
    logs = [log for _, log in results]
    iterations = min(config.iterations for config, _ in results)
    marks = sorted({iterations * part // 6 for part in range(1, 7)} - {0})
    rows = [["learning rate", *(f"{config.learning_rate:g}" for config, _ in results)]]
    for mark in marks:
        label = f"training loss at {mark} (mean of 10)"
        rows.append([label, *(number(log.mean_loss(mark)) for log in logs)])
    rows.append(["validation loss, final", *(number(x.final_validation_loss()) for x in logs)])
    rows.append(["ms per step (median)", *(number(x.median_step_ms(), 1) for x in logs)])
    label = "optimizer ms per step (median)"
    rows.append([label, *(number(x.median_optimizer_ms(), 1) for x in logs)])
    return markdown_table(["", *(config.label or config.optimizer for config, _ in results)], rows)


def finite_or_none(value: object) -> object:
    """Return ``value`` with NaN and infinity as None, which JSON can hold."""
    if isinstance(value, dict):
        return {key: finite_or_none(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(results: Results, file: Path) -> None:
    """Write every number of every run."""
    runs = [{"config": c.as_dict(), "log": finite_or_none(asdict(log))} for c, log in results]
    file.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")


def write_comparison(results: Results, folder: Path, command: str) -> str:
    """Write ``results.md``, ``results.json`` and ``results.svg`` to ``folder``.

    Args:
        results: A run and its numbers each.
        folder: Where to write, created if missing.
        command: What the user typed, for the record.

    Returns:
        The table.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = comparison_table(results)
    config = results[0][0]
    text = (
        f"# {' and '.join(c.optimizer for c, _ in results)} under Megatron-FSDP\n\n"
        f"`{command}`\n\n{machine()}\n\n{config.ranks} ranks, {config.sharding}, "
        f"{config.iterations} iterations, seed {config.seed}.\n\n{table}\n\n"
        "![loss by iteration](results.svg)\n"
    )
    (folder / "results.md").write_text(text)
    write_json(results, folder / "results.json")
    write_plot(results, folder / "results.svg")
    return table
