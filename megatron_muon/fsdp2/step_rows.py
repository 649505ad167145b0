# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Local tensors of a step of plain FSDP2: lists that are built once, and memory of results.

Gradients keep their values, so results need memory. It is one block, freed between steps, whose
views are made once: a step creates no tensor for a parameter.
"""

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megatron_muon.fsdp2.figures import StepSums
from megatron_muon.rows.matrices import MatrixRows
from megatron_muon.rows.parameters import NamedParameter
from megatron_muon.runtime.agreement import first_line
from megatron_muon.runtime.arena import Arena
from megatron_muon.runtime.dtensor_layout import local_tensor
from megatron_muon.runtime.local_rows import Rows
from megatron_muon.runtime.momentum import advance_momentum
from megatron_muon.runtime.ranges import in_range


class StepRows:
    """The local tensors of the parameters of an optimizer, while a step runs.

    Args:
        parameters: All of them.
        rows: This rank's rows of all matrices.
        device: Of the shards.

    Memory: one float32 per local element while a step runs.
    """

    def __init__(
        self, parameters: Sequence[NamedParameter], rows: Sequence[MatrixRows], device: torch.device
    ) -> None:
        params = [each.param for each in parameters]
        self._rows = list(rows)
        sizes = [local_tensor(param).numel() for param in params]
        self._arena = Arena(4 * sum(sizes), device)
        self._results: dict[torch.Tensor, torch.Tensor] = {}
        offset = 0
        for param, size in zip(params, sizes, strict=True):
            view = self._arena.view(4 * offset, size, torch.float32)
            self._results[param] = view.view(local_tensor(param).shape)
            offset += size
        self._arena.free()
        self._num_matrices = Counter(each.param for each in self._rows)
        self._momentum: list[torch.Tensor] = []  # of the last step
        self.sources: Rows = {}
        self.results: Rows = {}
        # Filled in each step while it is not None.
        self.sums: StepSums | None = None

    def allocate(self) -> list[str]:
        """Allocate the results of a step; return what is wrong, as sentences."""
        try:
            self._arena.allocate()
        # A GPU raises torch.OutOfMemoryError, which is one of these.
        except RuntimeError as error:
            return [
                f"expected {self._arena.num_bytes:,} bytes for results, got "
                f"{type(error).__name__}: {first_line(error)}"
            ]
        return []

    def free(self) -> None:
        """Return the memory of results."""
        self._arena.free()

    @in_range("momentum")
    def advance(
        self,
        number: int,
        group: Mapping[str, Any],
        weights: Mapping[torch.Tensor, torch.Tensor],
        momentum: Mapping[torch.Tensor, torch.Tensor],
        without: set[torch.Tensor],
        *,
        weight_decay_method: str,
        nesterov: bool,
        is_copied: bool,
    ) -> None:
        """Decay the weights of a group, and average gradients into momentum.

        Args:
            number: Of the group.
            group: A parameter group.
            weights: Local weights by parameter, in float32.
            momentum: Local momentum by parameter.
            without: Parameters that have no gradient, and stay as they are.
            weight_decay_method: See :func:`~megatron_muon.runtime.weight_decay.decay_weights`.
            nesterov: Whether the gradient is averaged in once more.
            is_copied: Whether momentum is of another dtype, or on another device.
        """
        # An empty shard may have no gradient, or one of another shape, and has nothing to step.
        stepped = [p for p in group["params"] if self._results[p].numel() and p not in without]
        grads = [local_tensor(param.grad) for param in stepped]
        if self.sums is not None:
            self.sums.add("gradient", number, dict(zip(stepped, grads, strict=True)))
        results = [self._results[param] for param in stepped]
        buffers = [momentum[param] for param in stepped]
        narrow = [i for i, grad in enumerate(grads) if grad.dtype != torch.float32]
        if narrow:
            wide = [results[i] for i in narrow]
            torch._foreach_copy_(wide, [grads[i] for i in narrow])
            for i, grad in zip(narrow, wide, strict=True):
                grads[i] = grad
        kept = buffers
        if is_copied:
            # Averaged in float32 on the device, and rounded once.
            buffers = [
                each.to(result.device, torch.float32, non_blocking=True)
                for each, result in zip(kept, results, strict=True)
            ]
        # Gradients are the user's: a logger may read them after the step.
        advanced = advance_momentum(
            group,
            [weights[param] for param in stepped],
            grads,
            buffers,
            weight_decay_method=weight_decay_method,
            nesterov=nesterov,
            updates=results,
        )
        if is_copied and stepped:
            torch._foreach_copy_(kept, buffers, non_blocking=True)
            if not nesterov:
                torch._foreach_copy_(results, advanced)
        if self.sums is not None:
            self.sums.add("momentum", number, {p: momentum[p] for p in group["params"]})
        if nesterov or is_copied:
            # They are exchanged all the same, and their results are not used.
            for param in set(group["params"]).difference(stepped):
                if self._results[param].numel():
                    self._results[param].copy_(momentum[param])

    def find(self, momentum: Mapping[torch.Tensor, torch.Tensor], *, in_results: bool) -> None:
        """View the rows of a step for :meth:`Engine.orthogonalize`, anew only if momentum is.

        Args:
            momentum: Local momentum by parameter.
            in_results: Whether what is orthogonalized is in the memory of results.
        """
        now = list(momentum.values())
        if len(now) == len(self._momentum) and all(map(operator.is_, now, self._momentum)):
            return
        self._momentum = now
        self.results = {each: each.of(self._results[each.param]) for each in self._rows}
        self.sources = (
            dict(self.results)
            if in_results
            else {each: each.of(momentum[each.param]) for each in self._rows}
        )

    def applier(
        self,
        groups: Sequence[Mapping[str, Any]],
        weights: Mapping[torch.Tensor, torch.Tensor],
        without: set[torch.Tensor],
    ) -> Callable[[Sequence[MatrixRows]], None]:
        """Return a function that updates weights, given rows whose results are there."""
        # Loading a state replaces the dictionaries of groups, and schedulers change their values.
        number_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        missing = self._num_matrices.copy()

        @in_range("update")
        def apply(done: Sequence[MatrixRows]) -> None:
            """Update the parameters whose last matrix this was, all of a batch at once."""
            complete: dict[int, list[torch.Tensor]] = {}
            for rows in done:
                missing[rows.param] -= 1
                if missing[rows.param] == 0 and rows.param not in without:
                    complete.setdefault(number_of[rows.param], []).append(rows.param)
            for number, params in complete.items():
                updates = [self._results[param] for param in params]
                torch._foreach_add_(
                    [weights[param] for param in params],
                    updates,
                    alpha=-groups[number]["lr"],
                )
                if self.sums is not None:
                    self.sums.add("update", number, dict(zip(params, updates, strict=True)))

        return apply
