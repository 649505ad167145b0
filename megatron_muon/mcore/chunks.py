# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Operations of a step on a model chunk, in both versions of Megatron-FSDP."""

import functools
from collections import Counter
from typing import Any

from torch.distributed.tensor import DTensor

from megatron_muon.mcore.fsdp_model import (
    FSDPModel,
    copy_model_weights_to_main_weights,
    is_v2,
    named_optimizer_parameters,
)
from megatron_muon.mcore.qk_clip import clip_row_shards
from megatron_muon.rows.megatron_fsdp import place_of


class OuterReductions:
    """Check that HSDP reduces every gradient bucket over the outer ranks once per step.

    Megatron-FSDP does it only in the backward pass of a microbatch that ``config.no_sync_func``
    marks as the last one. If none is marked, replicas drift; if two are, gradients are summed
    twice. Upstream notices neither.

    Args:
        chunk: A model chunk with HSDP. Its reductions are counted from now on.
    """

    def __init__(self, chunk: FSDPModel) -> None:
        self._buffers = chunk.param_and_grad_buffer
        self._counts: Counter[int] = Counter()
        pipeline = chunk.module.grad_reduce_pipeline
        reduce_buckets = pipeline._bucket_group_gradient_reduce

        @functools.wraps(reduce_buckets)
        def counted(bucket_group: list[int], *args: Any, **kwargs: Any) -> Any:
            """Count the buckets that are reduced over the outer ranks, and reduce them."""
            if kwargs.get("outer_fsdp_group_grad_reduce"):
                self._counts.update(bucket_group)
            return reduce_buckets(bucket_group, *args, **kwargs)

        pipeline._bucket_group_gradient_reduce = counted

    def clear(self) -> None:
        """Reset the counts, as when Megatron runs the microbatches of a step again."""
        self._counts.clear()

    def take_problems(self) -> list[str]:
        """List the errors since the gradients were zeroed, and reset the counts."""
        counts = {
            self._counts[index]
            for index, group in enumerate(self._buffers.parameter_groups)
            if group.main_grad_buffer is not None
        }
        self.clear()
        # There is no count if the model has no gradients on this rank.
        if counts <= {1}:
            return []
        return [
            "HSDP: expected each gradient bucket reduced once over the outer ranks, got "
            f"{sorted(counts)} times. Set ddp_config.overlap_grad_reduce, and run all microbatches "
            "but the last under the model's no_sync() (config.no_sync_func)"
        ]


def sharded_chunk(chunk: FSDPModel) -> "ShardedChunk":
    """Return the operations of a step on a wrapped chunk."""
    return ShardedChunkOfV2(chunk) if is_v2(chunk) else ShardedChunk(chunk)


class ShardedChunk:
    """A chunk of Megatron-FSDP v1.

    Args:
        chunk: The wrapped chunk.
    """

    def __init__(self, chunk: FSDPModel) -> None:
        self._chunk = chunk
        is_hybrid = chunk.module.dist_index.use_hybrid_fsdp
        self._outer_reductions = OuterReductions(chunk) if is_hybrid else None

    def finish_gradients(self) -> list[str]:
        """Reduce and attach gradients, if the loop has not; return problems as sentences."""
        # Megatron's loop has called it already; a loop of the user's own may not have.
        if not self._chunk.module.is_param_fsdp_distributed:
            self._chunk.finish_grad_sync()
        return self._outer_reductions.take_problems() if self._outer_reductions is not None else []

    def restore_gradients(self) -> None:
        """Revert ``finish_gradients()`` after a step."""

    def install_weights(self) -> None:
        """Clip the main weights by QK-clip, if it is on, and update the compute weights."""
        clip_row_shards(self._chunk.module)
        self._chunk.module.install_optimized_model_weights()

    def zero_gradients(self) -> None:
        """Zero the gradients of the chunk."""
        self._chunk.zero_grad_buffer()
        if self._outer_reductions is not None:
            self._outer_reductions.clear()

    def sync_after_load(self, *, has_optimizer_state: bool) -> None:
        """Update the weights that depend on the loaded ones, with optimizer state or alone."""
        if not has_optimizer_state:
            for parameter_group in self._chunk.param_and_grad_buffer.parameter_groups:
                copy_model_weights_to_main_weights(parameter_group)


class ShardedChunkOfV2(ShardedChunk):
    """A chunk of Megatron-FSDP v2, which reduces gradients in the backward pass.

    Args:
        chunk: The wrapped chunk.
    """

    def __init__(self, chunk: FSDPModel) -> None:
        self._chunk = chunk
        # Modules hold other parameters while they compute.
        self._params = dict(named_optimizer_parameters([chunk]))
        self._groups = dict.fromkeys(place_of(param)[0] for param in self._params.values())
        self._uncast_gradients: list[tuple[Any, DTensor]] = []

    def finish_gradients(self) -> list[str]:
        """Cast gradients to the dtype of main weights; return problems as sentences."""
        problems = []
        for name, param in self._params.items():
            grad: Any = param.grad
            if grad is None:
                continue
            if grad.placements != param.placements:
                problems.append(
                    f"{name}: expected a gradient with placements {param.placements}, got "
                    f"{grad.placements}. Run the last microbatch of a step as the last one"
                )
            if grad.dtype != param.dtype:
                self._uncast_gradients.append((param, grad))
                _set_gradient(param, grad.to(param.dtype))
        return problems

    def restore_gradients(self) -> None:
        """Restore the gradients that were replaced by a cast copy."""
        for param, grad in self._uncast_gradients:
            _set_gradient(param, grad)
        self._uncast_gradients.clear()

    def install_weights(self) -> None:
        """Clip the main weights by QK-clip, if it is on, and update the compute weights."""
        clip_row_shards(self._chunk)
        for group in self._groups:
            group.sync_model_weight_from_main_weight()

    def zero_gradients(self) -> None:
        """Drop the gradients: the next backward pass overwrites their buffers."""
        for param in self._params.values():
            param.grad = None

    def sync_after_load(self, *, has_optimizer_state: bool) -> None:
        """Update the compute weights: the main ones were loaded."""
        for group in self._groups:
            group.sync_model_weight_from_main_weight()


def _set_gradient(param: Any, grad: DTensor) -> None:
    # torch compares a gradient with the dtype that the parameter announces.
    param.grad = None
    param.grad_dtype = grad.dtype
    param.grad = grad
