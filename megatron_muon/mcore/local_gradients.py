# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The gradients of this rank's rows, listed without a loop over all parameters of the model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron_muon.runtime.adjacent import AdjacentViews


class LocalGradients:
    """Lists of local gradients, over the parameters of which this rank holds rows.

    Most ranks hold rows of few parameters. Which of them upstream counts in the norm does not
    change: it is asked once.

    Args:
        children: The optimizers of a model.
        fqns: Names of all parameters.
        stay: Whether gradients are in the same memory in every step.

    Attributes:
        all: Local gradients of this step, of all optimizers.
        missing: The parameters that have rows here and no gradient, as sentences.
    """

    def __init__(
        self,
        children: Sequence[MegatronOptimizer],
        fqns: Mapping[Any, str],
        *,
        stay: bool,
    ) -> None:
        self._children = list(children)
        self._held = [
            param
            for child in children
            for param in child.get_parameters()
            if param._local_tensor.numel() > 0
        ]
        self._fqns = fqns
        self._stay = stay
        self._views = AdjacentViews()
        # Positions in the list of all: by optimizer, and those of none.
        self._counted: list[list[int]] | None = None
        self._others: list[int] = []
        # Where a gradient is missing, positions are others, and the step is refused.
        self._num_listed = 0
        self.all: list[torch.Tensor] = []
        self.missing: list[str] = []

    def collect(self) -> None:
        """Look where the gradients of this step are; after they have been attached."""
        grads = [param.grad for param in self._held]
        self.all = [grad._local_tensor for grad in grads if grad is not None]
        self.missing = []
        if len(self.all) < len(grads):
            self.missing = [
                f"{self._fqns[param]}: expected a gradient on a shard of shape "
                f"{tuple(param._local_tensor.shape)}, got None"
                for param in self._held
                if param.grad is None
            ]
        if self._counted is None or len(self.all) != self._num_listed:
            self._find_counted()

    def _find_counted(self) -> None:
        position = {id(grad): number for number, grad in enumerate(self.all)}
        counted = [
            # Empty ones are left out: their norm is zero.
            [position[id(grad)] for grad in child.get_grads_for_grad_norm() if id(grad) in position]
            for child in self._children
        ]
        found = {number for of_child in counted for number in of_child}
        self._others = [number for number in range(len(self.all)) if number not in found]
        self._counted, self._num_listed = counted, len(self.all)

    @property
    def counted(self) -> list[list[torch.Tensor]]:
        """Return, by optimizer, the gradients of the norm."""
        assert self._counted is not None
        return [[self.all[number] for number in of_child] for of_child in self._counted]

    @property
    def others(self) -> list[torch.Tensor]:
        """Return the gradients that the norm leaves out."""
        return [self.all[number] for number in self._others]

    @property
    def joined(self) -> list[torch.Tensor]:
        """Return views of all gradients, those that are adjacent in memory as one."""
        return self._views.of(self.all)

    def end(self) -> None:
        """Drop what is not in the same memory in the next step."""
        self.all = []
        if not self._stay:
            self._views.forget()
