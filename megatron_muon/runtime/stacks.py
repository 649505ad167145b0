# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Views of the parts that a rank owns, in the memory of its stacks."""

import dataclasses
import math
from dataclasses import dataclass

import torch

from megatron_muon.newton_schulz.backend import Backend
from megatron_muon.newton_schulz.call import Call
from megatron_muon.newton_schulz.methods import StackMethod
from megatron_muon.newton_schulz.registry import check_against_reference
from megatron_muon.newton_schulz.standard import Standard, batch_on_cpu
from megatron_muon.plan.rank_plan import OwnedStacks, Stack
from megatron_muon.plan.routes import Route

# Tensors like a stack that a method may allocate; see StackMethod.
_METHOD_TENSORS = 3


@dataclass
class StackCall:
    """A stack, and how it is orthogonalized.

    Args:
        tensor: ``(num_matrices, rows, cols)``.
        backend: What does it.
        call: How.
        owners: Ranks that do it together.
        state: Where the state of a method is among all numbers of the plan; None without one.
    """

    tensor: torch.Tensor
    backend: Backend
    call: Call
    owners: tuple[int, ...]
    state: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Choose how many matrices are orthogonalized in one call; on a GPU all of them."""
        self._batch_size = len(self.tensor)
        if self.tensor.device.type == "cpu" and self._batch_size > 1:
            is_known = self.backend.name == Standard.name
            self._batch_size = batch_on_cpu(*self.tensor.shape) if is_known else 1

    def run(self) -> None:
        """Replace the matrices by their results."""
        # One stack after the other: results of all would need as much memory again. It also
        # makes those of tall matrices contiguous, which are transposed views.
        rows, size = self._rows(), self._batch_size
        if size == len(rows):
            self._replace(self.tensor, rows)
            return
        for stack, part in zip(self.tensor.split(size), rows.split(size), strict=True):
            self._replace(stack, part)

    def _replace(self, stack: torch.Tensor, rows: torch.Tensor) -> None:
        function = self.call.settings.function
        if function is None:
            stack.copy_(self.backend.run(rows, self.call))
        else:
            stack.copy_(_checked(function(rows), rows, "newton_schulz"))

    def _rows(self) -> torch.Tensor:
        """Return the stack in the dtype in which rows are sent: results may need a wider one."""
        return self.tensor.bfloat16() if self.call.is_normalized else self.tensor

    def check(self) -> None:
        """Compare the backend with its reference; see :func:`check_against_reference`."""
        # On this rank alone if possible: if its kernel fails, others must not wait for it.
        call = self.call
        if not self.backend.communicates:
            call = dataclasses.replace(call, parts_group=None)
        check_against_reference(self.backend, self._rows(), call)

    def change(self, values: torch.Tensor) -> None:
        """Call the method on the results.

        Args:
            values: All numbers of the plan, which it updates.
        """
        method = self.call.settings.method
        if self.state is None or not isinstance(method, StackMethod):
            return
        state = values[self.state]
        results = method(self.tensor, state)
        self.tensor.copy_(_checked(results, self.tensor, type(method).__name__))
        values[self.state] = state

    @property
    def workspace_bytes(self) -> int:
        """Memory that is needed beside the stack, at most."""
        rows = self.tensor.to("meta")
        if self.call.is_normalized:
            rows = rows.bfloat16()
        num_bytes = self.backend.workspace_bytes(rows)
        num_bytes += rows.nbytes * (rows.dtype != self.tensor.dtype)
        if self.state is not None:
            num_bytes = max(
                num_bytes, _METHOD_TENSORS * self.tensor.nbytes + 4 * self.state.numel()
            )
        return num_bytes


def _checked(result: object, stack: torch.Tensor, name: str) -> torch.Tensor:
    """Return what a function of the user's has returned, if it is a stack like the given one."""
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


class StackBuffers:
    """Stacks of one bucket, or one stack of local matrices, end to end in flat memory.

    Args:
        owned: What they hold.
        memory: Flat, ``owned.num_elements``.
    """

    kept: tuple[Route, ...]  # routes whose owner and holder this rank is
    staying: tuple[Route, ...]  # of them, those whose results are not sent
    stacks: list[tuple[Stack, torch.Tensor]]  # with its tensor, (num_matrices, rows, cols)
    _position: dict[tuple[int, int], tuple[int, int]]  # (matrix, block) -> (stack, index in it)

    def __init__(self, owned: OwnedStacks, memory: torch.Tensor) -> None:
        self.kept = owned.kept
        self.staying = owned.staying
        self.stacks = []
        self._position = {}
        offset = 0
        for number, stack in enumerate(owned.stacks):
            shape = (len(stack), stack[0].num_rows, stack[0].num_cols)
            size = math.prod(shape)
            self.stacks.append((stack, memory[offset : offset + size].view(shape)))
            offset += size
            for index, part in enumerate(stack):
                self._position[part.matrix, part.block] = (number, index)

    def view(self, route: Route) -> torch.Tensor:
        """View a route in the stacks, ``(num_rows, num_cols)``."""
        number, index = self._position[route.matrix, route.block]
        return _in_part(self.stacks[number][1][index], route)


def in_shard(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """View a route in the shard of a holder, ``(local_rows, cols)``."""
    # Most are all of it, and a view is made for every route where rows move in every step.
    if (route.num_rows, route.num_cols) == rows.shape:
        return rows
    return rows[
        route.local_row : route.local_row + route.num_rows,
        route.local_col : route.local_col + route.num_cols,
    ]


def _in_part(part: torch.Tensor, route: Route) -> torch.Tensor:
    return part[route.row : route.row + route.num_rows, route.col : route.col + route.num_cols]
