# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Operations of a step on a model chunk, in both versions of Megatron-FSDP, and in FSDP2."""

from typing import Any

import torch

from megatron_muon.mcore.fsdp_model import (
    FSDPModel,
    is_v2,
    named_optimizer_parameters,
    sharded_module,
)
from megatron_muon.mcore.gradient_repairs import take_outer_reductions
from megatron_muon.mcore.qk_clip import clip_row_shards
from megatron_muon.mcore.torch_fsdp2 import is_torch_fsdp2
from megatron_muon.rows.megatron_fsdp import is_of_fsdp_v2, place_of
from megatron_muon.runtime.tensors import local_tensor


def sharded_chunk(chunk: FSDPModel) -> "ShardedChunk":
    """Return the operations of a step on a wrapped chunk."""
    reduces = is_v2(chunk) or is_torch_fsdp2(chunk)
    return ReducedChunk(chunk) if reduces else ShardedChunk(chunk)


class ShardedChunk:
    """A chunk of Megatron-FSDP v1.

    Args:
        chunk: The wrapped chunk.
    """

    def __init__(self, chunk: FSDPModel) -> None:
        self._chunk, self._module = chunk, sharded_module(chunk)

    def gradients_stay(self) -> bool:
        """Return whether gradients are views of their buffers in every step.

        Megatron-FSDP copies gradients of another dtype than the main weights in every step.
        """
        groups = self._chunk.param_and_grad_buffer.parameter_groups
        buffers = [group.main_grad_buffer for group in groups]
        return all(buffer is None or buffer.dtype == torch.float32 for buffer in buffers)

    def finish_gradients(self) -> list[str]:
        """Reduce and attach gradients, if the loop has not; return problems as sentences."""
        # Megatron's loop has called it already; a loop of the user's own may not have.
        if not self._module.is_param_fsdp_distributed:
            self._chunk.finish_grad_sync()
        if not self._module.dist_index.use_hybrid_fsdp:
            return []
        counts = take_outer_reductions(self._chunk)
        # There is no count if the model has no gradients on this rank.
        if counts <= {1}:
            return []
        return [
            "HSDP: expected each gradient bucket reduced once over the outer ranks, got "
            f"{sorted(counts)} times. Set ddp_config.overlap_grad_reduce, and run all microbatches "
            "but the last under the model's no_sync() (config.no_sync_func)"
        ]

    def main_weights(self) -> list[torch.Tensor]:
        """Return main weights that no pass of the model reads, and all tensors on their memory."""
        buffers = self._chunk.param_and_grad_buffer
        groups = [
            group
            for group in buffers.parameter_groups
            if group.main_weight_buffer is not None and group.model_weight_buffer is not None
        ]
        names = [buffers.param_to_name[param] for group in groups for param in group.params]
        params = dict(buffers.optimizer_named_parameters)
        return [
            *(group.main_weight_buffer.data for group in groups),
            *(local_tensor(params[name]) for name in names),
            *(local_tensor(buffers.dist_main_weight[name]) for name in names),
        ]

    def install_weights(self) -> None:
        """Clip the main weights by QK-clip, if it is on, and update the compute weights."""
        clip_row_shards(self._module)
        self.update_compute_weights()

    def update_compute_weights(self) -> None:
        """Round the main weights into the weights that the model computes with."""
        self._module.install_optimized_model_weights()

    def zero_gradients(self) -> None:
        """Zero the gradients of the chunk."""
        self._chunk.zero_grad_buffer()
        take_outer_reductions(self._chunk)


class ReducedChunk(ShardedChunk):
    """A chunk of Megatron-FSDP v2 or FSDP2, which reduce gradients in the backward pass.

    Args:
        chunk: The wrapped chunk.
    """

    def __init__(self, chunk: FSDPModel) -> None:
        super().__init__(chunk)
        # Modules hold other parameters while they compute.
        self._params = dict(named_optimizer_parameters([chunk]))
        of_v2 = filter(is_of_fsdp_v2, self._params.values())
        # Of FSDP2 none: modules round the main weights when they gather them.
        self._groups = dict.fromkeys(place_of(param)[0] for param in of_v2)

    def gradients_stay(self) -> bool:
        """Return False: neither promises to keep its buffers."""
        return False

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
                # torch compares a gradient with the dtype that the parameter announces. None lets
                # the next backward pass attach gradients of the old dtype.
                param.grad = param.grad_dtype = None
                param.grad = grad.to(param.dtype)
        return problems

    def update_compute_weights(self) -> None:
        """Round the main weights into the weights that the model computes with."""
        for group in self._groups:
            group.sync_model_weight_from_main_weight()

    def zero_gradients(self) -> None:
        """Drop the gradients: the next backward pass overwrites their buffers."""
        for param in self._params.values():
            param.grad = None
