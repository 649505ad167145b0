# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Kill a rank at random moments of saves, or stop it for a minute, and resume; print a table.

    .venv/bin/python tests/functional/kill_saves.py --kills 30 --stop-seconds 60

Kills take turns over synchronous, asynchronous and non-persistent saves of a toy GPT on two CPU
ranks, or with ``--fsdp2`` over both kinds of torch's saves of a small transformer, and over both
ranks. Ranks are stopped in a save and in a step. After a kill the newest finished checkpoint is
read, every byte of Megatron's compared with its checksum. The run is resumed, and its losses and
its last checkpoint are compared with a run that was not killed, bit for bit. The command ends with
1 if anything differs.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import pkgutil
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / name) for name in ("scripts", "tests/unit_tests", "")]

from helpers.checkpoint_runs import TRACKER, die, loadable, wrap  # noqa: E402
from helpers.fsdp2_models import stored  # noqa: E402
from helpers.ranks import launch, run_ranks  # noqa: E402
from helpers.toy_gpt import BF16, ZERO, fsdp_toy_gpt  # noqa: E402

LAST = 6
COMMON = [*BF16, *f"--train-iters {LAST} --lr-decay-iters 20".split()]
ALL, OTHERS = ("--save-interval", "1"), ("--save-interval", "3")
GLOBAL = "--non-persistent-ckpt-type global --non-persistent-save-interval 1".split()
KINDS = {
    "synchronous": [*ALL],
    "asynchronous": [*ALL, "--async-save"],
    "non-persistent": [*OTHERS, *GLOBAL],
    "non-persistent, asynchronous": [*OTHERS, *GLOBAL, "--async-save"],
}


def strike(target: str, rank: int, number: int, fraction: float, act: Callable[[], None]) -> None:
    """Act on a rank in a call of a number, after a fraction of the time of the first call."""
    durations: list[float] = []

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        if len(durations) == number - 1 and int(os.environ["RANK"]) == rank:
            threading.Timer(fraction * durations[0], act).start()
        start = time.monotonic()
        result = original(*args, **kwargs)
        durations.append(time.monotonic() - start)
        return result

    owner, _, name = target.rpartition(".")
    wrap(pkgutil.resolve_name(owner), name, call)


def stop(seconds: float) -> None:
    """Stop this process for a time."""
    command = f"sleep {seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", command], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def newest(folder: Path) -> int:
    """Check the bytes of what trackers name, and return the greatest iteration."""
    folders = [path for path in (folder, folder / "non_persistent") if (path / TRACKER).is_file()]
    return max(map(loadable, folders))


class Harness:
    """Runs of all kinds of saves, beside one that was not killed."""

    kinds = tuple(KINDS)
    save = "megatron.training.training.save_checkpoint"
    step = "megatron_muon.mcore.chained_optimizer.FSDPMuonChainedOptimizer.step"
    newest = staticmethod(newest)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        run = self._run("reference", self.kinds[0]).check()
        self._losses, self._tensors = run.losses, self._last(folder / "reference")

    def _run(self, name: str, kind: str, *flags: str, before: Any = None) -> Any:
        arguments = [*COMMON, *KINDS[kind], *flags, "--save", str(self._folder / name)]
        return launch(2, fsdp_toy_gpt(ZERO[3], *arguments), before=before, timeout_s=900.0)

    def _last(self, folder: Path) -> dict[str, Any]:
        tensors = stored(folder / f"iter_{LAST:07d}")
        # A data loader that starts again draws from the generators.
        return {key: v for key, v in tensors.items() if key.startswith(("model", "optimizer"))}

    def _differences(self, folder: Path, losses: list[float], begin: int) -> list[str]:
        found = self._last(folder)
        names = [k for k, v in self._tensors.items() if not v.equal(found[k])]
        return names + ["losses"] * (losses != self._losses[begin:])

    def kill(self, name: str, kind: str, rank: int, number: int, fraction: float) -> list[str]:
        """Kill a rank in a save, and resume; return the cells of a row."""
        before = functools.partial(strike, self.save, rank, number, fraction, die)
        codes = self._run(name, kind, before=before).exit_codes
        folder = self._folder / name
        iteration = self.newest(folder)
        resumed = self._run(name, kind, "--load", str(folder))
        problems = [f"exit codes {codes}"] * (codes[1 - rank] not in (0, 1))
        problems += [f"resumed {resumed.exit_codes}"] * any(resumed.exit_codes)
        problems += self._differences(folder, resumed.losses, iteration)
        state = "killed" if codes[rank] else "had ended"
        cells = [f"rank {rank} {state} in save {number}", str(iteration), str(codes)]
        return [*cells, ", ".join(problems) or "equal"]

    def stop(self, kind: str, place: str, seconds: float) -> list[str]:
        """Stop a rank in a save or in a step for a time; return the cells of a row."""
        name, target = f"{kind} {place}", {"save": self.save, "step": self.step}[place]
        # A step is short, and the first one, which may plan, is not.
        fraction = {"save": 0.3, "step": 0.0}[place]
        before = functools.partial(strike, target, 1, 4, fraction, functools.partial(stop, seconds))
        start = time.monotonic()
        run = self._run(name, kind, before=before)
        problems = self._differences(self._folder / name, run.losses, 0)
        problems += ["did not stop"] * (time.monotonic() - start < seconds)
        cells = [f"rank 1 stopped for {seconds:g} s in {place} 4"]
        cells.append(str(self.newest(self._folder / name)))
        return [*cells, str(run.exit_codes), ", ".join(problems) or "equal"]


