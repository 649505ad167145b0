# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The command line of ``scripts/gpu_checks.py``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_checks.catalogue import CHECKS, MACHINE, Check
from gpu_checks.machine import missing_packages
from gpu_checks.report import Device
from gpu_checks.runner import Runner
from gpu_checks.tables import HEADS, Line, table_head, write

ROOT = Path(__file__).resolve().parents[2]
# On a GPU imports are most of a check's time, and cores are many.
_JOBS: dict[Device, int] = {"cuda": 4, "cpu": 2}
_TITLES = {
    "cuda": "Checks on one GPU",
    "cpu": "Checks that need no GPU",
    "rehearsal": "Rehearsal on a CPU with tiny sizes: the figures mean nothing",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks that were asked for, and print their lines.

    Returns:
        0; 1 if a check failed; 2 if none could start.
    """
    options = _parser().parse_args(argv)
    checks = [check for check in CHECKS if not options.only or check.name in options.only]
    if options.list:
        for check in checks:
            where = "GPU only" if check.needs_gpu else ""
            print(f"{check.number:>2} {check.name:18s} {where:8s} {check.question}")
        return 0
    if missing := missing_packages():
        print(
            f"gpu_checks: expected {', '.join(missing)} on the path of {sys.executable}, found "
            "none. Install what is missing, or put a folder that has it on PYTHONPATH.",
            file=sys.stderr,
        )
        return 2
    device: Device = "cpu" if options.cpu or options.rehearse else "cuda"
    _prepare_environment()
    runner = Runner(
        device,
        is_rehearsal=options.rehearse,
        limit_s=options.limit_s,
        # Others may use a CPU too: limits are against a hang alone there.
        patience=10.0 if device == "cpu" else 1.0,
        jobs=options.jobs or _JOBS[device],
        preload=["gpu_checks.cpu_preload"] if device == "cpu" else [],
    )
    return _run(runner, checks, options, device)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_checks.py", description="Check on one GPU what only a GPU can show."
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--cpu", action="store_true", help="run what needs no GPU, on gloo ranks")
    where.add_argument(
        "--rehearse",
        action="store_true",
        help="run the code of all checks on a CPU, with tiny sizes; the figures mean nothing",
    )
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help="these checks")
    parser.add_argument("--list", action="store_true", help="print the checks, and run none")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write gpu_checks.md and gpu_checks.json there"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="checks that run at once")
    parser.add_argument(
        "--limit-s", type=float, default=870.0, metavar="S", help="seconds for all of them"
    )
    return parser


def _prepare_environment() -> None:
    """Set what processes read before anything else: a fork server is told nothing else."""
    paths = [str(path) for path in (ROOT, ROOT / "scripts", ROOT / "tests" / "unit_tests")]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _run(
    runner: Runner,
    checks: Sequence[Check],
    options: argparse.Namespace,
    device: Device,
) -> int:
    machine_line = runner.run(MACHINE)
    if machine_line.word != "passed":
        print(f"gpu_checks: {machine_line.text}\n{machine_line.output}", file=sys.stderr)
        return 2
    machine = {key: str(value) for key, value in machine_line.findings.data.items()}
    command = _command(options)
    title = _TITLES["rehearsal" if options.rehearse else device]
    print("; ".join(f"{key} {value}" for key, value in machine.items()))
    print(table_head(HEADS), flush=True)
    lines: list[Line] = []
    for line in runner.run_all(checks):
        lines.append(line)
        print(line.markdown, flush=True)
        if line.output:
            print(_indented(line.output), file=sys.stderr, flush=True)
        if options.out is not None:
            # After each: what is there survives whoever ends this process.
            ordered = sorted(lines, key=lambda each: CHECKS.index(each.check))
            write(options.out, title, machine, command, ordered)
    return 1 if any(line.word == "failed" for line in lines) else 0


def _command(options: argparse.Namespace) -> str:
    """Return what to type to run the same again, without paths of this machine."""
    parts = ["python3 scripts/gpu_checks.py"]
    parts += [flag for flag in ("--cpu", "--rehearse") if getattr(options, flag[2:])]
    parts += ["--only", *options.only] if options.only else []
    parts += ["--jobs", str(options.jobs)] if options.jobs else []
    return " ".join([*parts, "--out DIR"])


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
