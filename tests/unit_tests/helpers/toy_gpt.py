# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Flags of the toy GPT that the run-level tests train."""

from collections.abc import Sequence

SEQ_LENGTH = 16

_TOY_GPT = f"""
--num-layers 2 --hidden-size 32 --ffn-hidden-size 56 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --normalization RMSNorm --swiglu
--no-bias-swiglu-fusion --position-embedding-type rope --no-rope-fusion
--disable-bias-linear --untie-embeddings-and-output-weights
--seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH}
--tokenizer-type NullTokenizer --vocab-size 95 --make-vocab-size-divisible-by 16 --mock-data
--micro-batch-size 1 --global-batch-size 12 --train-iters 20
--lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1
--clip-grad 1.0 --attention-dropout 0 --hidden-dropout 0 --seed 7
--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --attention-backend unfused --no-gradient-reduce-div-fusion
--eval-iters 0 --eval-interval 1000 --log-interval 1 --num-workers 0
--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2
"""

_FSDP = """
--use-megatron-fsdp --ckpt-format fsdp_dtensor --overlap-grad-reduce --overlap-param-gather
"""

MOE = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall".split()

ZERO = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
HSDP = ("--num-distributed-optimizer-instances", "2")
HFSDP = (*HSDP, "--outer-dp-sharding-strategy", "optim")
TP = ("--tensor-model-parallel-size", "2")
EP = (*MOE, "--expert-model-parallel-size", "2")
# A lower learning rate, because rounding of weights adds up with the way they go.
BF16 = ("--bf16", "--lr", "2e-3", "--min-lr", "1e-4")
# Megatron-FSDP keeps and sends gradients in the dtype of the weights unless told otherwise; DDP
# keeps fp32.
FP32_GRADIENTS = (
    *("--megatron-fsdp-main-grads-dtype", "fp32"),
    *("--megatron-fsdp-grad-comm-dtype", "fp32"),
)


def toy_gpt(*flags: str) -> list[str]:
    """Return the flags of a toy GPT under DDP with Muon, then ``flags``."""
    return [*_TOY_GPT.split(), *flags]


def fsdp_toy_gpt(sharding: str, *flags: str) -> list[str]:
    """Return the flags of the same model under Megatron-FSDP with a sharding strategy."""
    return toy_gpt(*_FSDP.split(), "--data-parallel-sharding-strategy", sharding, *flags)


def relative_differences(found: Sequence[float], expected: Sequence[float]) -> list[float]:
    """Return ``|found - expected| / |expected|`` for each iteration of two runs of equal length."""
    assert len(found) == len(expected) > 0, (len(found), len(expected))
    return [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
