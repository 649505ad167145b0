# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Momentum in bfloat16 between steps, and float32 copies of bfloat16 parameters.

Without a float32 copy, rounding a bfloat16 parameter would lose most of each update.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_muon.runtime.arena import Arena
from megatron_muon.runtime.tensors import local_tensor

MAIN_PARAM = "main_param"


def tensors_in(arena: Arena, offset: int, shapes: Sequence[torch.Size]) -> tuple[torch.Tensor, ...]:
    """View consecutive float32 tensors in an arena, from a byte on."""
    sizes = list(map(math.prod, shapes))
    parts = arena.view(offset, sum(sizes), torch.float32).split(sizes)
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


class MomentumStaging:
    """Float32 memory for momentum that is kept in bfloat16; a step averages it in portions.

    Args:
        portions: Shapes of tensors by portion.
        dtype: Dtype in which momentum is kept.
        device: Device of the memory.

    Attributes:
        is_needed: Whether momentum is kept otherwise than as float32.
        tensors: Float32 tensors by portion; none if they are not needed.

    Memory: while a step runs, the float32 elements of the largest portion.
    """

    def __init__(
        self,
        portions: Sequence[Sequence[torch.Size]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.is_needed = dtype != torch.float32
        portions = portions if self.is_needed else ()
        largest = max((sum(map(math.prod, shapes)) for shapes in portions), default=0)
        self._arena = Arena(4 * largest, device, "momentum")
        self.tensors = [tensors_in(self._arena, 0, shapes) for shapes in portions]
        self._arena.free()

    def allocate(self) -> None:
        """Allocate the memory, which stays until ``free()``.

        Raises:
            MemoryError: The device has too little memory, with sizes.
        """
        self._arena.allocate()

    def free(self) -> None:
        """Return the memory."""
        self._arena.free()


class MainParams:
    """Float32 copies of bfloat16 parameters, in the state of an optimizer.

    A step updates the copies, and rounds them into the parameters. Parameters that were changed
    outside of a step, as by loading weights, are read where a copy is stale: version counters do
    not detect a change (``dcp.load``, ``.data``, ``torch._foreach_mul_`` of DTensors and
    collectives do not increment them), and a comparison in every step costs a pass over all
    weights.

    Args:
        params: All parameters; float32 ones need no copy.

    Attributes:
        params: Parameters with a copy.
        are_stale: Whether the next step reads parameters that were changed: after construction, a
            load, or a user's call.

    Memory: 4 bytes per local element of a bfloat16 parameter.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.params = [param for param in params if param.dtype != torch.float32]
        self.are_stale = True

    def create(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Add the copies that are missing."""
        for param in self.params:
            if MAIN_PARAM not in state[param]:
                state[param][MAIN_PARAM] = param.detach().float()
        self.are_stale = True

    def _tensors(self, state: Mapping[torch.Tensor, Any]) -> tuple[list[Any], list[Any]]:
        """Return local tensors of parameters and copies."""
        mains = [local_tensor(state[param][MAIN_PARAM]) for param in self.params]
        return [local_tensor(param) for param in self.params], mains

    def refresh(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Copy the elements of parameters that differ from their rounded copy, if it is stale.

        Called before ranks agree to step, as it allocates memory.
        """
        if self.are_stale:
            for own, main in zip(*self._tensors(state), strict=True):
                main.copy_(torch.where(main.to(own.dtype) == own, main, own))

    def install(self, state: Mapping[torch.Tensor, Any]) -> None:
        """Round the copies into the parameters, after a step."""
        torch._foreach_copy_(*self._tensors(state))
        self.are_stale = False
