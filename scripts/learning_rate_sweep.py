# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A learning-rate sweep that is fair: every optimizer sees the same grid and the same budget.

The grid goes up by factors of two. While some optimizer's best learning rate is the grid's lowest
or highest, the grid grows on that side, for every optimizer.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from comparison_report import machine, markdown_table, number

# Loss by learning rate, by optimizer.
Losses = dict[str, dict[float, float]]
MIN_POINTS = 5
MAX_POINTS = 12


def best(losses: dict[float, float]) -> float:
    """Return the learning rate of the lowest loss; a loss that is not finite is the highest."""
    return min(losses, key=lambda rate: losses[rate] if math.isfinite(losses[rate]) else math.inf)


def missing_points(losses: Losses) -> list[float]:
    """Return the learning rates by which the grid has to grow for every best point to lie inside.

    Args:
        losses: Results so far, over the same grid for every optimizer.

    Returns:
        At most one point below and one above the grid; none when every optimum is bracketed.
    """
    grid = sorted(next(iter(losses.values())))
    chosen = {best(by_rate) for by_rate in losses.values()}
    below = [grid[0] / 2] if grid[0] in chosen else []
    above = [grid[-1] * 2] if grid[-1] in chosen else []
    return below + above


def is_bracketed(losses: Losses) -> bool:
    """Return whether every optimizer's best learning rate has a worse one on either side."""
    return not missing_points(losses)


def run_sweep(
    optimizers: Sequence[str], grid: Iterable[float], run: Callable[[str, float], float]
) -> Losses:
    """Run every optimizer at every learning rate, and widen the grid until each optimum is inside.

    Args:
        optimizers: Names of the optimizers.
        grid: Learning rates to begin with, at least ``MIN_POINTS``.
        run: Trains with an optimizer and a learning rate; returns the loss to compare.

    Returns:
        The losses, over the same grid for every optimizer.

    Raises:
        ValueError: The grid has too few points or is not one of factors of two.
    """
    todo = sorted(set(grid))
    ratios = [high / low for low, high in zip(todo, todo[1:], strict=False)]
    if len(todo) < MIN_POINTS or any(abs(ratio - 2) > 0.1 for ratio in ratios):
        raise ValueError(
            f"--learning-rates: expected at least {MIN_POINTS} learning rates, each twice the one "
            f"before, got {todo}. Leave it out for the usual grid."
        )
    losses: Losses = {optimizer: {} for optimizer in optimizers}
    while todo:
        for rate in todo:
            for optimizer in optimizers:
                losses[optimizer][rate] = run(optimizer, rate)
        todo = missing_points(losses) if len(losses[optimizers[0]]) < MAX_POINTS else []
    return losses


def sweep_table(losses: Losses) -> str:
    """Return the table of losses: a row a learning rate, each optimizer's best marked."""
    rates = sorted(next(iter(losses.values())))
    rows = []
    for rate in rates:
        cells = [
            number(by_rate[rate]) + (" *" if best(by_rate) == rate else "  ")
            for by_rate in losses.values()
        ]
        rows.append([f"{rate:g}", *cells])
    return markdown_table(["learning rate", *losses], rows)


def write_sweep(losses: Losses, file: Path, command: str, iterations: int) -> str:
    """Write the table to ``file`` and return it with a line on what it shows."""
    caption = f"Final validation loss after {iterations} iterations; * best."
    lines = [sweep_table(losses), "", caption]
    if not is_bracketed(losses):
        lines.append("A best point lies on the edge of the grid: the optimum is not bracketed.")
    text = "\n".join(lines)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# Learning-rate sweep\n\n`{command}`\n\n{machine()}\n\n{text}\n")
    return text
