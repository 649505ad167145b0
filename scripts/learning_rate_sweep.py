# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Final loss of AdamW and Muon by learning rate and other settings, with three seeds.

    .venv/bin/python scripts/learning_rate_sweep.py
    .venv/bin/python scripts/learning_rate_sweep.py --soap

A small byte-level transformer learns the sources of Python's standard library, in one process a
run, on CPUs. The second part changes one setting at a time, from the best rates of the first, at
the smaller width. Finished runs are kept in ``sweep_output/runs.jsonl``: another call goes on where
the last one ended. Then it prints the tables of docs/adamw_to_muon.md, and writes their picture.

``--soap`` trains SOAP beside AdamW and Muon instead, at the larger width, the quickstart's. It
prints the tables of docs/optimizers.md, and draws the losses by step at the best rates.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from byte_dataset import VOCAB_SIZE, read_documents, standard_library_files
from maintainer import loss_plot
from torch import nn

from megatron_muon.fsdp2 import MuonAdamW

LENGTH, BATCH, LAYERS, HEAD = 128, 16, 4, 32
LAST_RATE, VALIDATION_BATCHES = 0.1, 32
WIDTHS, SEEDS = (64, 128), (0, 1, 2)
# Updates have the RMS of AdamW's with match_adamw, and are five times as large with spectral.
SCALES = {"Muon, match_adamw": "match_adamw", "Muon, spectral": "spectral"}
RATES = {
    "AdamW": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    "Muon, match_adamw": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
    "Muon, spectral": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
}
COLORS = {"AdamW": "#d55e00", "Muon, match_adamw": "#0072b2", "Muon, spectral": "#009e73"}
# Around the best rates of AdamW and Muon at width 128.
BESIDE_SOAP = {
    "AdamW": (1e-3, 2e-3, 4e-3),
    "Muon, match_adamw": (8e-3, 1.6e-2, 3.2e-2),
    "SOAP": (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
}
# AdamW for half of the steps, then Muon for its matrices, at one learning rate.
SWITCH = "AdamW, then Muon"
# Of the first part (docs/adamw_to_muon.md), for the second part alone; half of them at width 128.
BEST_AT_64 = {"AdamW": 4e-3, "Muon, match_adamw": 3.2e-2}
SETTINGS = {"warm_up": (0.0, 0.05, 0.1, 0.2), "weight_decay": (0.0, 0.1, 0.3)}
MUON_SETTINGS = {"momentum": (0.6, 0.8, 0.9, 0.95, 0.98), "nesterov": (False, True)}


class Run(NamedTuple):
    """One training run.

    Args:
        optimizer: A key of ``RATES`` or of ``BESIDE_SOAP``, or ``SWITCH``.
        width: Hidden size.
        rate: Highest learning rate.
        seed: Of weights and of the order of the data.
        steps: Number of steps.
        batch: Sequences per step.
        warm_up: Length of the warm-up, as a fraction of all steps.
        weight_decay: Coefficient, the same for all parameters.
        momentum: Muon's momentum.
        nesterov: Whether Muon uses Nesterov momentum.
    """

    optimizer: str
    width: int
    rate: float
    seed: int
    steps: int
    batch: int = BATCH
    warm_up: float = 0.1
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True


class Block(nn.Module):
    """Attention with rotary positions, and SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        self.attention = nn.ModuleDict({n: nn.Linear(width, width, bias=False) for n in names})
        self.gate_proj, self.up_proj = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(3 * width, width, bias=False)
        angles = torch.outer(torch.arange(LENGTH), 1e4 ** -torch.linspace(0, 1, HEAD // 2))
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``(batch, length, width)``."""
        y = self.norm1(x)
        q, k, v = (
            self.attention[name](y).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k = (
            torch.view_as_real(
                torch.view_as_complex(z.unflatten(-1, (-1, 2)).contiguous()) * self.rotation
            ).flatten(-2)
            for z in (q, k)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention["o_proj"](y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Model(nn.Module):
    """Decoder over bytes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, width)
        self.layers = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCAB_SIZE, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of ``(batch, length + 1)`` bytes, nats."""
        logits = self.head(self.norm(self.layers(self.embedding(tokens[:, :-1]))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batches(data: torch.Tensor, seed: int, batch: int) -> Iterator[torch.Tensor]:
    """Yield random batches, ``(batch, LENGTH + 1)``."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - LENGTH, (batch, 1), generator=generator)
        yield data[starts + torch.arange(LENGTH + 1)].long()


def optimizer_of(name: str, model: nn.Module, run: Run) -> torch.optim.Optimizer:
    """Build an optimizer; beside Muon, AdamW has its settings of the other runs."""
    options: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": run.weight_decay}
    if name == "AdamW":
        return torch.optim.AdamW(model.parameters(), run.rate, **options)
    if name == "SOAP":
        return MuonAdamW.from_model(model, run.rate, optimizer_class="soap", **options)
    options |= {"scale_mode": SCALES.get(name, "match_adamw"), "fp32_matmul_prec": "high"}
    options |= {"momentum": run.momentum, "nesterov": run.nesterov}
    return MuonAdamW.from_model(model, run.rate, **options)


def train(run: Run) -> dict[str, Any]:
    """Train, and return the losses: of every step, and of validation in the end."""
    torch.set_num_threads(1)
    text = torch.frombuffer(
        bytearray(b"".join(read_documents(standard_library_files(), 8_000_000))), dtype=torch.uint8
    )
    torch.manual_seed(run.seed)
    model, border = Model(run.width), int(0.95 * len(text))
    is_switched = run.optimizer == SWITCH
    optimizer = optimizer_of("AdamW" if is_switched else run.optimizer, model, run)
    data, losses = batches(text[:border], 1000 + run.seed, run.batch), []
    for step in range(run.steps):
        if is_switched and step == run.steps // 2:
            optimizer = optimizer_of(run.optimizer, model, run)
        warm_up = max(1.0, run.warm_up * run.steps)
        cosine = 0.5 + 0.5 * math.cos(math.pi * max(0.0, step - warm_up) / (run.steps - warm_up))
        factor = min((step + 1) / warm_up, LAST_RATE + (1 - LAST_RATE) * cosine)
        for group in optimizer.param_groups:
            group["lr"] = factor * run.rate
        loss = model(next(data))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    held_out = batches(text[border:], 0, BATCH)
    with torch.no_grad():
        validation = [model(next(held_out)).item() for _ in range(VALIDATION_BATCHES)]
    return {**run._asdict(), "losses": losses, "validation": statistics.fmean(validation)}


def finished(file: Path) -> dict[Run, dict[str, Any]]:
    """Return the results of a file by run."""
    lines = file.read_text().splitlines() if file.exists() else []
    results = map(json.loads, lines)
    return {Run(**{n: each[n] for n in Run._fields if n in each}): each for each in results}


def train_all(runs: Sequence[Run], file: Path, workers: int) -> dict[Run, dict[str, Any]]:
    """Train what is missing in a file, and append it."""
    results, start = finished(file), time.monotonic()
    missing = [run for run in runs if run not in results]
    # Not forked: the caller may have run a backward pass.
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = [pool.submit(train, run) for run in missing]
        for number, future in enumerate(as_completed(futures), 1):
            result = future.result()
            with file.open("a") as output:
                output.write(json.dumps(result) + "\n")
            run = Run(*(result[name] for name in Run._fields))
            results[run] = result
            minutes = (time.monotonic() - start) / 60
            text = f"{number}/{len(missing)}, {minutes:.0f} min: {result['validation']:.4f} {run}"
            print(text, flush=True)
    return {run: results[run] for run in runs}


type Points = dict[tuple[str, int], dict[float, list[float]]]


def points_of(results: dict[Run, dict[str, Any]]) -> Points:
    """Return validation losses of all seeds by optimizer, width and rate."""
    points: Points = {}
    for run, result in results.items():
        of_curve = points.setdefault((run.optimizer, run.width), {})
        of_curve.setdefault(run.rate, []).append(result["validation"])
    return points


def best_rate(points: Points, optimizer: str, width: int) -> float:
    """Return the rate with the lowest mean loss."""
    curve = points[optimizer, width]
    return min(curve, key=lambda rate: statistics.fmean(curve[rate]))


def tables(results: dict[Run, dict[str, Any]], steps: int) -> Iterator[str]:
    """Yield the lines of both tables."""
    points = points_of(results)
    rates = sorted({rate for curve in points.values() for rate in curve})
    yield "| optimizer, width | " + " | ".join(f"{rate:g}" for rate in rates) + " |"
    yield "| --- |" + " ---: |" * len(rates)
    for (optimizer, width), curve in points.items():
        if optimizer == SWITCH:
            continue
        cells = []
        for rate in rates:
            mean = f"{statistics.fmean(curve[rate]):.3f}" if rate in curve else ""
            is_best = rate in curve and rate == best_rate(points, optimizer, width)
            cells.append(f"**{mean}**" if is_best else mean)
        yield f"| {optimizer}, {width} | " + " | ".join(cells) + " |"
    yield ""
    yield "| optimizer, width | rate | validation loss, by seed | steps to AdamW's last loss |"
    yield "| --- | ---: | --- | ---: |"
    for optimizer, width in points:
        rate = best_rate(points, optimizer, width)
        goal = _mean_curve(results, "AdamW", width, best_rate(points, "AdamW", width))[-1]
        curve = _mean_curve(results, optimizer, width, rate)
        reached = next((i + 1 for i, loss in enumerate(curve) if loss <= goal), None)
        within = f"{reached} of {steps}" if reached else f"not in {steps}"
        losses = ", ".join(f"{loss:.3f}" for loss in sorted(points[optimizer, width][rate]))
        yield f"| {optimizer}, {width} | {rate:g} | {losses} | {within} |"


def _mean_curve(
    results: dict[Run, dict[str, Any]], optimizer: str, width: int, rate: float
) -> list[float]:
    """Return the training loss by step, the mean over seeds and over the last twenty steps."""
    runs = [
        result["losses"]
        for run, result in results.items()
        if (run.optimizer, run.width, run.rate) == (optimizer, width, rate)
    ]
    means = [statistics.fmean(losses) for losses in zip(*runs, strict=True)]
    return [statistics.fmean(means[max(0, i - 19) : i + 1]) for i in range(len(means))]


def changes(base: Run) -> dict[str, list[Run]]:
    """Return runs that differ in one setting; also momentum in longer runs, rates by batch."""
    fields = SETTINGS | (MUON_SETTINGS if base.optimizer in SCALES else {})
    rows = {f: [base._replace(**{f: value}) for value in fields[f]] for f in fields}
    if "momentum" in rows:
        longer = base._replace(steps=4 * base.steps)
        rows["momentum, 4 x steps"] = [longer._replace(momentum=m) for m in (0.8, 0.95)]
    for batch in (BATCH // 2, 2 * BATCH):
        run = base._replace(batch=batch, steps=base.steps * BATCH // batch)  # Equal tokens.
        rates = [factor * base.rate for factor in (0.5, 1, 2)]
        rows[f"rate, batch {batch}"] = [run._replace(rate=rate) for rate in rates]
    return rows


def settings_table(results: dict[Run, dict[str, Any]], bases: Sequence[Run]) -> Iterator[str]:
    """Yield the table of settings: mean losses, and the range over seeds of their changes."""

    def losses(run: Run) -> list[float]:
        return [result["validation"] for r, result in results.items() if r._replace(seed=0) == run]

    def cells(label: str, base: Run) -> Iterator[str]:
        field, row = label.partition(",")[0], changes(base).get(label, [])
        for run in row:
            (usual,) = (r for r in row if getattr(r, field) == getattr(base, field))
            change = [new - old for new, old in zip(losses(run), losses(usual), strict=True)]
            text = f"{getattr(run, field):g}: {statistics.fmean(losses(run)):.3f}"
            spread = f" ({min(change):+.2f}, {max(change):+.2f})"
            yield f"**{text}**" if run == usual else text + spread

    yield "| setting | " + " | ".join(base.optimizer for base in bases) + " |"
    yield "| --- |" + " --- |" * len(bases)
    for label in changes(bases[-1]):
        yield f"| {label} | " + " | ".join("; ".join(cells(label, base)) for base in bases) + " |"


def compare_with_soap(options: argparse.Namespace, file: Path) -> None:
    """Train what is missing of SOAP, AdamW and Muon, print their tables, and draw their losses."""
    width = max(options.widths)
    curves = [(optimizer, rate) for optimizer, rates in BESIDE_SOAP.items() for rate in rates]
    runs = [Run(o, width, rate, s, options.steps) for s in options.seeds for o, rate in curves]
    results = train_all(runs, file, options.workers)
    points, drawn = points_of(results), []
    print("\n".join(tables(results, options.steps)))
    for optimizer in BESIDE_SOAP:
        rate = best_rate(points, optimizer, width)
        of_seeds = [
            r["losses"] for run, r in results.items() if run[:3] == (optimizer, width, rate)
        ]
        means = map(statistics.fmean, zip(*of_seeds, strict=True))
        drawn.append(
            {
                "optimizer": optimizer.partition(",")[0],
                "learning_rate": rate,
                "losses": dict(enumerate(means, 1)),
                "validation_losses": {
                    options.steps: statistics.fmean(points[optimizer, width][rate])
                },
            }
        )
    muon, soap = (
        _mean_curve(results, name, width, best_rate(points, name, width))
        for name in ("Muon, match_adamw", "SOAP")
    )
    reached = next((i for i, loss in enumerate(soap, 1) if loss <= muon[-1]), None)
    print(f"\nSOAP, steps to Muon's last loss: {reached or 'more'} of {options.steps}")
    (options.output / "soap.svg").write_text(loss_plot.draw(drawn))


def draw(points: Points) -> str:
    """Return a picture: loss by learning rate, a panel a width, bands from the seeds."""
    widths = sorted({width for _, width in points})
    curves = {key: curve for key, curve in points.items() if key[0] in COLORS}
    rates = sorted({rate for curve in curves.values() for rate in curve})
    seen = sorted(statistics.fmean(losses) for c in curves.values() for losses in c.values())
    low, high = math.floor(10 * seen[0] - 0.5) / 10, math.ceil(10 * seen[len(seen) * 3 // 4]) / 10
    panel, top, bottom = 330, 40, 300

    def place(number: int, rate: float, loss: float) -> str:
        """Return the position of a point in a panel, cut off at the edges."""
        x = 60 + number * (panel + 20)
        x += (panel - 20) * math.log(rate / rates[0]) / math.log(rates[-1] / rates[0])
        y = bottom - (bottom - top) * (min(max(loss, low), high) - low) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 400" width="760" height="400" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="760" height="400" fill="white"/>',
    ]
    for number, width in enumerate(widths):
        left = 60 + number * (panel + 20)
        parts.append(f'<text x="{left}" y="24" fill="#333">width {width}</text>')
        for tenth in range(round(10 * low), round(10 * high) + 1, 2):
            y = place(number, rates[0], tenth / 10).partition(",")[2]
            parts.append(f'<path d="M{left},{y}h{panel - 20}" stroke="#e4e4e4"/>')
            if number == 0:
                parts.append(f'<text x="52" y="{y}" text-anchor="end">{tenth / 10:.1f}</text>')
        for rate in rates[1:-1:2]:
            x = place(number, rate, low).partition(",")[0]
            parts.append(f'<text x="{x}" y="320" text-anchor="middle">{rate:g}</text>')
        for (optimizer, of_width), curve in curves.items():
            if of_width != width:
                continue
            color, ordered = COLORS[optimizer], sorted(curve)
            edges = [place(number, r, min(curve[r])) for r in ordered]
            edges += [place(number, r, max(curve[r])) for r in reversed(ordered)]
            means = [place(number, r, statistics.fmean(curve[r])) for r in ordered]
            band = f'fill="{color}" fill-opacity="0.2"'
            parts.append(f'<polygon points="{" ".join(edges)}" {band}/>')
            line = f'fill="none" stroke="{color}" stroke-width="2"'
            parts.append(f'<polyline points="{" ".join(means)}" {line}/>')
    for number, (optimizer, color) in enumerate(COLORS.items()):
        x = 60 + 200 * number
        parts.append(f'<path d="M{x},366h24" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 32}" y="370" fill="#333">{optimizer}</text>')
    text = "validation loss, nats a byte, by highest learning rate; bands: three seeds"
    parts.append(f'<text x="60" y="344" fill="#333">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Train what is missing, print the tables, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("sweep_output"))
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, a core each")
    parser.add_argument("--settings", action="store_true", help="second part alone, at known rates")
    parser.add_argument("--soap", action="store_true", help="SOAP beside AdamW and Muon instead")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    file, steps = options.output / "runs.jsonl", options.steps
    if options.soap:
        compare_with_soap(options, file)
        return
    pairs, points = list(itertools.product(options.seeds, options.widths)), {}
    if not options.settings:
        curves = [(optimizer, rate) for optimizer, rates in RATES.items() for rate in rates]
        runs = [Run(o, width, rate, seed, steps) for seed, width in pairs for o, rate in curves]
        results = train_all(runs, file, options.workers)
        points = points_of(results)
        runs = [Run(SWITCH, w, best_rate(points, "AdamW", w), seed, steps) for seed, w in pairs]
        results |= train_all(runs, file, options.workers)
        print("\n".join([*tables(results, steps), ""]))
        (options.output / "learning_rates.svg").write_text(draw(points))
    width = min(options.widths)
    bases = [
        Run(name, width, best_rate(points, name, width) if points else rate * 64 / width, 0, steps)
        for name, rate in BEST_AT_64.items()
    ]
    rows = [row for base in bases for row in changes(base).values()]
    runs = [run._replace(seed=seed) for seed in options.seeds for row in rows for run in row]
    results = train_all(list(dict.fromkeys(runs)), file, options.workers)
    print("\n".join(settings_table(results, bases)))


if __name__ == "__main__":
    main()
