# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Repairs of fused gradient accumulation under Megatron-FSDP in megatron-core 0.19.2.

Fused, the backward pass of a linear layer writes the gradient of its weight into ``main_grad``, and
adds to what is there or overwrites it. What ``main_grad`` is depends on the sharding strategy:

==================================  ============================  ==============================
strategy                            ``main_grad``                 gradients have to be
==================================  ============================  ==============================
``no_shard``, ``optim``             the buffer of the whole step  added
``optim_grads, _grads_params``      a bucket of one microbatch,   overwritten, as it holds
                                    which is reduced and freed    anything; added where a weight
                                                                  is used again
==================================  ============================  ==============================
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any


def overwrite_only_buckets(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``MegatronFSDP.all_gather_and_wait_parameters_ready``, which marks every weight.

    The mark, ``overwrite_main_grad``, tells Transformer Engine to overwrite. Upstream sets it for
    ``optim`` too: each microbatch overwrites the one before, and only the last one trains.
    ``no_shard`` never comes to that line.

    Source: NVIDIA/Megatron-LM pull request 6357, which came after 0.19.2.
    """

    @functools.wraps(original)
    def all_gather_and_wait_parameters_ready(
        self: Any, params: Sequence[Any], *args: Any, **kwargs: Any
    ) -> None:
        """Gather weights, and leave the mark only where a bucket lives for one microbatch."""
        original(self, params, *args, **kwargs)
        # Taken back behind upstream, which marks in each forward and each backward pass.
        if self.data_parallel_sharding_strategy == "optim":
            for param in params:
                param.overwrite_main_grad = False

    return all_gather_and_wait_parameters_ready


def keep_mark_of_grouped_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``TEGroupedMLP._ensure_main_grad``, which sets the mark again, for ``optim`` too.

    It runs behind Megatron-FSDP's hooks, before Transformer Engine's fused operations.
    """

    @functools.wraps(original)
    def _ensure_main_grad(linear_module: Any) -> None:
        """Give weights their ``main_grad``, with the mark that Megatron-FSDP gave them."""
        marked = [
            (param, param.overwrite_main_grad)
            for param in linear_module.parameters(recurse=False)
            if hasattr(param, "overwrite_main_grad")
        ]
        original(linear_module)
        for param, mark in marked:
            param.overwrite_main_grad = mark

    return _ensure_main_grad


def fuse_only_into_buckets(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``forward`` of Megatron's own linear layer, whose backward pass always overwrites.

    Under Megatron-FSDP it does not look at the mark. Transformer Engine's models have this layer
    too: it is their output layer. Unfused, the gradient comes back to autograd, which adds up all
    uses of a weight, and Megatron-FSDP adds it to ``main_grad``. The price is memory of one
    gradient.

    Forward decides, rather than backward: it sees the weight without unpacking saved tensors a
    second time, which activation checkpointing of torch refuses.

    Deferred gradients of the output layer (``defer_embedding_wgrad_compute``) stay fused, as their
    backward pass has no other way. They need pipeline parallelism, which Muon refuses under
    Megatron-FSDP.
    """

    @functools.wraps(original)
    def forward(
        ctx: Any,
        input: Any,
        weight: Any,
        bias: Any,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: Any,
        *args: Any,
    ) -> Any:
        """Run the layer, fused only where its backward pass may overwrite ``main_grad``."""
        is_fused = gradient_accumulation_fusion
        # Outside of Megatron-FSDP ``main_grad`` is upstream's own affair.
        if hasattr(weight, "__fsdp_param__") and grad_output_buffer is None:
            is_fused = is_fused and _may_be_overwritten(weight)
        return original(
            ctx,
            input,
            weight,
            bias,
            is_fused,
            allreduce_dgrad,
            sequence_parallel,
            grad_output_buffer,
            *args,
        )

    return forward


def _may_be_overwritten(weight: Any) -> bool:
    """Return whether ``main_grad`` of a weight holds nothing when its one gradient is written."""
    if not getattr(weight, "overwrite_main_grad", False):
        return False
    # Upstream's mark of an embedding that is the output layer too. Megatron-FSDP deletes ``.grad``
    # where ``main_grad`` was written, and with it the embedding's part.
    if getattr(weight, "zero_out_wgrad", False):
        return False
    # Each prediction of several tokens uses the output layer once more.
    config = getattr(weight._megatron_fsdp_model.module, "config", None)
    return not getattr(config, "mtp_num_layers", None)