def _train_fsdp2(kind: str, folder: str, before: Callable[[], None] | None) -> None:
    """Run the example of FSDP2, which goes on from the last complete checkpoint of a folder."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    pending: list[Any] = []
    groups: list[Any] = []

    def begin(original: Any, state: Any, checkpoint_id: Path) -> None:
        finish()
        if not groups:
            # Its thread and the step would mix their collectives on one group of gloo.
            groups.append(dist.new_group(backend="gloo"))
        saving = dcp.async_save(state, checkpoint_id=checkpoint_id, process_group=groups[0])
        pending.append(saving)

    def finish() -> None:
        for future in pending:
            future.result()
        pending.clear()

    def end(original: Any, *args: Any) -> None:
        finish()
        original(*args)

    if kind == "asynchronous":
        wrap(dcp, "save", begin)
        wrap(dist, "destroy_process_group", end)
    if before is not None:
        before()
    sys.argv = ["", "--steps", str(LAST), "--interval", "1", "--checkpoint", folder]
    runpy.run_path(str(ROOT / "scripts" / "train_fsdp2.py"), run_name="__main__")


class Fsdp2Harness(Harness):
    """The same for FSDP2, whose checkpoints torch writes."""

    kinds = ("synchronous", "asynchronous")
    save = "torch.distributed.checkpoint.save"
    step = "megatron_muon.fsdp2.muon.Muon.step"

    def _run(self, name: str, kind: str, *flags: str, before: Any = None) -> Any:
        run = run_ranks(2, _train_fsdp2, kind, str(self._folder / name), before, timeout_s=900.0)
        losses = re.findall(r"step \d+: loss (\S+)", run.outputs[0])
        history = [{"loss": float(loss)} for loss in losses]
        return dataclasses.replace(run, history=history)

    def _last(self, folder: Path) -> dict[str, Any]:
        return stored(folder / f"step_{LAST:06}")

    @staticmethod
    def newest(folder: Path) -> int:
        """Read the last complete checkpoint, and return its step."""
        last = max(folder.glob("step_*/.metadata")).parent
        stored(last)
        return int(last.name.removeprefix("step_"))


def main() -> int:
    """Print a row per kill and per stop."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--stop-seconds", type=float, default=0.0, help="0: stop no rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fsdp2", action="store_true", help="plain FSDP2, without Megatron")
    options = parser.parse_args()
    rng, rows = random.Random(options.seed), []
    print("| save | fault | newest finished | exit codes | resumed, beside no fault |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        harness = (Fsdp2Harness if options.fsdp2 else Harness)(Path(folder))
        for number in range(options.kills):
            kind = harness.kinds[number % len(harness.kinds)]
            # An asynchronous save is complete after its call; one is when the third begins.
            longest = 2.0 if "asynchronous" in kind else 1.1
            victim, save = number // len(harness.kinds) % 2, rng.randint(3, LAST - 1)
            fault = victim, save, rng.uniform(0, longest)
            rows.append([kind, *harness.kill(str(number), kind, *fault)])
            print(f"| {' | '.join(rows[-1])} |", flush=True)
        places = itertools.product(harness.kinds, ("save", "step"))
        for kind, place in places if options.stop_seconds else ():
            rows.append([kind, *harness.stop(kind, place, options.stop_seconds)])
            print(f"| {' | '.join(rows[-1])} |", flush=True)
    return int(any(row[-1] != "equal" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
