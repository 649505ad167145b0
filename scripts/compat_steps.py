# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The steps that ``scripts/check_compat.py`` runs in each environment, and their outcomes."""

import dataclasses
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpt_flags import FSDP, MUON, SMALL_GPT
from training_log import TrainingLog

ROOT = Path(__file__).resolve().parents[1]
STEPS, SAVED_AT = 5, 2

# Fast, and without hypothesis, which the environments lack.
SMOKE_TESTS = (
    "mcore/test_patching",
    "newton_schulz/test_standard",
    "mcore/test_arguments",
    "mcore/test_factory",
)
# Of the generation that is there; main's has more layouts.
FSDP_V2_TESTS = (
    "runtime/test_fsdp_v2_layout",
    "fsdp2/test_megatron_fsdp_v2",
    "mcore/test_moved_adapters",
)

# Skipped by a release whose arguments lack the flag.
V2_TESTS = ("mcore/test_fsdp_v2", "mcore/test_parity", "mcore/test_pipeline")

_ENABLE = """
import megatron_muon
megatron_muon.enable()
assert megatron_muon.is_enabled()
megatron_muon.disable()
assert not megatron_muon.is_enabled()
"""

# Every symbol that is imported from megatron, patched or relied on. A name that cannot be imported
# is noted and replaced, so that one run lists them all.
_DIFFERENCES = """
import importlib, sys
for _ in range(20):
    try:
        from megatron_muon.mcore.patches import PATCHES
        from megatron_muon.mcore.relied_on import relied_on_problems
        break
    except ImportError as error:
        if not error.name_from:
            raise
        print(f"DIFFERENCE {error.name}.{error.name_from}: expected it to exist.")
        setattr(importlib.import_module(error.name), error.name_from, None)
        for name in [name for name in sys.modules if name.startswith("megatron_muon.mcore")]:
            del sys.modules[name]
problems = [problem for patch in PATCHES for problem in patch.problems()]
for problem in problems + relied_on_problems(has_v2=False):
    print("DIFFERENCE", problem)
"""

# Repairs whose place upstream has mended.
_MENDED = """
from megatron_muon.mcore.patches import PATCHES, V2_PATCHES
for patch in (*PATCHES, *V2_PATCHES):
    if patch.is_repaired():
        print(f"MENDED {patch.symbol}: mended upstream, so that this is skipped: "
              f"{patch.purpose}")
"""

