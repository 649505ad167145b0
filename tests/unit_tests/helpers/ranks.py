# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks for the tests: processes forked from a server that has imported megatron once.

On GPUs too (``helpers.device``): the server imports megatron and leaves CUDA alone. A world of two
ranks starts in 0.03 s on a quiet machine, the server in 10 s.
"""

import atexit
import dataclasses
import faulthandler
import functools
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from helpers import device

UNIT_TESTS = Path(__file__).resolve().parents[1]
ROOT = UNIT_TESTS.parents[1]
# For the other ranks, when one has failed.
_GRACE_S = 15.0
# When the piece that runs has to end, by time.monotonic(); conftest.py sets it.
ends_at = float("inf")
PRETRAIN_GPT = ROOT / "scripts" / "pretrain_gpt.py"


@dataclasses.dataclass(frozen=True)
class Run:
    """What a world of ranks left behind.

    Args:
        exit_codes: By rank; negative where a signal ended the process.
        outputs: Standard output and error by rank.
        history: One record an iteration, as rank 0 saw it, or with pipeline stages the last rank:
            loss, grad_norm, num_zeros, skipped.
        results: What the function that was run returned, by rank (JSON values).
    """

    exit_codes: list[int]
    outputs: list[str]
    history: list[dict[str, float]]
    results: list[Any]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.history]

    def check(self) -> "Run":
        """Return the run when every rank ended well, else fail with what the ranks printed."""
        if any(self.exit_codes):
            worst = next(rank for rank, code in enumerate(self.exit_codes) if code)
            raise AssertionError(
                f"exit codes {self.exit_codes}; rank {worst}:\n{self.outputs[worst][-6000:]}"
            )
        return self


@functools.cache
def _data_cache() -> str:
    """Return a folder in which Megatron keeps the order of its 12 million mock samples."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return folder.name


@functools.cache
def _context() -> Any:
    paths = [UNIT_TESTS, ROOT, ROOT / "scripts", ROOT / "benchmarks", os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path)
    # "spawn" is for a release of megatron that uses CUDA on import: ranks then start in 10 s.
    method = os.environ.get("MEGATRON_MUON_TEST_START", "forkserver")
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["helpers.preloaded"])
    return context


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 240.0,
    ends_with: int | None = None,
) -> Run:
    """Run a function on every rank of a new world of processes.

    Args:
        world_size: Number of ranks.
        function: Called with ``args`` on every rank; top-level; may return a JSON value.
        *args: Passed on.
        env: Environment variables to set on every rank.
        timeout_s: Seconds after which all ranks are killed, which fails the run.
        ends_with: Rank whose end is the run's: the others are killed then.
    """
    # Tests without ranks do not load torch.
    from torch.distributed import TCPStore

    places = device.place_ranks(world_size)
    # It outlives the ranks, and its port is taken from the moment that the kernel assigns it.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            # As under torchrun: no rank serves the store.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "WORLD_SIZE": str(world_size),
            # Gloo connects ranks when they first talk; a group of Megatron's is often never used.
            "TORCH_GLOO_LAZY_INIT": "1",
            **(env or {}),
        }
        ranks = [
            _context().Process(
                target=_run_rank, args=(rank, place, variables, folder, function, args)
            )
            for rank, place in enumerate(places)
        ]
        for process in ranks:
            process.start()
        timeout_s = max(1.0, min(timeout_s, ends_at - time.monotonic()))
        _wait(ranks if ends_with is None else [ranks[ends_with]], timeout_s, places[0].backend)
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
        results = [_read(folder, f"result_{rank}") for rank in range(world_size)]
        return Run(
            exit_codes=[process.exitcode for process in ranks],
            outputs=[_read(folder, f"output_{rank}") for rank in range(world_size)],
            history=[json.loads(line) for line in _read(folder, "history").splitlines()],
            results=[json.loads(result or "null") for result in results],
        )


