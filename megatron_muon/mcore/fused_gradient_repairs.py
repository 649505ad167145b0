# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Repairs of fused gradient accumulation under Megatron-FSDP in megatron-core 0.19.2.

With fusion, the backward pass of a linear layer adds the gradient of its weight to ``main_grad``,
or overwrites it. Which of them is right depends on the sharding strategy:

==================================  ============================  ==============================
strategy                            ``main_grad``                 gradients must be
==================================  ============================  ==============================
``no_shard``, ``optim``             the buffer of the whole step  added
``optim_grads, _grads_params``      a bucket of one microbatch,   overwritten, as its memory is
                                    which is reduced and freed    not initialized; added if a
                                                                  weight is used again
==================================  ============================  ==============================
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any


def overwrite_only_buckets(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``MegatronFSDP.all_gather_and_wait_parameters_ready``, which marks every weight.

    The mark, ``overwrite_main_grad``, tells Transformer Engine to overwrite. Upstream sets it for
    ``optim`` too: every microbatch overwrites the one before, and only the last one trains.
    ``no_shard`` never reaches that line.

    Source: NVIDIA/Megatron-LM pull request 6357, which came after 0.19.2.
    """

    @functools.wraps(original)
    def all_gather_and_wait_parameters_ready(
        self: Any, params: Sequence[Any], *args: Any, **kwargs: Any
    ) -> None:
        """Gather parameters, then let gradients accumulate."""
        original(self, params, *args, **kwargs)
        # Unset after each call, as upstream marks in every forward and backward pass.
        if self.data_parallel_sharding_strategy == "optim":
            for param in params:
                param.overwrite_main_grad = False

    return all_gather_and_wait_parameters_ready


def keep_mark_of_grouped_experts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``TEGroupedMLP._ensure_main_grad``, which sets the mark again, for ``optim`` too.

    It runs after Megatron-FSDP's hooks, before Transformer Engine's fused operations.
    """

    @functools.wraps(original)
    def _ensure_main_grad(linear_module: Any) -> None:
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

    Under Megatron-FSDP it ignores the mark. Transformer Engine's models have this layer too, as
    output layer. Without fusion the gradient is returned to autograd, which sums all uses of a
    weight, and Megatron-FSDP adds it to ``main_grad``, at the cost of the memory of one gradient.

    Forward decides, as backward would unpack the saved weight a second time, which torch's
    activation checkpointing refuses.

    Deferred gradients of the output layer (``defer_embedding_wgrad_compute``) are always fused.
    They need pipeline stages, with which the flag is refused under Megatron-FSDP.
    """

    @functools.wraps(original)
    def forward(ctx: Any, input: Any, weight: Any, bias: Any, is_fused: bool, *rest: Any) -> Any:
        """Fuse the accumulation only if its target may be overwritten."""
        is_deferred = rest[2] is not None  # grad_output_buffer
        # Other wrappers than Megatron-FSDP initialize ``main_grad``.
        if hasattr(weight, "__fsdp_param__") and not is_deferred:
            is_fused = is_fused and _may_be_overwritten(weight)
        return original(ctx, input, weight, bias, is_fused, *rest)

    return forward


def _may_be_overwritten(weight: Any) -> bool:
    """Return whether ``main_grad`` of a weight holds no gradient when its only one is written."""
    if not getattr(weight, "overwrite_main_grad", False):
        return False
    # Upstream's mark of an embedding that is also the output layer. After a fused write
    # Megatron-FSDP deletes ``.grad``, and with it the embedding's part.
    if getattr(weight, "zero_out_wgrad", False):
        return False
    # Multi-token prediction uses the output layer several times.
    config = getattr(weight._megatron_fsdp_model.module, "config", None)
    return not getattr(config, "mtp_num_layers", None)
