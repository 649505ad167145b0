# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz of one stack, and the owner's function."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_muon.newton_schulz.backend import Backend, NewtonSchulzArgs

# Tensors like a stack that a method may allocate; see StackMethod.
_METHOD_TENSORS = 3


@dataclass
class StackTask:
    """Orthogonalization of a stack, and what its owner does around it or in place of it.

    Args:
        tensor: ``(num_matrices, rows, cols)``.
        backend: Backend of Newton-Schulz.
        args: Arguments of the backend.
        act: Function of ``MatrixOwner.claim()``; None for orthogonalization alone.
    """

    tensor: torch.Tensor
    backend: Backend
    args: NewtonSchulzArgs
    act: Callable[[Callable[[], None]], None] | None = None

    def run(self) -> None:
        """Replace the matrices by their results."""
        if self.act is None:
            self._orthogonalize()
        else:
            self.act(self._orthogonalize)

    def _orthogonalize(self) -> None:
        # Stacks run one after the other: results of all would need as much memory again. The copy
        # makes results of tall matrices, which are transposed views, contiguous. The input has the
        # dtype in which rows were sent; results may need a wider one.
        rows = self.tensor.bfloat16() if self.args.is_normalized else self.tensor
        function = self.args.settings.function
        if function is None:
            self.tensor.copy_(self.backend.run(rows, self.args))
        else:
            self.tensor.copy_(checked_result(function(rows), rows, "newton_schulz"))

    @property
    def workspace_bytes(self) -> int:
        """Memory that is needed beside the stack, at most; without an optimizer of an owner."""
        owner = self.args.settings.owner
        if owner is not None and owner.num_inputs > 1:
            return 0
        rows = self.tensor.to("meta")
        if self.args.is_normalized:
            rows = rows.bfloat16()
        num_bytes = self.backend.workspace_bytes(rows, self.args.whole_shape)
        num_bytes += rows.nbytes * (rows.dtype != self.tensor.dtype)
        return max(num_bytes, 0 if owner is None else _METHOD_TENSORS * self.tensor.nbytes)


def checked_result(result: object, stack: torch.Tensor, name: str) -> torch.Tensor:
    """Return a result of a user's function, which must have the shape and dtype of the stack."""
    if not isinstance(result, torch.Tensor):
        got = type(result).__name__
    elif (result.shape, result.dtype) != (stack.shape, stack.dtype):
        got = f"{tuple(result.shape)} {result.dtype}"
    else:
        return result
    raise TypeError(
        f"{name}: expected a function that returns {tuple(stack.shape)} {stack.dtype}, as it was "
        f"given, got {got}. Convert its result"
    )
