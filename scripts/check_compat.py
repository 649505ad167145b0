# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run releases together, each combination of ``CASES`` in a temporary environment.

    .venv/bin/python scripts/check_compat.py                  # all cases, a few minutes
    .venv/bin/python scripts/check_compat.py --only 0.19.0    # rows whose versions contain the text
    .venv/bin/python scripts/check_compat.py --here           # the environment it runs in
    .venv/bin/python scripts/check_compat.py --megatron DIR   # that, with a Megatron-LM checkout

A case: enable() and disable(); a few test files, and those of Megatron-FSDP's version 2; five steps
of a toy GPT on two CPU ranks with Muon under ZeRO-3 Megatron-FSDP; the same under DDP, with the
same losses; five steps that save after two, and a run that loads and repeats the last three; where
Megatron's flags have version 2, the tests of that. Below the table are the repairs that a checkout
does not need. The exit status is 1 if any result differs from the table. A checkout needs pybind11,
make and g++ for Megatron's dataset helpers.
"""

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from compat_steps import (  # noqa: E402
    STEP_FUNCTIONS,
    Environment,
    Outcome,
    differences,
    mended_upstream,
    run_steps,
)

from megatron_muon.mcore import versions  # noqa: E402


@dataclasses.dataclass(frozen=True)
class Case:
    """Packages to install together.

    Args:
        megatron_core: Release of megatron-core.
        emerging_optimizers: Release of emerging-optimizers.
        torch: Release of torch.
        transformer_engine: What to install of Transformer Engine; empty for nothing.
    """

    megatron_core: str
    emerging_optimizers: str
    torch: str
    transformer_engine: str = ""

    @property
    def versions(self) -> dict[str, str]:
        """Version by package name."""
        found = (self.megatron_core, self.emerging_optimizers, self.torch)
        return dict(zip(versions.ACCEPTED_VERSIONS, found, strict=True))

    @property
    def cells(self) -> tuple[str, ...]:
        """The first cells of its row of the printed table."""
        return (*self.versions.values(), self.transformer_engine or "none")

    @property
    def claim(self) -> str:
        """Expected outcome by the accepted ranges: ``ok`` or ``refused``."""
        found = {name: None if v == "none" else v for name, v in self.versions.items()}
        return "refused" if versions.version_problems(found) else "ok"


# Source trees (docs/support.md) cannot be installed: --here runs them, with the tree on PYTHONPATH.
CASES: tuple[Case, ...] = (
    Case("0.19.2", "0.3.0", "2.15.0"),
    Case("0.19.2", "0.3.0", "2.14.1"),
    Case("0.19.2", "0.3.0", "2.13.0"),
    Case("0.19.2", "0.3.0", "2.12.0"),
    Case("0.19.2", "0.3.0", "2.11.0"),
    Case("0.19.2", "0.3.0", "2.10.0"),
    Case("0.19.2", "0.3.0", "2.9.1"),
    Case("0.19.0", "0.3.0", "2.11.0"),
    # Refused: its fsdp_dtensor checkpoints and its Muon of fused QKV are other code.
    Case("0.18.2", "0.3.0", "2.11.0"),
)

# Its extension is compiled at installation, which takes minutes and needs the headers of CUDA 13.
WHOLE_TRANSFORMER_ENGINE = dataclasses.replace(
    CASES[0], transformer_engine="transformer-engine[core_cu13,pytorch]"
)


@dataclasses.dataclass(frozen=True)
class Result:
    """A case, the outcome of its steps, and what its packages do without this one.

    Args:
        case: The case.
        outcomes: By step.
        findings: What a refused megatron-core lacks, how its import fails, or which repairs it does
            not need.
    """

    case: Case
    outcomes: dict[str, Outcome]
    findings: tuple[str, ...] = ()

    @property
    def is_as_claimed(self) -> bool:
        """Whether every step that was run had the expected outcome."""
        words = {outcome.word for outcome in self.outcomes.values()} - {"-"}
        return words == {self.case.claim}


def find_uv() -> list[str]:
    """Find a uv that runs, as ``scripts/environment.sh`` does.

    Raises:
        FileNotFoundError: There is none.
    """
    for candidate in (["uv"], [str(ROOT / ".uv/bin/uv")], [sys.executable, "-m", "uv"]):
        try:
            subprocess.run([*candidate, "--version"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    raise FileNotFoundError(
        "uv: expected it on PATH or in .uv/bin, got neither. Run bash scripts/test.sh once, which "
        "installs it, or install uv."
    )


def build_environment(case: Case, folder: Path, uv: Sequence[str]) -> Environment:
    """Install the packages of a case and this checkout into a new virtual environment.

    Args:
        case: What to install.
        folder: New folder, which will hold ``venv`` and the output of the steps.
        uv: Command that runs uv.

    Raises:
        subprocess.CalledProcessError: An installation failed; its ``stderr`` says why.
    """
    python = folder / "venv" / "bin" / "python"
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def install(*arguments: str) -> None:
        """Run uv's pip."""
        command = [*uv, "pip", "install", "--quiet", "--python", str(python), *arguments]
        subprocess.run(command, check=True, capture_output=True, text=True, env=env)

    wanted = sys.executable if sys.version_info[:2] == (3, 12) else "3.12"
    folder.mkdir(parents=True)
    command = [*uv, "venv", "--quiet", "--python", wanted, str(folder / "venv")]
    subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    pins = [f"{name}=={version}" for name, version in case.versions.items()]
    install(*pins, "einops", "pytest", "pyyaml", "setuptools", "wheel", "ninja", "pybind11")
    if case.transformer_engine:
        site = folder / "venv" / "lib" / "python3.12" / "site-packages"
        includes = [str(path) for path in site.glob("nvidia/*/include")]
        env["CPLUS_INCLUDE_PATH"] = os.pathsep.join(includes)
        install("--no-build-isolation", case.transformer_engine, *pins)
    # Without its dependencies, which would refuse a row that is there to be refused.
    install("--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    return Environment(python, folder, env)


def check(case: Case, folder: Path, uv: Sequence[str], steps: Sequence[str]) -> Result:
    """Run the steps of a case in an environment built for it."""
    try:
        environment = build_environment(case, folder, uv)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Result(case, {"install": Outcome("failed", reason)})
    outcomes = run_steps(environment, steps)
    findings: Sequence[str] = ()
    if versions.version_problems(case.versions):
        findings = differences(environment)
    return Result(case, outcomes, tuple(findings))


def check_here(folder: Path, steps: Sequence[str], megatron: Path | None = None) -> Result:
    """Run the steps in the environment of this process.

    Args:
        folder: Existing folder for output and checkpoints.
        steps: Steps of ``STEP_FUNCTIONS``.
        megatron: Megatron-LM checkout to import instead of the installed megatron-core.
    """
    env = dict(os.environ)
    if megatron is not None:
        sys.path.insert(0, str(megatron))
        paths = (str(megatron), str(ROOT), env.get("PYTHONPATH"))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    found = versions.installed_versions()
    if absent := [name for name, version in found.items() if version is None]:
        reason = f"{', '.join(absent)}: expected to be installed, found none"
        case = Case(*(version or "none" for version in found.values()), transformer_engine="-")
        return Result(case, {"install": Outcome("failed", reason)})
    case = Case(*map(str, found.values()), transformer_engine="as it is")
    environment = Environment(Path(sys.executable), folder, env)
    return Result(case, run_steps(environment, steps), tuple(mended_upstream(environment)))


def markdown(results: Sequence[Result], steps: Sequence[str]) -> str:
    """Lay the results out as a table, with the reasons and the differences below it."""
    head = (*versions.ACCEPTED_VERSIONS, "transformer-engine", *steps, "as claimed")
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    notes = []
    for result in results:
        words = [result.outcomes.get(step, Outcome("-")).word for step in steps]
        cells = (*result.case.cells, *words, "yes" if result.is_as_claimed else "NO")
        lines.append(f"| {' | '.join(cells)} |")
        steps_by_outcome: dict[Outcome, list[str]] = {}
        for step, outcome in result.outcomes.items():
            steps_by_outcome.setdefault(outcome, []).append(step)
        for outcome, names in steps_by_outcome.items():
            if outcome.reason:
                title = f"{' / '.join(result.case.cells)}, {', '.join(names)}"
                notes.append(f"- {title} {outcome.word}: {outcome.reason}")
        notes += [f"  - {finding}" for finding in result.findings]
    return "\n".join([*lines, "", *notes]).rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested cases and print the table; return 0 if all had the expected outcome."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="TEXT", help="only cases whose row contains TEXT")
    parser.add_argument("--here", action="store_true", help="check this environment and build none")
    parser.add_argument(
        "--megatron",
        metavar="DIR",
        type=Path,
        help="check this environment with a Megatron-LM checkout in place of megatron-core",
    )
    parser.add_argument(
        "--keep", metavar="DIR", type=Path, help="keep environments and logs in DIR"
    )
    parser.add_argument("--steps", nargs="+", choices=STEP_FUNCTIONS, default=list(STEP_FUNCTIONS))
    parser.add_argument(
        "--with-transformer-engine",
        action="store_true",
        help="also compile all of Transformer Engine, which takes minutes",
    )
    options = parser.parse_args(argv)
    if options.keep is not None and options.keep.exists():
        parser.error(f"--keep: expected a new folder, got {options.keep}, which exists")
    if options.megatron is not None:
        options.megatron = options.megatron.resolve()
        if not (options.megatron / "megatron" / "core").is_dir():
            parser.error(
                f"--megatron: expected a folder with megatron/core, got {options.megatron}"
            )
    cases = (*CASES, *([WHOLE_TRANSFORMER_ENGINE] if options.with_transformer_engine else []))
    cases = tuple(c for c in cases if not options.only or options.only in " ".join(c.cells))
    if not cases:
        parser.error(f"--only: expected text of a case, got {options.only}")
    results = []
    with tempfile.TemporaryDirectory(prefix="megatron-muon-compat-") as temporary:
        folder = Path(temporary) if options.keep is None else options.keep.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if options.here or options.megatron is not None:
            results.append(check_here(folder, options.steps, options.megatron))
        else:
            uv = find_uv()
            for index, case in enumerate(cases):
                print(f"{index + 1} of {len(cases)}: {', '.join(case.cells)}", file=sys.stderr)
                results.append(check(case, folder / str(index + 1), uv, options.steps))
    print(markdown(results, options.steps))
    return 0 if all(result.is_as_claimed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
