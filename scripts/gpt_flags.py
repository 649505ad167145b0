# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's flags that every small GPT of this repository shares; each run adds its own sizes."""

# A modern decoder. Query groups differ between runs: not every size has two.
DECODER = (
    "--num-attention-heads 4 --normalization RMSNorm --swiglu --position-embedding-type rope"
    " --disable-bias-linear --untie-embeddings-and-output-weights"
    " --attention-dropout 0 --hidden-dropout 0"
)
# Megatron without Transformer Engine, Apex or fused kernels: what ranks without a GPU need.
PLAIN_TORCH = (
    "--transformer-impl local --attention-backend unfused --no-rope-fusion"
    " --no-bias-swiglu-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion"
    " --no-masked-softmax-fusion --no-gradient-reduce-div-fusion"
)
# Tokens that Megatron makes up, and no validation.
MOCK_DATA = (
    "--tokenizer-type NullTokenizer --vocab-size 95 --make-vocab-size-divisible-by 16 --mock-data"
    " --eval-iters 0 --log-interval 1 --num-workers 0"
)
REGULARIZATION = "--weight-decay 0.1 --clip-grad 1.0"
# The factor gives Muon's update the root mean square of Adam's, about 0.2 (arXiv:2502.16982): one
# --lr then suits both Muon's matrices and the embeddings and norms that Adam updates beside them.
MUON = "--muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2"
FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --overlap-grad-reduce --overlap-param-gather"
# Megatron-FSDP keeps and sends gradients in the dtype of the weights unless told otherwise; DDP
# keeps fp32.
FP32_GRADIENTS = "--megatron-fsdp-main-grads-dtype fp32 --megatron-fsdp-grad-comm-dtype fp32"

# All of it but Muon, which some runs replace.
SMALL_GPT = f"{DECODER} {PLAIN_TORCH} {MOCK_DATA} {REGULARIZATION} --micro-batch-size 1 --seed 7"
