# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Flags of the toy GPT that the run-level tests train."""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpt_flags
import pytest
from gpt_flags import FSDP, MUON, SMALL_GPT

from helpers.device import has_megatron
from helpers.ranks import Run, launch
from helpers.split_reference import under_ddp

SEQ_LENGTH, NUM_ITERATIONS = 16, 8

_TOY_GPT = (
    f"{SMALL_GPT} --global-batch-size 4 --num-layers 2 --hidden-size 32"
    " --ffn-hidden-size 56 --group-query-attention --num-query-groups 2"
    f" --seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH}"
    f" --train-iters {NUM_ITERATIONS} --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine"
    f" --lr-warmup-iters 2 --eval-interval 1000 --optimizer muon {MUON}"
)

MOE = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall".split()

ZERO = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
HSDP = ("--num-distributed-optimizer-instances", "2")
HFSDP = (*HSDP, "--outer-dp-sharding-strategy", "optim")
TP = ("--tensor-model-parallel-size", "2")
PP = ("--pipeline-model-parallel-size", "2")
# The last stage has the output layer alone, which is no matrix of Muon's.
NO_MATRIX = (*PP, "--pipeline-model-parallel-layout", "Ett|L")
# No flags of Megatron's: toy_gpt() leaves the flag out that follows. Embedding and output layer
# share a weight; the momentum itself is orthogonalized.
_WITHOUT = "without:"
TIED = f"{_WITHOUT}--untie-embeddings-and-output-weights"
NO_NESTEROV = f"{_WITHOUT}--muon-nesterov"
# PyTorch's FSDP2 in place of Megatron-FSDP.
FSDP2 = (
    *(
        f"{_WITHOUT}{flag}"
        for flag in FSDP.split()
        if flag.startswith("--") and "format" not in flag
    ),
    *"--use-torch-fsdp2 --ckpt-format torch_dcp".split(),
)
# Two chunks of one layer on each rank.
INTERLEAVED = (*PP, "--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1")
# Multi-latent attention, whose values are of another width than its keys; without query groups.
LATENT = (
    *"--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 12 --qk-head-dim 8".split(),
    *"--qk-pos-emb-head-dim 4 --v-head-dim 6 --rope-type rope".split(),
    *"--position-embedding-type rope".split(),
    f"{_WITHOUT}--group-query-attention",
)
EP = (*MOE, "--expert-model-parallel-size", "2")
EXPERT_TP = "--expert-tensor-parallel-size"
# A lower learning rate, because rounding of weights adds up with the way they go.
BF16 = ("--bf16", "--lr", "2e-3", "--min-lr", "1e-4")
FP32_GRADIENTS = tuple(gpt_flags.FP32_GRADIENTS.split())


# Version 2, whose flags releases so far do not have.
V2 = ("--megatron-fsdp-version", "2")


def _has_flags_of_v2() -> bool:
    spec = importlib.util.find_spec("megatron.core") if has_megatron() else None
    if spec is None or spec.origin is None:
        return False
    return Path(spec.origin).with_name("optimizer").joinpath("fully_sharded_optimizer.py").exists()


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
needs_flags = pytest.mark.skipif(
    not _has_flags_of_v2(),
    reason="needs a Megatron-LM checkout: check_compat.py --megatron DIR --steps v2_flags",
)


def toy_gpt(*flags: str) -> list[str]:
    """Return the flags of a toy GPT under DDP with Muon, then ``flags``."""
    left_out = {flag.removeprefix(_WITHOUT) for flag in flags if flag.startswith(_WITHOUT)}
    every = [*_TOY_GPT.split(), *flags]
    return [flag for flag in every if flag not in left_out and not flag.startswith(_WITHOUT)]


def microbatches(number: int, world_size: int, flags: Sequence[str]) -> list[str]:
    """Return the flags of twelve samples an iteration in a number of microbatches.

    Two on four data-parallel ranks have eight samples. The samples decide how noisy losses are, and
    so the tolerances; microbatches decide how long a run takes.
    """
    num_data_parallel = world_size // _value(flags, TP[0]) // _value(flags, PP[0])
    size = 12 // (number * num_data_parallel)
    batch = size * number * num_data_parallel
    return ["--global-batch-size", str(batch), "--micro-batch-size", str(size)]


def _value(flags: Sequence[str], flag: str) -> int:
    """Return the value of a flag that is 1 by default."""
    return int(flags[flags.index(flag) + 1]) if flag in flags else 1


def fsdp_toy_gpt(sharding: str, *flags: str) -> list[str]:
    """Return the flags of the same model under Megatron-FSDP with a sharding strategy."""
    return toy_gpt(*FSDP.split(), "--data-parallel-sharding-strategy", sharding, *flags)


def v2_toy_gpt(*flags: str) -> list[str]:
    """Return the flags of the same model under version 2."""
    return fsdp_toy_gpt(ZERO[3], *V2, *flags)


def train(world_size: int, flags: Sequence[str], num_microbatches: int = 1, **options: Any) -> Run:
    """Train on the same samples on any number of ranks."""
    batches = microbatches(num_microbatches, world_size, flags)
    return launch(world_size, [*flags, *batches], **options).check()


def reference(
    *flags: str,
    compared_with: int = 4,
    num_microbatches: int = 1,
    before: Callable[[], None] | None = None,
) -> Run:
    """Train upstream's optimizer under DDP on the fewest ranks that the flags allow.

    One run serves all that train on the same samples, on any number of ranks.
    """
    _, num_samples, _, size = microbatches(num_microbatches, compared_with, flags)
    cut = int(size) if MOE[0] in flags else None
    # Interleaved stages need as many microbatches.
    least = num_microbatches if PP[0] in flags else 1
    return _reference(flags, int(num_samples), cut, least, before)


@functools.cache
def _reference(
    flags: tuple[str, ...],
    num_samples: int,
    size: int | None,
    num_microbatches: int,
    before: Callable[[], None] | None,
) -> Run:
    num_tensor, num_expert_tensor, num_expert = (
        _value(flags, flag) for flag in (TP[0], EXPERT_TP, EP[-2])
    )
    # Experts draw their first weights by their rank: without EP they would have others.
    in_stage = max(num_tensor, num_expert * num_expert_tensor)
    # So do the layers of a stage.
    num_ranks = in_stage * _value(flags, PP[0])
    size = size or num_samples * num_tensor // in_stage // num_microbatches
    batches = ("--global-batch-size", str(num_samples), "--micro-batch-size", str(size))
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if num_tensor > 1 else None
    upstreams, before = under_ddp(flags, before)
    return launch(num_ranks, toy_gpt(*upstreams, *batches), before=before, env=env).check()


def relative_differences(found: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Return ``|found - expected| / |expected|`` for each iteration of two runs of equal length."""
    assert len(found) == len(expected) > 0, (len(found), len(expected))
    return [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
