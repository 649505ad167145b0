# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Sentences of the documents that a run shows to be right or wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evidence import verdicts
from evidence.records import NOT_TRIED, Evidence
from evidence.verdicts import NothingFoundError, Results, Verdict


@dataclass(frozen=True)
class Promise:
    """A sentence of a document that a piece can show to be right or wrong.

    Args:
        subject: What it is about.
        document: Its file.
        sentence: As it stands there.
        piece: The piece that shows it; "" if none does.
        judge: Tells whether it holds, and why.
        min_gpus: Fewest GPUs that can show it; 0 if CPU ranks can.
        is_fact: About another optimizer's time, or a machine: no failure of this package.
    """

    subject: str
    document: str
    sentence: str
    piece: str
    judge: Callable[[Results], Verdict]
    min_gpus: int = 0
    is_fact: bool = False


README, NUMERICS, PERFORMANCE = "README.md", "docs/numerics.md", "docs/performance.md"
COMMUNICATION, CHECKPOINTS = "docs/communication.md", "docs/checkpoints.md"

PROMISES = (
    Promise(
        "bits of a step",
        README,
        "With fp32 messages and one owner per matrix, a step has the bits of Muon on the unsharded"
        " model.",
        *("check", verdicts.bits),
    ),
    Promise(
        "bits of a step, tests",
        NUMERICS,
        "`test_muon.py` compares parameters and momentum after three steps on 1 to 8 ranks, with"
        " all kinds of shards and shapes",
        *("tests_optimizer", verdicts.tests, 1),
    ),
    Promise(
        "layouts together, tests",
        README,
        "hybrid sharding, tensor parallelism, expert parallelism and shards of unequal size work"
        " together",
        *("tests_model", verdicts.tests, 1),
    ),
    Promise(
        "state on other ranks, tests",
        README,
        "Optimizer state of Megatron-FSDP's version 2 loads on other numbers of ranks.",
        *("tests_fsdp2", verdicts.tests, 1),
    ),
    Promise("losses", NUMERICS, "A run: equal to the rounding of sums", "parity", verdicts.losses),
    Promise(
        "losses of a long run",
        NUMERICS,
        "A run: equal to the rounding of sums",
        *("parity_1000", verdicts.losses, 2),
    ),
    Promise(
        "messages under products",
        README,
        "Each matrix is orthogonalized once, on one rank, while the next ones are in transit",
        *("overlap", verdicts.overlap, 2),
    ),
    Promise(
        "peak memory",
        "docs/design.md",
        "Groups, connections and the memory of a step are made before ranks agree to step",
        *("memory", verdicts.memory),
    ),
    Promise(
        "memory of states",
        README,
        "4 bytes of state per parameter (Adam: 8)",
        *("step", verdicts.states),
    ),
    Promise(
        "bytes",
        COMMUNICATION,
        "A matrix of `E` elements, `H` of them on its owners, sends `E - H` elements in the gather"
        " and in the scatter, without padding.",
        *("step", verdicts.sent_bytes),
    ),
    Promise(
        "updates of peers",
        PERFORMANCE,
        "First updates of all agree within 0.04 of their norm in fp32",
        *("step", verdicts.updates),
    ),
    Promise(
        "launches",
        PERFORMANCE,
        "| Llama-3-8B, 64 | 1.8 | 2.2 | 5.0 | 30 |",
        *("host", verdicts.launches),
    ),
    Promise(
        "upstream's layer-wise Muon",
        PERFORMANCE,
        "`owner` is 4.2 times faster than an all-gather of every matrix",
        *("layer_wise", verdicts.layer_wise, 2, True),
    ),
    Promise(
        "torch.optim.Muon",
        "docs/peers.md",
        "every matrix on every rank; 14 to 18 times the bytes above",
        *("step", verdicts.beside("torch.optim.Muon", is_faster=False), 2, True),
    ),
    Promise(
        "dion",
        "docs/peers.md",
        "faster on 600 matrices of 16 x 16 and on six experts",
        *("step", verdicts.beside("dion", is_faster=True), 2, True),
    ),
    Promise(
        "DistMuon",
        "docs/peers.md",
        "two collectives a step where this package has three or four; a step takes 0.78 to 0.95 of"
        " the time without replicas",
        *("step", verdicts.beside("DistMuon", is_faster=True), 2, True),
    ),
    Promise(
        "rates",
        PERFORMANCE,
        "Rates of Newton-Schulz were measured on an H200",
        *("check", verdicts.rates, 1, True),
    ),
    Promise(
        "a killed rank",
        COMMUNICATION,
        "torchrun ends the others, and shows the first traceback.",
        *("killed_rank", verdicts.killed_rank),
    ),
    Promise(
        "a restart",
        CHECKPOINTS,
        "On the same ranks losses, weights and state of a resumed run have the bits of an"
        " uninterrupted run",
        *("killed_rank", verdicts.restart),
    ),
    Promise(
        "a killed save",
        CHECKPOINTS,
        "compare the resumed run with one without a fault, bit for bit",
        *("killed_save", verdicts.killed_save),
    ),
    Promise(
        "share of an iteration",
        README,
        "the step is 0.3 % of an iteration of 4 M tokens, by estimate",
        *("", verdicts.unmeasured, 64),
    ),
)


def judge(promise: Promise, evidence: Evidence, folder: Path) -> Verdict:
    """Judge a promise from the records of a run and the logs in its folder."""
    gpus = evidence.machine.gpus * evidence.machine.nodes
    if gpus < promise.min_gpus:
        found = f"got {gpus}" if gpus else "these are CPU ranks"
        needed = "a GPU" if promise.min_gpus == 1 else f"{promise.min_gpus} GPUs"
        return Verdict(NOT_TRIED, f"needs {needed}, {found}")
    record = evidence.records.get(promise.piece)
    if record is None:
        return Verdict(NOT_TRIED, f"{promise.piece or 'no piece'} has not run")
    if record.verdict == NOT_TRIED:
        return Verdict(NOT_TRIED, f"{promise.piece}: {record.detail}")
    log = folder / f"{promise.piece}.log"
    text = log.read_text(errors="replace") if log.is_file() else ""
    try:
        return promise.judge(Results(evidence.machine, record, text))
    except (NothingFoundError, KeyError, TypeError) as error:
        ended = f"{record.verdict}, {record.detail}" if record.detail else record.verdict
        return Verdict(NOT_TRIED, f"{promise.piece} {ended}: {error}")
