# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run releases together, each combination of ``CASES`` in a temporary environment.

    .venv/bin/python scripts/maintainer/check_compat.py    # all cases, a few minutes

``--only 0.19.0`` selects rows whose versions contain the text, ``--here`` checks the environment
that runs the script, and ``--megatron DIR`` that with a checkout of Megatron-LM, which needs
pybind11, make and g++. Below the row of an environment are the repairs that its megatron-core does
not need. The exit status is 1 if a result differs from the accepted ranges of versions.
"""

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from gpt_flags import FSDP, MUON, SMALL_GPT  # noqa: E402
from launched_run import TrainingLog  # noqa: E402

from megatron_muon.mcore import versions  # noqa: E402

# megatron-core, emerging-optimizers and torch. Source trees (docs/support.md) cannot be installed:
# --here runs them, with the tree on PYTHONPATH.
CASES = (
    ("0.19.2", "0.3.0", "2.15.0"),
    ("0.19.2", "0.3.0", "2.14.1"),
    ("0.19.2", "0.3.0", "2.13.0"),
    ("0.19.2", "0.3.0", "2.12.0"),
    ("0.19.2", "0.3.0", "2.11.0"),
    ("0.19.2", "0.3.0", "2.10.0"),
    ("0.19.2", "0.3.0", "2.9.1"),
    ("0.19.0", "0.3.0", "2.11.0"),
    # Refused: its fsdp_dtensor checkpoints and its Muon of fused QKV are other code.
    ("0.18.2", "0.3.0", "2.11.0"),
)
# Files that run without hypothesis, which the environments lack.
SMOKE_TESTS = (
    "mcore/test_patching",
    "newton_schulz/test_standard",
    "mcore/test_arguments",
    "mcore/test_factory",
)
# Of the generation of Megatron-FSDP's version 2 that is there; main's has more layouts.
FSDP_V2_TESTS = (
    "rows/test_fsdp_v2_layout",
    "fsdp2/test_megatron_fsdp_v2",
    "mcore/test_moved_adapters",
)
# Skipped by a release whose arguments lack the flag.
V2_TESTS = (
    "mcore/test_fsdp_v2",
    "mcore/test_parity",
    "mcore/test_pipeline",
    "checkpoint/test_resume",
)
STEPS, SAVED_AT = 5, 2
_FLAGS = (
    f"{SMALL_GPT} --num-layers 2 --hidden-size 32 --ffn-hidden-size 56 --group-query-attention"
    " --num-query-groups 2 --seq-length 16 --max-position-embeddings 16 --global-batch-size 4"
    f" --train-iters {STEPS} --lr-decay-iters 20 --lr 1e-2 --lr-decay-style constant"
    f" --eval-interval 1000 --optimizer muon {MUON} --muon-fp32-matmul-prec high"
)
_SHARDED = f"{FSDP} --data-parallel-sharding-strategy optim_grads_params"
# Relative, of every loss; docs/numerics.md says why losses differ at all.
_TOLERANCE = 5e-7


# Repairs whose place upstream has mended.
_MENDED = """
from megatron_muon.mcore.patches import PATCHES
for patch in PATCHES:
    if patch.is_repaired():
        print(f"- {patch.symbol}: mended upstream, so that this is skipped: {patch.purpose}")
"""


class Failed(Exception):
    """A step that did not end well; the message is a word for the table, and the reason."""


class Environment(NamedTuple):
    """Interpreter, folder for checkpoints, and environment variables of the steps."""

    python: Path
    folder: Path
    variables: Mapping[str, str]

    def run(self, *arguments: str) -> str:
        """Run Python, and return what it prints.

        Raises:
            Failed: With ``refused`` if ``IncompatibleMegatronError`` was raised, else ``failed``.
        """
        done = subprocess.run(
            [str(self.python), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env={**self.variables, "OMP_NUM_THREADS": "1"},
            timeout=3600.0,
        )
        if done.returncode == 0:
            return done.stdout
        # The launcher prints the text of the error alone.
        refusal = r"megatron-muon cannot be enabled, nothing was changed:\n(.+)"
        if match := re.search(refusal, done.stdout):
            raise Failed("refused", match[1].strip())
        print(done.stdout[-6000:], file=sys.stderr)
        raise Failed("failed", (done.stdout.strip().splitlines() or ["no output"])[-1])

    def train(self, *flags: str) -> dict[int, float]:
        """Train on two ranks through the launcher; return the loss of each iteration."""
        arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        arguments += [str(ROOT / "scripts" / name) for name in ("cpu_ranks", "pretrain_gpt.py")]
        log = TrainingLog()
        for line in self.run(*arguments, *_FLAGS.split(), *flags).splitlines():
            log.feed(line)
        return log.losses


def enable(environment: Environment) -> None:
    """Enable and disable the patches."""
    code = "import megatron_muon as m; m.enable(); assert m.is_enabled(); m.disable()"
    environment.run("-c", f"{code}; assert not m.is_enabled()")


def run_tests(names: Sequence[str], environment: Environment, selected: str = "") -> None:
    """Run files of the unit tests, or the selected tests in them (``-k``)."""
    files = [str(ROOT / "tests" / "unit_tests" / f"{name}.py") for name in names]
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", selected]
    output = environment.run("-m", "pytest", *options, *files)
    if not re.search(r"\d+ passed", output):
        raise Failed("-", "all tests are skipped")


def parity(environment: Environment) -> None:
    """Compare every loss under ZeRO-3 Megatron-FSDP with that of upstream's Muon under DDP."""
    sharded, whole = environment.train(*_SHARDED.split()), environment.train()
    if len(sharded) != STEPS or sharded.keys() != whole.keys():
        raise Failed("failed", f"expected {STEPS} losses, got {len(sharded)} and {len(whole)}")
    worst = max(abs(sharded[step] - loss) / abs(loss) for step, loss in whole.items())
    if worst > _TOLERANCE:
        raise Failed("failed", f"expected losses of DDP within {_TOLERANCE}, got {worst:.1e}")


