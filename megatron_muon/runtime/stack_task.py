# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz of one stack and a method on its results, or the step of an owner."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_muon.newton_schulz.backend import Backend, NewtonSchulzArgs
from megatron_muon.newton_schulz.settings import StackMethod

# Tensors like a stack that a method may allocate; see StackMethod.
_METHOD_TENSORS = 3


@dataclass
class StackTask:
    """Orthogonalization of a stack, and a method on its results.

    Args:
        tensor: ``(num_matrices, rows, cols)``.
        backend: Backend of Newton-Schulz.
        args: Arguments of the backend.
        state_index: Indices of a method's state among all values of the plan; None without one.
        step: Steps the matrix, in place of Newton-Schulz and method; None for these.
    """

    tensor: torch.Tensor
    backend: Backend
    args: NewtonSchulzArgs
    state_index: torch.Tensor | None = None
    step: Callable[[], None] | None = None

    def run(self) -> None:
        """Replace the matrices by their results."""
        if self.step is not None:
            self.step()
            return
        # Stacks run one after the other: results of all would need as much memory again. The copy
        # makes results of tall matrices, which are transposed views, contiguous. The input has the
        # dtype in which rows were sent; results may need a wider one.
        rows = self.tensor.bfloat16() if self.args.is_normalized else self.tensor
        function = self.args.settings.function
        if function is None:
            self.tensor.copy_(self.backend.run(rows, self.args))
        else:
            self.tensor.copy_(_checked(function(rows), rows, "newton_schulz"))

    def apply_method(self, values: torch.Tensor) -> None:
        """Call the method on the results.

        Args:
            values: State of the plan, ``(num_values,)`` float32, which it updates.
        """
        method = self.args.settings.method
        if self.state_index is None or not isinstance(method, StackMethod):
            return
        state = values[self.state_index]
        results = method(self.tensor, state)
        self.tensor.copy_(_checked(results, self.tensor, type(method).__name__))
        values[self.state_index] = state

    @property
    def workspace_bytes(self) -> int:
        """Memory that is needed beside the stack, at most; without an owner's."""
        if self.step is not None:
            return 0
        rows = self.tensor.to("meta")
        if self.args.is_normalized:
            rows = rows.bfloat16()
        num_bytes = self.backend.workspace_bytes(rows, self.args.whole_shape)
        num_bytes += rows.nbytes * (rows.dtype != self.tensor.dtype)
        if self.state_index is not None:
            num_bytes = max(
                num_bytes, _METHOD_TENSORS * self.tensor.nbytes + 4 * self.state_index.numel()
            )
        return num_bytes


def _checked(result: object, stack: torch.Tensor, name: str) -> torch.Tensor:
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
