# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run functional test cases through the launcher and judge them; called by ``run.sh``."""

import argparse
import contextlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS / "maintainer")]

from cases import Case, CaseError, command_line, select_cases  # noqa: E402
from launched_run import PRETRAIN_GPT, train  # noqa: E402
from metrics import (  # noqa: E402
    MetricsError,
    Values,
    read_events,
    read_golden,
    read_recorded_on,
    rounded,
    write_golden,
)
from rules import (  # noqa: E402
    Verdict,
    compare_with_golden,
    compare_with_unsharded,
    unsharded_tolerance,
)

PLATFORMS = ("cpu", "dgx_h100")


class Runner:
    """Runs cases in a folder of its own; inputs are read only."""

    def __init__(
        self, output: Path, script: Path, exactly: bool, train: Callable[..., Any] = train
    ) -> None:
        self.output = output
        self.script = script
        self.exactly = exactly
        self._start = train
        self.unsharded_losses: dict[tuple, Values] = {}

    def run(self, case: Case) -> list[Verdict]:
        """Train a case, once more from its checkpoint if it resumes, and judge it."""
        folder = self.output / case.name
        folder.mkdir(parents=True)
        self._train(case, case.arguments, folder, load=folder / "none")
        events = folder / "tensorboard"
        found = read_events(events, 0)
        checked = {name: found[name] for name in case.metrics if name in found}
        recorded = folder / case.golden_path.name
        write_golden(recorded, checked, case.train_iters, _kind_that_matters(case))
        verdicts = self._judge_golden(case, found)
        if case.test_type == "ckpt-resume":
            checkpoints = folder / "checkpoints"
            shutil.rmtree(checkpoints / f"iter_{case.train_iters:07d}")
            tracker = checkpoints / "latest_checkpointed_iteration.txt"
            tracker.write_text(str(case.train_iters // 2))
            self._train(case, case.arguments, folder, load=checkpoints)
            verdicts += self._judge_resume(case, found, read_events(events, 1))
        return [*verdicts, self._judge_unsharded(case, found)]

    def _judge_golden(self, case: Case, found: dict[str, Values]) -> list[Verdict]:
        if not case.golden_path.is_file():
            return [Verdict("golden", "", True, f"none yet: not measured on {case.platform}")]
        exactly = self.exactly and not case.allows_nondeterminism
        recorded_on, here = read_recorded_on(case.golden_path), _kind_that_matters(case)
        # Another kind of CPU leaves the exact comparison out, and says so.
        kinds = {"recorded_on": recorded_on, "here": here}
        return _judge(case, found, read_golden(case.golden_path), exactly, "golden", **kinds)

    def _judge_resume(
        self, case: Case, first: dict[str, Values], second: dict[str, Values]
    ) -> list[Verdict]:
        """Compare the resumed half with the first run's, as Megatron does."""
        steps = range(case.train_iters // 2 + 1, case.train_iters + 1)
        if (begun := min(second.get("lm loss", {}), default=0)) != steps[0]:
            detail = f"expected step {steps[0]} to be the first, got {begun}: nothing was loaded"
            return [Verdict("resume", "lm loss", False, detail)]
        expected = {
            name: dict(zip(steps, rounded(first[name], steps), strict=True))
            for name in case.metrics
            if name in first
        }
        return _judge(case, second, expected, not case.allows_nondeterminism, "resume")

    def _judge_unsharded(self, case: Case, found: dict[str, Values]) -> Verdict:
        arguments = case.unsharded_arguments()
        if any(flag.startswith("--muon-split-") for flag in arguments):
            return Verdict(
                "unsharded", "", True, "no reference: upstream's Muon has no such blocks"
            )
        key = (case.num_ranks, *sorted(case.environment.items()), *arguments.items())
        if key not in self.unsharded_losses:
            folder = self.output / f"{case.name}_unsharded"
            self._train(case, arguments, folder, load=folder / "none")
            self.unsharded_losses[key] = read_events(folder / "tensorboard", 0)["lm loss"]
        return compare_with_unsharded(
            found.get("lm loss", {}),
            self.unsharded_losses[key],
            case.train_iters,
            unsharded_tolerance(arguments),
        )

    def _train(self, case: Case, arguments: dict[str, str], folder: Path, load: Path) -> None:
        variables = {
            **os.environ,
            "TENSORBOARD_PATH": str(folder / "tensorboard"),
            "CHECKPOINT_SAVE_PATH": str(folder / "checkpoints"),
            "CHECKPOINT_LOAD_PATH": str(load),
            "DATA_CACHE_PATH": os.environ.get("DATA_CACHE_PATH", str(self.output / "data_cache")),
        }
        environment = dict(case.environment)
        if "--use-megatron-fsdp" not in arguments:
            # Megatron asks for it under DDP with tensor parallelism, and refuses it for FSDP.
            environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        self._start(
            case.num_ranks,
            command_line(arguments, variables),
            script=self.script,
            on_cpu=case.platform == "cpu",
            environment=environment,
        )


def _judge(
    case: Case,
    found: dict[str, Values],
    expected: dict[str, Values],
    exactly: bool,
    against: str,
    **kinds: str | None,
) -> list[Verdict]:
    verdicts = []
    for metric in case.metrics:
        missing = [x for x, has in (("the run", found), (against, expected)) if metric not in has]
        if missing:
            verdicts.append(Verdict(against, metric, False, f"absent from {', '.join(missing)}"))
            continue
        verdicts += [
            Verdict(f"{against}, {verdict.rule}", metric, verdict.passed, verdict.detail)
            for verdict in compare_with_golden(
                metric, found[metric], expected[metric], exactly=exactly, **kinds
            )
        ]
    return verdicts


def _kind_that_matters(case: Case) -> str | None:
    """Return the kind of CPU for a case that computes on one, None for a case of GPUs."""
    return cpu_kind() if case.platform == "cpu" else None


def cpu_kind() -> str:
    """Return vendor, family and model of this machine's CPU, where Linux says them.

    CPU cases pin their instructions to AVX2 by ``ENV_VARS``. That is not enough for equal bits: an
    Intel Xeon and an AMD EPYC were seen to differ in the last digit of two of 120 losses.
    """
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    if "vendor_id" not in fields:
        return f"{platform.system()} {platform.machine()}"
    return f"{fields['vendor_id']} family {fields['cpu family']} model {fields['model']}"


def main() -> int:
    """Run the cases that were named; 1 where one fails, 2 for a wrong name or file."""
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__.partition(";")[0])
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="default: all of the platform")
    add("--platform", choices=PLATFORMS, default="cpu")
    add("--list", action="store_true", help="print the cases of the platform and stop")
    add("--output", type=Path, help="new folder to keep events, checkpoints and values in")
    add("--allow-nondeterministic-algo", action="store_true", help="compare golden values to 5 %%")
    add("--script", type=Path, default=PRETRAIN_GPT, help="default: scripts/pretrain_gpt.py")
    options = parser.parse_args()
    try:
        chosen = select_cases(options.cases, options.platform)
        if options.list:
            for case in chosen:
                print(f"{case.name}  {case.model}, {case.num_ranks} ranks, {case.test_type}")
            return 0
        if options.output:
            options.output.mkdir(parents=True)
            return _run_all(options, chosen, options.output.resolve())
        with tempfile.TemporaryDirectory(prefix="functional_") as folder:
            return _run_all(options, chosen, Path(folder))
    except (CaseError, MetricsError, FileExistsError) as error:
        print(f"run.sh: {error}", file=sys.stderr)
        return 2


def _run_all(options: argparse.Namespace, chosen: list[Case], output: Path) -> int:
    exactly = not options.allow_nondeterministic_algo
    print(f"Golden values are compared {'exactly' if exactly else 'to 5 %'}.", flush=True)
    runner, num_failed = Runner(output, options.script.resolve(), exactly), 0
    for case in chosen:
        try:
            verdicts = runner.run(case)
        except (RuntimeError, MetricsError) as error:
            verdicts = [Verdict("training", "", False, str(error))]
        passed = all(verdict.passed for verdict in verdicts)
        num_failed += not passed
        print(f"{'PASSED' if passed else 'FAILED'} {case.name}", flush=True)
        for verdict in verdicts:
            mark = "ok" if verdict.passed else "NO"
            print(f"  {mark}  {verdict.rule}: {verdict.metric}: {verdict.detail}", flush=True)
    print(f"{len(chosen) - num_failed} passed, {num_failed} failed")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