def resume(environment: Environment) -> None:
    """Save during a run, load in another, and compare with the run that never stopped."""
    folder = str(environment.folder / "checkpoints")
    saves = ("--save", folder, "--save-interval", str(SAVED_AT))
    whole = environment.train(*_SHARDED.split(), *saves)
    loads = ("--load", folder, "--ckpt-step", str(SAVED_AT))
    resumed = environment.train(*_SHARDED.split(), *loads)
    # Megatron logs the second iteration of a process as the mean of its first two.
    compared = {step: whole.get(step) for step in (SAVED_AT + 1, STEPS)}
    if compared != {step: resumed.get(step) for step in compared} or min(resumed) <= SAVED_AT:
        raise Failed("failed", f"expected the losses {compared} after loading, got {resumed}")


CHECKS: dict[str, Callable[[Environment], None]] = {
    "enable": enable,
    "smoke": functools.partial(run_tests, SMOKE_TESTS),
    "fsdp_v2": functools.partial(run_tests, FSDP_V2_TESTS),
    "parity": parity,
    "resume": resume,
    "v2_flags": functools.partial(run_tests, V2_TESTS, selected="v2"),
}


def build_environment(case: Sequence[str], folder: Path) -> Environment:
    """Install the packages of a case and this checkout into a new virtual environment.

    Raises:
        subprocess.CalledProcessError: An installation failed; its output says why.
    """
    # Where scripts/environment.sh installs it, if it is not on PATH.
    uv = [shutil.which("uv") or str(ROOT / ".uv/bin/uv")]
    python = folder / "venv" / "bin" / "python"
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    install = [*uv, "pip", "install", "--quiet", "--python", str(python)]
    pins = [f"{name}=={v}" for name, v in zip(versions.ACCEPTED_VERSIONS, case, strict=True)]
    tools = ["einops", "pytest", "pyyaml", "setuptools", "wheel", "ninja", "pybind11"]
    for command in (
        [*uv, "venv", "--quiet", "--python", sys.executable, str(folder / "venv")],
        [*install, *pins, *tools],
        # Without its dependencies, which would refuse a row that is there to be refused.
        [*install, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)],
    ):
        subprocess.run(command, check=True, env=variables)
    return Environment(python, folder, variables)


def check(case: Sequence[str | None], environment: Environment, names: Sequence[str]) -> bool:
    """Run checks, print a row of the table, and return whether it is as the ranges claim.

    Where ``enable()`` refuses, the launcher must too: a training is tried, and nothing else.
    """
    installed = dict(zip(versions.ACCEPTED_VERSIONS, case, strict=True))
    claim = "refused" if versions.version_problems(installed) else "ok"
    words, reasons = [], []
    for name in names:
        if claim == "refused" and name not in ("enable", "parity"):
            words.append("-")
            continue
        try:
            CHECKS[name](environment)
            words.append("ok")
        except Failed as failure:
            word, reason = failure.args
            words.append(word)
            reasons.append(f"{name}: {reason}")
    is_right = set(words) - {"-"} <= {claim}
    cells = [*(str(version) for version in case), *words, "yes" if is_right else "NO"]
    print(f"| {' | '.join(cells)} | {'; '.join(reasons)} |", flush=True)
    return is_right


def main() -> int:
    """Check the requested cases and print the table; return 0 if all had the expected outcome."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--only", metavar="TEXT", default="", help="only cases whose versions contain TEXT")
    add("--here", action="store_true", help="check this environment and build none")
    add("--megatron", metavar="DIR", type=Path, help="that, with a Megatron-LM checkout")
    add("--steps", nargs="+", choices=CHECKS, default=list(CHECKS))
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in " ".join(case)]
    if not cases:
        parser.error(f"--only: expected text of a case, got {options.only}")
    head = [*versions.ACCEPTED_VERSIONS, *options.steps, "as claimed", "reasons"]
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}", flush=True)
    results = []
    with tempfile.TemporaryDirectory(prefix="megatron-muon-compat-") as temporary:
        if options.here or options.megatron:
            paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            if options.megatron:
                paths.insert(0, str(options.megatron.resolve()))
                sys.path.insert(0, paths[0])
            # A checkout compiles its dataset helpers with python3 and python3-config of PATH.
            tools = [str(Path(sys.executable).parent), f"{sys.base_prefix}/bin", os.environ["PATH"]]
            search = {"PYTHONPATH": os.pathsep.join(paths), "PATH": os.pathsep.join(tools)}
            variables = {**os.environ, **search}
            environment = Environment(Path(sys.executable), Path(temporary), variables)
            installed = list(versions.installed_versions().values())
            results.append(check(installed, environment, options.steps))
            # Imports warn on the same stream.
            print(*re.findall(r"^- .*", environment.run("-c", _MENDED), re.MULTILINE), sep="\n")
        else:
            for number, case in enumerate(cases):
                environment = build_environment(case, Path(temporary) / str(number))
                results.append(check(case, environment, options.steps))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