_FLAGS = (
    f"{SMALL_GPT} --num-layers 2 --hidden-size 32 --ffn-hidden-size 56 --group-query-attention"
    " --num-query-groups 2 --seq-length 16 --max-position-embeddings 16 --global-batch-size 4"
    f" --train-iters {STEPS} --lr-decay-iters 20 --lr 1e-2 --lr-decay-style constant"
    f" --eval-interval 1000 --optimizer muon {MUON} --muon-fp32-matmul-prec high"
)
_SHARDED = f"{FSDP} --data-parallel-sharding-strategy optim_grads_params"
# Relative, of every loss; docs/numerics.md says why losses differ at all.
_TOLERANCE = 5e-7


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one step.

    Args:
        word: ``ok``, ``failed``, ``refused`` (with our own error) or ``-`` where it was not run.
        reason: Why it is not ok, in a sentence.
    """

    word: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where to run the steps.

    Args:
        python: Interpreter.
        folder: Existing folder for output and checkpoints.
        env: Environment variables.
    """

    python: Path
    folder: Path
    env: Mapping[str, str]

    def run(self, name: str, *arguments: str, timeout_s: float = 300.0) -> tuple[int, str]:
        """Run Python, keep what it prints in ``<name>.log``, return exit status and output."""
        try:
            done = subprocess.run(
                [str(self.python), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self.folder,
                env={**self.env, "OMP_NUM_THREADS": "1"},
                timeout=timeout_s,
                check=False,
            )
            status, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            printed = error.stdout or b""
            output = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
            status, output = 124, f"{output}\nexpected an end within {timeout_s:.0f} s\n"
        (self.folder / f"{name}.log").write_text(output)
        return status, output

    def train(
        self, name: str, *flags: str, sharding: str = _SHARDED
    ) -> tuple[Outcome, dict[int, float]]:
        """Train on two ranks through the launcher; return the outcome and the losses."""
        arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        arguments += [str(ROOT / "scripts" / name) for name in ("cpu_ranks", "pretrain_gpt.py")]
        status, output = self.run(name, *arguments, *_FLAGS.split(), *sharding.split(), *flags)
        log = TrainingLog()
        for line in output.splitlines():
            log.feed(line)
        return outcome_of(status, output), log.losses


def outcome_of(status: int, output: str) -> Outcome:
    """Return the outcome of a program by its exit status and output.

    Args:
        status: Exit status.
        output: Standard output and error.

    Returns:
        ``refused`` only where ``IncompatibleMegatronError`` was raised, with its first problem; the
        launcher prints its text alone.
    """
    if status == 0:
        return Outcome("ok")
    if match := re.search(r"megatron-muon cannot be enabled, nothing was changed:\n(.+)", output):
        return Outcome("refused", re.sub(r"^\[[^]]*\]:", "", match[1]).strip())
    errors = re.findall(
        r"^(?:\[[^]]*\]:)?E?\s*(\w+(?:\.\w+)*(?:Error|Exception)\b.*)$", output, re.M
    )
    lines = output.strip().splitlines() or ["no output"]
    return Outcome("failed", (errors or lines)[-1].strip())


def _enable(environment: Environment) -> Outcome:
    return outcome_of(*environment.run("enable", "-c", _ENABLE))


def _smoke(environment: Environment) -> Outcome:
    return outcome_of(*_run_tests(environment, "smoke", *SMOKE_TESTS))


def _fsdp_v2(environment: Environment) -> Outcome:
    return outcome_of(*_run_tests(environment, "fsdp_v2", *FSDP_V2_TESTS, timeout_s=900.0))


def _v2_flags(environment: Environment) -> Outcome:
    """Run what needs Megatron-FSDP v2 in Megatron's flags; "-" where the release lacks it."""
    status, output = _run_tests(environment, "v2_flags", *V2_TESTS, selected="v2", timeout_s=3600.0)
    if status == 0 and not re.search(r"\d+ passed", output):
        return Outcome("-")
    return outcome_of(status, output)


def _run_tests(
    environment: Environment,
    step: str,
    *names: str,
    selected: str = "",
    timeout_s: float = 300.0,
) -> tuple[int, str]:
    tests = [str(ROOT / "tests" / "unit_tests" / f"{name}.py") for name in names]
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", selected]
    return environment.run(step, "-m", "pytest", *options, *tests, timeout_s=timeout_s)


def _train(environment: Environment) -> Outcome:
    outcome, losses = environment.train("train")
    if outcome.word == "ok" and len(losses) != STEPS:
        return Outcome("failed", f"expected {STEPS} losses, got {len(losses)}")
    return outcome


def _parity(environment: Environment) -> Outcome:
    """Compare every loss with that of upstream's Muon under DDP."""
    outcome, sharded = environment.train("sharded")
    if outcome.word != "ok":
        return outcome
    outcome, whole = environment.train("whole", sharding="")
    if outcome.word != "ok":
        return outcome
    if len(sharded) != STEPS or sharded.keys() != whole.keys():
        return Outcome("failed", f"expected {STEPS} losses, got {len(sharded)} and {len(whole)}")
    worst = max(abs(sharded[step] - loss) / abs(loss) for step, loss in whole.items())
    if worst <= _TOLERANCE:
        return outcome
    return Outcome("failed", f"expected the losses of DDP within {_TOLERANCE}, got {worst:.1e}")


def _resume(environment: Environment) -> Outcome:
    """Save during a run, load in another, and compare with the run that never stopped."""
    saves = ("--save", str(environment.folder / "checkpoints"), "--save-interval", str(SAVED_AT))
    outcome, whole = environment.train("save", *saves)
    if outcome.word != "ok":
        return outcome
    loads = ("--load", str(environment.folder / "checkpoints"), "--ckpt-step", str(SAVED_AT))
    outcome, resumed = environment.train("load", *loads)
    # Megatron logs the second iteration of a process as the mean of its first two.
    compared = (SAVED_AT + 1, STEPS)
    expected = [whole.get(iteration) for iteration in compared]
    found = [resumed.get(iteration) for iteration in compared]
    if outcome.word == "ok" and (first := min(resumed, default=0)) != SAVED_AT + 1:
        return Outcome("failed", f"expected to go on after step {SAVED_AT}, got step {first}")
    if outcome.word == "ok" and (found != expected or None in expected):
        return Outcome("failed", f"expected the losses {expected} of {compared}, got {found}")
    return outcome


STEP_FUNCTIONS: dict[str, Callable[[Environment], Outcome]] = {
    "enable": _enable,
    "smoke": _smoke,
    "fsdp_v2": _fsdp_v2,
    "train": _train,
    "parity": _parity,
    "resume": _resume,
    "v2_flags": _v2_flags,
}


def run_steps(environment: Environment, names: Sequence[str]) -> dict[str, Outcome]:
    """Run steps in order.

    Where ``enable()`` refuses, the launcher must too, so training is still tried; tests and
    checkpoints are not.

    Args:
        environment: Where to run them.
        names: Steps of ``STEP_FUNCTIONS``.
    """
    outcomes: dict[str, Outcome] = {}
    for name in names:
        is_refused = outcomes.get("enable", Outcome("ok")).word == "refused"
        skip = is_refused and name in ("smoke", "fsdp_v2", "parity", "resume", "v2_flags")
        outcomes[name] = Outcome("-") if skip else STEP_FUNCTIONS[name](environment)
    return outcomes


def differences(environment: Environment) -> list[str]:
    """List the symbols that the package needs and a refused megatron-core does not have."""
    return _lines(environment, "differences", _DIFFERENCES, "DIFFERENCE ")


def mended_upstream(environment: Environment) -> list[str]:
    """List the repairs that the megatron-core of an environment does not need."""
    return _lines(environment, "mended", _MENDED, "MENDED ")


def _lines(environment: Environment, name: str, code: str, prefix: str) -> list[str]:
    _, output = environment.run(name, "-c", code)
    return [line.removeprefix(prefix) for line in output.splitlines() if line.startswith(prefix)]
