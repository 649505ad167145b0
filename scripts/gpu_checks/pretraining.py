# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A tiny GPT through the launcher: the same losses twice, and those of DDP up to rounding."""

import contextlib
import io
import re
import sys
from collections.abc import Sequence

from gpt_flags import FSDP, MUON, SMALL_GPT
from launched_run import PRETRAIN_GPT, train
from training_log import TrainingLog

from gpu_checks.ranks import run_ranks
from gpu_checks.report import Context, Report

ITERATIONS = 10
_MODEL = (
    f"{SMALL_GPT} --num-layers 2 --hidden-size 64 --ffn-hidden-size 112 --group-query-attention"
    " --num-query-groups 2 --seq-length 32 --max-position-embeddings 32 --global-batch-size 4"
    f" --lr 2e-3 --min-lr 1e-4 --lr-decay-style cosine --optimizer muon {MUON}"
    f" --train-iters {ITERATIONS} --eval-interval {ITERATIONS + 1} --deterministic-mode"
)
_RUNS = {
    "Megatron-FSDP": f"{FSDP} --data-parallel-sharding-strategy optim_grads_params",
    "the same again": f"{FSDP} --data-parallel-sharding-strategy optim_grads_params",
    "DDP": "",
}
# Relative. CPU ranks differ by 1e-5; a GPU multiplies fp32 in TF32 or bf16 and stacks matrices,
# which amplify what sums in another order differ by. A wrong update shows in the second digit.
_TOLERANCE = 1e-3


def check(context: Context, report: Report) -> None:
    """Train three times, on one rank."""
    losses = {}
    for name, flags in _RUNS.items():
        log = _train(context, f"{_MODEL} {flags}".split())
        losses[name] = [log.losses.get(i, float("nan")) for i in range(1, ITERATIONS + 1)]
        report.data("losses", losses)
    first, again, ddp = losses.values()
    report.expect(first == again, f"expected equal losses of two runs, got {first} and {again}")
    # Not <=: a loss that is not there is NaN.
    worst = max(abs(a - b) / abs(b) for a, b in zip(first, ddp, strict=True))
    is_near = all(abs(a - b) <= _TOLERANCE * abs(b) for a, b in zip(first, ddp, strict=True))
    report.expect(is_near, f"expected the losses of DDP within {_TOLERANCE}, got {first} and {ddp}")
    report.figure(
        f"{ITERATIONS} iterations in deterministic mode, loss {first[0]:.4f} to {first[-1]:.4f}; "
        f"largest relative difference from DDP {worst:.1e}"
    )


def _train(context: Context, arguments: Sequence[str]) -> TrainingLog:
    if context.device == "cuda":
        try:
            return train(1, arguments, environment={"MEGATRON_MUON_DEVICE": "cuda"})
        except RuntimeError as error:
            # The line shows what went wrong, and not the command with paths of this machine.
            sys.stdout.write(str(error))
            found = [line for line in str(error).splitlines() if re.search(r"\w+Error: ", line)]
            raise RuntimeError(
                f"a run failed: {found[-1] if found else 'see its output'}"
            ) from None
    # Forked from what has imported megatron: seconds in place of half a minute.
    (printed,) = run_ranks(context, 1, _launch, [*arguments], timeout_s=0.5 * context.limit_s)
    log = TrainingLog()
    for line in printed.splitlines():
        log.feed(line)
    return log


def _launch(arguments: list[str]) -> str:
    """Run the script through the launcher on this rank, and return what it prints."""
    from megatron_muon.launcher import main

    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            main([str(PRETRAIN_GPT), *arguments])
    finally:
        sys.stdout.write(printed.getvalue())
    return printed.getvalue()
