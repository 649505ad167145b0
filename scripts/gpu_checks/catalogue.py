# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The list of checks. It imports none of them: ``--list`` needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Args:
        number: Of the question it belongs to.
        name: For ``--only``.
        question: What it answers.
        target: ``module:function``, called with a ``Context`` and a ``Report``.
        limit_s: Seconds after which it is ended, on a GPU. Imports take up to half of it where
            several checks run at once.
        needs_gpu: Why it is not possible on a CPU; empty where it is.
        is_alone: Whether no other check may run beside it: it measures time, or the whole card.
    """

    number: str
    name: str
    question: str
    target: str
    limit_s: float
    needs_gpu: str = ""
    is_alone: bool = False


_SPEED = "the speed of a CPU says nothing about a GPU"
_ALLOCATOR = "it reads the allocator of a GPU"

CHECKS: tuple[Check, ...] = (
    Check(
        "1",
        "gradients",
        "main gradients of four microbatches equal the unsharded sum, each ZeRO stage",
        "gpu_checks.gradients:check",
        120,
    ),
    Check(
        "2",
        "norms",
        "sums of squares equal float64 on the CPU, and do not depend on how a matrix is cut",
        "gpu_checks.norms:check",
        90,
    ),
    Check(
        "3",
        "newton-schulz",
        "a stack of one has upstream's bits; slots, neighbours and NaN do not matter",
        "gpu_checks.newton_schulz_bits:check",
        120,
    ),
    Check(
        "3",
        "backends",
        "each way to compute Newton-Schulz is as near to float64 as documented",
        "gpu_checks.newton_schulz_backends:check",
        120,
    ),
    Check(
        "4",
        "elementwise",
        "fused element-wise forms have the bits of the separate ones",
        "gpu_checks.elementwise:check",
        60,
    ),
    Check(
        "5",
        "engine",
        "owner compute on 2, 4 and 8 ranks equals whole matrices",
        "gpu_checks.engine:check",
        240,
    ),
    Check(
        "6",
        "host-reads",
        "the host waits for the device in none but the expected places of a step",
        "gpu_checks.host_reads:check",
        90,
    ),
    Check(
        "7",
        "speed",
        "TFLOP/s of Newton-Schulz by shape and batch",
        "gpu_checks.newton_schulz_speed:check",
        120,
        needs_gpu=_SPEED,
        is_alone=True,
    ),
    Check(
        "7",
        "backends-speed",
        "each way to compute Newton-Schulz beside the standard one",
        "gpu_checks.newton_schulz_backends:check_speed",
        200,
        needs_gpu=_SPEED,
        is_alone=True,
    ),
    Check(
        "7",
        "launches",
        "kernels and host time of a matrix in a step",
        "gpu_checks.launches:check",
        90,
        needs_gpu=_SPEED,
        is_alone=True,
    ),
    Check(
        "8",
        "memory",
        "construction and three steps take the staging memory that is reported",
        "gpu_checks.memory:check",
        120,
        needs_gpu=_ALLOCATOR,
    ),
    Check(
        "8",
        "out-of-memory",
        "one rank that runs out of memory raises on both",
        "gpu_checks.memory:check_out_of_memory",
        90,
        needs_gpu=_ALLOCATOR,
    ),
    Check(
        "9",
        "scripts",
        "scripts/train_megatron_core.py learns",
        "gpu_checks.scripts:check",
        90,
    ),
    Check(
        "9",
        "fsdp2",
        "scripts/train_fsdp2.py learns",
        "gpu_checks.scripts:check_fsdp2",
        90,
    ),
    Check(
        "9",
        "scalar-optimizers",
        "Adam and Lion beside Muon step Megatron-FSDP's shards by their formulas",
        "gpu_checks.scalar_optimizers:check",
        120,
    ),
    Check(
        "10",
        "pretraining",
        "two runs of a tiny GPT have equal losses, and those of DDP up to rounding",
        "gpu_checks.pretraining:check",
        180,
    ),
    Check(
        "10",
        "nccl",
        "one rank over NCCL: empty messages, new groups, memory",
        "gpu_checks.nccl:check",
        60,
        needs_gpu="NCCL needs a GPU",
        is_alone=True,
    ),
)
MACHINE = Check("", "machine", "card, driver and versions", "gpu_checks.machine:check", 60)
