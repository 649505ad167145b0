# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Models that Megatron shards by PyTorch's FSDP2 (``--use-torch-fsdp2``)."""

import sys
from typing import Any

import torch
from megatron.core.distributed import TorchFullyShardedDataParallel
from torch.distributed.fsdp import MixedPrecisionPolicy


def is_torch_fsdp2(chunk: torch.nn.Module) -> bool:
    """Return whether Megatron's wrapper of FSDP2 wraps a model chunk."""
    return isinstance(chunk, TorchFullyShardedDataParallel)


def is_ours(args: Any) -> bool:
    """Return whether this package steps the model of a command line, or repairs Adam's steps."""
    if args.use_megatron_fsdp:
        return True
    return args.use_torch_fsdp2 and args.optimizer not in ("adam", "sgd")


def keep_main_weights(original: Any, module: torch.nn.Module, **kwargs: Any) -> Any:
    """Wrap ``fully_shard`` where Megatron calls it: shards of a bf16 model are main weights.

    Upstream shards bf16 weights, reduces their gradients in bf16, and copies both to float32 for
    the optimizer. Here shards are float32 from the start, and modules gather them in bf16.
    Gradients are reduced in float32, unless ``--grad-reduce-in-bf16`` asks for bf16.
    """
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if args is not None and args.bf16 and is_ours(args):
        for param in module.parameters():
            param.data = param.data.float()
        dtype = torch.float32 if args.accumulate_allreduce_grads_in_fp32 else None
        # Modules get some inputs in float32, such as rotary embeddings.
        kwargs["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, dtype, cast_forward_inputs=False)
    return original(module, **kwargs)