def on_ranks(world_size: int, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator for tests that run on ranks, after their group has started.

    Fixtures and parameters are passed on to the ranks; ``options`` are those of ``run_ranks()``.
    """

    def decorate(function: Callable[..., None]) -> Any:
        @pytest.mark.ranks
        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            name = (function.__module__, function.__name__)
            run_ranks(world_size, _run_test, *name, arguments, **options).check()

        return test

    return decorate


def _run_test(module: str, name: str, arguments: Mapping[str, Any]) -> None:
    device.init_group()
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def run_cases(
    world_size: int, cases: Mapping[str, Callable[[], Any]], *, timeout_s: float = 240.0
) -> dict[str, list[Any]]:
    """Run functions one after the other in one world, which starts once for all of them."""
    by_rank = run_ranks(world_size, _run_all, dict(cases), timeout_s=timeout_s).check().results
    return {name: [of_rank[name] for of_rank in by_rank] for name in cases}


def cached_cases(
    cases: Mapping[int, Mapping[str, Callable[[], Any]]],
) -> Callable[[int], dict[str, list[Any]]]:
    """Return ``run_cases()`` by number of ranks, which runs each world once."""
    return functools.cache(lambda world_size: run_cases(world_size, cases[world_size]))


def _run_all(cases: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    device.init_group()
    return {name: case() for name, case in cases.items()}


def _wait(ranks: Sequence[Any], timeout_s: float, backend: str) -> None:
    """Wait until ranks have ended, or for as long as they may take."""
    deadline = time.monotonic() + timeout_s
    while (alive := [rank for rank in ranks if rank.is_alive()]) and time.monotonic() < deadline:
        # Over gloo a rank loses the connection to one that has failed; over NCCL it waits on.
        if backend == "nccl" and any(rank.exitcode for rank in ranks):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
            backend = ""
        alive[0].join(0.2)


def launch(
    world_size: int,
    arguments: Sequence[str],
    *,
    script: Path = PRETRAIN_GPT,
    before: Callable[[], None] | None = None,
    **options: Any,
) -> Run:
    """Run a training script through the launcher, as ``torchrun`` does on the device of the tests.

    The GPT script gets a folder for indices of data, which every run would build anew otherwise.

    Args:
        world_size: Number of ranks.
        arguments: Arguments of the script.
        script: The script.
        before: Called on every rank before the launcher, to break something on purpose.
        **options: Of ``run_ranks()``.
    """
    cache = ["--data-cache-path", _data_cache()] if script == PRETRAIN_GPT else []
    return run_ranks(world_size, _launch_rank, str(script), [*arguments, *cache], before, **options)


def _launch_rank(script: str, arguments: list[str], before: Callable[[], None] | None) -> int:
    import cpu_ranks

    from megatron_muon.launcher import main

    if before is not None:
        before()
    on_cpu = device.kind() == "cpu"
    return main([script, *arguments], enable_cpu_ranks=cpu_ranks.enable if on_cpu else None)


def _run_rank(
    rank: int,
    place: device.Place,
    variables: Mapping[str, str],
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        {
            **place.variables,
            device.BACKEND: place.backend,
            **variables,
            "RANK": str(rank),
            "LOCAL_RANK": str(place.local_rank),
            "MEGATRON_MUON_TEST_DEVICE": place.kind,
        }
    )
    with open(Path(folder) / f"output_{rank}", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)

    faulthandler.enable()

    import torch

    torch.set_num_threads(1)
    if place.kind == "cuda":
        device.claim_gpu(place.backend)
    if device.has_megatron() and rank in (0, int(variables["WORLD_SIZE"]) - 1):
        _record_history(Path(folder) / "history")
    try:
        result = function(*args)
        (Path(folder) / f"result_{rank}").write_text(json.dumps(result))
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (0, None)):
            traceback.print_exc()
            sys.stderr.flush()
            _end(error.code if isinstance(getattr(error, "code", None), int) else 1)
    sys.stdout.flush()
    _end(0)


def _end(status: int) -> NoReturn:
    """End this rank and the processes that it started, without tearing the interpreter down.

    Saves in Megatron's torch_dist start a manager of queues. It once outlived its rank, and each
    run of all tests left processes of 0.4 GB behind.
    """
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
    os._exit(status)


def _record_history(path: Path) -> None:
    """Write the unrounded numbers of each iteration, which Megatron logs with six digits."""
    import inspect

    import torch
    from megatron.core import mpu
    from megatron.training import training

    original = training.training_log
    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        # Only the last stage has the loss.
        has_stages = mpu.get_pipeline_model_parallel_world_size() > 1
        if (torch.distributed.get_rank() > 0) != has_stages:
            return original(*args, **kwargs)
        values = signature.bind(*args, **kwargs).arguments
        record = {
            "iteration": values["iteration"],
            "loss": float(values["loss_dict"].get("lm loss", float("nan"))),
            "grad_norm": float(values["grad_norm"] or 0.0),
            "num_zeros": float(values["num_zeros_in_grad"] or 0.0),
            "skipped": int(values["skipped_iter"]),
        }
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
        return original(*args, **kwargs)

    training.training_log = training_log


def _read(folder: str, name: str) -> str:
    path = Path(folder) / name
    return path.read_text(errors="replace") if path.exists() else ""
