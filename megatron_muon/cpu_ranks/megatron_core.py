# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What has to change inside Megatron itself; imports nothing of it.

Functions named ``*_from`` take the original and return its replacement; the others are replacements
themselves.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from megatron_muon.user_errors import SettingsError

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention


def move_to_cpu(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Stand in for ``maybe_move_tensor_to_cpu``, whose test for a GPU tensor never holds here.

    Args:
        tensor: A tensor of any shape and dtype, or anything else, returned as it is.
        as_numpy: Return tensors as numpy arrays sharing their memory.
        record_stream: Ignored.
    """
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def preprocessing_without_premul_from(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``gradient_reduce_preprocessing`` that never asks for NCCL's pre-multiplied sum.

    The gradient is multiplied by the scaling factor before the sum, as for bf16 on GPUs.
    """

    @functools.wraps(original)
    def gradient_reduce_preprocessing(
        grad_data: torch.Tensor,
        scaling_factor: float | None,
        ddp_config: "DistributedDataParallelConfig",
    ) -> "torch.distributed.ReduceOp.RedOpType":
        """Scale before the reduction, by an operation that gloo has."""
        config = SimpleNamespace(
            average_in_collective=ddp_config.average_in_collective, gradient_reduce_div_fusion=False
        )
        return original(grad_data, scaling_factor, config)

    return gradient_reduce_preprocessing


def attention_from(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``DotProductAttention.__init__`` that takes widths of a head, and records logits.

    Multi-latent attention has values of another width than keys. Megatron's own attention takes the
    width of its result from ``kv_channels``, and everything else from the tensors. QK-clip reads
    logits that only Transformer Engine's attention records.
    """

    @functools.wraps(original)
    def init(
        self: "DotProductAttention",
        *args: object,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: object,
    ) -> None:
        """Build it, and correct the width of its result."""
        original(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels
        if self.config.qk_clip or self.config.log_max_attention_logit:
            _record_logits(self)

    return init


def _record_logits(attention: "DotProductAttention") -> None:
    """Keep the largest logit of each head, as Transformer Engine does with ``return_max_logit``."""
    attention.current_max_attn_logits = None
    mask_func = attention.scale_mask_softmax.mask_func

    def recorded(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Mask logits, ``(batch, heads, queries, keys)``, and keep their maxima."""
        masked = mask_func(scores, mask)
        found = masked.detach().float().amax(dim=(0, 2, 3))
        before = attention.current_max_attn_logits
        attention.current_max_attn_logits = found if before is None else found.maximum(before)
        return masked

    attention.scale_mask_softmax.mask_func = recorded


def release_of_qk_clip_from(original: Callable[..., bool]) -> Callable[..., bool]:
    """Return ``is_te_min_version`` that has the release which QK-clip and its log assert."""

    @functools.wraps(original)
    def is_te_min_version(version: str, check_equality: bool = True) -> bool:
        """Compare releases of Transformer Engine, which is absent here."""
        return version == "2.9.0" or original(version, check_equality)

    return is_te_min_version


def torch_norm_from(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``WrappedTorchNorm.__new__`` that allows sequence parallelism and persistent norms.

    Torch's norms act on each token by itself, so a shard of the sequence is normalised as the whole
    is; what sequence parallelism asks of them is the mark that has their gradients summed over the
    tensor-parallel group. "Persistent" only names a fused GPU kernel.
    """

    @functools.wraps(original)
    def __new__(
        cls: type, config: "TransformerConfig", *args: object, **kwargs: object
    ) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        plain.persist_layer_norm = False
        module = original(cls, plain, *args, **kwargs)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module

    return __new__


@contextlib.contextmanager
def fork_rng(tracker: "CudaRNGStatesTracker", name: str = "model-parallel-rng") -> Iterator[None]:
    """Stand in for ``CudaRNGStatesTracker.fork``: draw from the named state inside the context.

    The original warns whenever the CPU's generator moved inside it, here always: device and CPU
    share one.

    Args:
        tracker: The ``CudaRNGStatesTracker``.
        name: One of the states added to it.

    Raises:
        KeyError: ``name`` was never added.
        RuntimeError: Forks were left in another order than entered.
    """
    if name not in tracker.states_:
        raise KeyError(
            f"rng state: expected one of {sorted(tracker.states_)}, got {name}. "
            "Add it to the tracker first."
        )
    outer_name = tracker._current_state_name
    outer_state = torch.get_rng_state()
    if outer_name != "default-rng":
        tracker.states_[outer_name] = outer_state
    torch.set_rng_state(tracker.states_[name])
    tracker._current_state_name = name
    try:
        yield
    finally:
        if tracker._current_state_name != name:
            raise RuntimeError(
                f"rng state: expected {name}, got {tracker._current_state_name}. "
                "Leave forks in the reverse order of entering them."
            )
        tracker.states_[name] = torch.get_rng_state()
        if outer_name != "default-rng":
            outer_state = tracker.states_[outer_name]
        torch.set_rng_state(outer_state)
        tracker._current_state_name = outer_name


def model_parallel_without_context_from(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``initialize_model_parallel`` that refuses context parallelism."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_model_parallel(*args: object, **kwargs: object) -> None:
        """Refuse context parallelism, then make the groups."""
        size = signature.bind(*args, **kwargs).arguments.get("context_parallel_size", 1)
        if size > 1:
            raise SettingsError(
                f"--context-parallel-size: expected 1 on CPU ranks, got {size}. "
                "Context parallelism needs Transformer Engine's attention: run on GPUs."
            )
        original(*args, **kwargs)

    return initialize_model_parallel
