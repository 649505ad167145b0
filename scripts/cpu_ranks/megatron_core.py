# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Functions of Megatron that need a GPU, for CPU ranks; imports nothing of Megatron.

Functions named ``*_from`` take the original and return its replacement. The tables at the end list
what ``cpu_ranks.enable`` replaces.
"""

import copy
import functools
import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from cpu_ranks.torch_cuda import DEFAULT_STREAM, constant

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention


# Below the logger that the launcher shows.
logger = logging.getLogger("megatron_muon.cpu_ranks")

# Arguments of Megatron, whose defaults are kernels of Transformer Engine, Apex or CUDA.
_WITHOUT_KERNELS = {
    "transformer_impl": "local",
    "apply_rope_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
}


def validate_args_from(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``validate_args`` that sets arguments without which no CPU rank starts."""

    @functools.wraps(original)
    def validate_args(args: Any, *defaults: object) -> Any:
        """Set the arguments, and validate them."""
        vars(args).update(_WITHOUT_KERNELS)
        # It orders kernels of a GPU: FSDP refuses 1, and tensor parallelism without it the others.
        number = "8" if args.use_megatron_fsdp or args.use_torch_fsdp2 else "1"
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = number
        logger.info(
            "CPU ranks have CUDA_DEVICE_MAX_CONNECTIONS=%s and %s", number, _WITHOUT_KERNELS
        )
        return original(args, *defaults)

    return validate_args


def move_to_cpu(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    """Stand in for ``maybe_move_tensor_to_cpu``, which converts only GPU tensors to arrays.

    Args:
        tensor: A tensor of any shape and dtype, or anything else, returned as it is.
        as_numpy: Return tensors as numpy arrays that share their memory.
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
        """Average gradients without a fused division."""
        config = SimpleNamespace(
            average_in_collective=ddp_config.average_in_collective, gradient_reduce_div_fusion=False
        )
        return original(grad_data, scaling_factor, config)

    return gradient_reduce_preprocessing


def attention_from(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``DotProductAttention.__init__`` that accepts head dimensions, and records logits.

    Multi-latent attention has values of another dimension than keys. Megatron's own attention reads
    the dimension of its output from ``kv_channels``, and everything else from the tensors. QK-clip
    reads logits that only Transformer Engine's attention records.
    """

    @functools.wraps(original)
    def init(
        self: "DotProductAttention",
        *args: object,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: object,
    ) -> None:
        """Accept keys and values of different head dimensions, and record logits."""
        original(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels
        if self.config.qk_clip or self.config.log_max_attention_logit:
            _record_logits(self)

    return init


def _record_logits(attention: "DotProductAttention") -> None:
    """Keep the largest logit per head, as Transformer Engine does with ``return_max_logit``."""
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
    """Return ``is_te_min_version`` that is true of 2.9.0, which QK-clip and its log assert."""

    @functools.wraps(original)
    def is_te_min_version(version: str, check_equality: bool = True) -> bool:
        """Answer as if Transformer Engine 2.9 were there."""
        return version == "2.9.0" or original(version, check_equality)

    return is_te_min_version


def torch_norm_from(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``WrappedTorchNorm.__new__`` that allows sequence parallelism and persistent norms.

    Torch's norms act per token, so a shard of the sequence is normalised as in the whole sequence.
    Their parameters only need the mark by which Megatron sums gradients over the tensor-parallel
    group. "Persistent" only names a fused GPU kernel.
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


def buffer_with_stream_from(original: Callable[..., None]) -> Callable[..., None]:
    """Return ``DBuffer.__init__`` of Megatron-FSDP's version 2 that gives buffers a stream."""

    @functools.wraps(original)
    def init(self: Any, *args: object, **kwargs: object) -> None:
        """Set the stream, which is None on a CPU."""
        original(self, *args, **kwargs)
        self.allocation_stream = DEFAULT_STREAM

    return init


def sharding_on_cpu_from(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fully_shard_context`` of Megatron-FSDP's version 2 that does not mind the device."""

    @functools.wraps(original)
    def fully_shard_context(device: object = None, **settings: object) -> Any:
        """Pass what has the expected type; only streams are made with it."""
        return original(SimpleNamespace(type="cuda"), **settings)

    return fully_shard_context


def silence_warning_of_shared_generator() -> None:
    """Silence ``CudaRNGStatesTracker.fork``, which warns that the CPU's generator moved inside it.

    Here it always does, as device and CPU share a generator: there would be two lines an iteration.
    """
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


_FSDP = "megatron.core.distributed.fsdp"
_V2 = f"{_FSDP}.src.megatron_fsdp.experimental"

VALUES: dict[str, Any] = {
    # Gloo has no such options.
    "megatron.core.parallel_state.get_nccl_options": constant(None),
    # The original returns CPU tensors as they are, and its callers expect arrays.
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": move_to_cpu,
}

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    # Only Transformer Engine's attention accepts the dimensions of multi-latent attention, and
    # records the logits that QK-clip reads; QK-clip asserts a release of it.
    "megatron.core.transformer.dot_product_attention.DotProductAttention.__init__": attention_from,
    "megatron.core.utils.is_te_min_version": release_of_qk_clip_from,
    # Torch norms refuse sequence parallelism, and Transformer Engine's need a GPU.
    "megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__": torch_norm_from,
    # Gloo has no pre-multiplied sum.
    f"{_FSDP}.src.megatron_fsdp.param_and_grad_buffer.gradient_reduce_preprocessing": (
        preprocessing_without_premul_from
    ),
}

# Version 2 of Megatron-FSDP as on Megatron-LM's main asserts a CUDA device and a stream.
WRAPPERS_OF_V2: dict[str, Callable[[Any], Any]] = {
    f"{_V2}.dbuffer.DBuffer.__init__": buffer_with_stream_from,
    # The function is bound in all of them.
    f"{_V2}.fully_shard_context": sharding_on_cpu_from,
    f"{_V2}.fully_shard.fully_shard_context": sharding_on_cpu_from,
    f"{_FSDP}.mcore_fsdp_adapter.fully_shard_context": sharding_on_cpu_from,
    f"{_FSDP}.mcore_adapter_v2.fully_shard_context": sharding_on_cpu_from,
}

# Last: on import, megatron.training binds names that are replaced above.
WRAPPERS_OF_TRAINING: dict[str, Callable[[Any], Any]] = {
    "megatron.training.arguments.validate_args": validate_args_from,
}
