# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Lion on the local rows of DTensor parameters; its import loads torch's compiler."""

from collections.abc import Callable
from typing import Any

import torch
from emerging_optimizers.scalar_optimizers import Lion

from megatron_muon.runtime.tensors import local_tensor
from megatron_muon.step.elementwise import add_cautious_decay, decay_before_update


class FSDPLion(Lion):
    """Step emerging-optimizers' Lion on local tensors, all parameters of a group at once.

    The parent compiles its update (``torch.compile``) parameter by parameter, and would trace
    uneven DTensors, whose local parts differ by rank. The update is elementwise, so local rows
    suffice; results have the bits of the parent without compilation.

    State is a DTensor per parameter, as in the parent, and in checkpoints. Parameters without
    gradient, such as empty shards, are skipped.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step the parameters that have a gradient.

        Args:
            closure: Unsupported; must be None.

        Raises:
            ValueError: A closure was passed.
        """
        if closure is not None:
            raise ValueError("closure: expected None, got one. Compute the loss before step().")
        for group in self.param_groups:
            # Creates state at the first gradient of a parameter.
            self._init_group(group)
            held = [param for param in group["params"] if param.grad is not None]
            if held:
                self._step(held, group)

    def _step(self, params: list[Any], group: dict[str, Any]) -> None:
        weights = [local_tensor(param) for param in params]
        grads = [local_tensor(param.grad) for param in params]
        averages = [local_tensor(self.state[param]["exp_avg"]) for param in params]
        lr, (beta1, beta2) = group["lr"], group["betas"]
        decay_before_update(self.weight_decay_method, weights, grads, group)
        for param in params:
            # emerging-optimizers 0.4 counts steps, and does not use them in Lion.
            if "step" in self.state[param]:
                self.state[param]["step"] += 1
        updates = torch._foreach_lerp(averages, grads, 1 - beta1)
        torch._foreach_lerp_(averages, grads, 1 - beta2)
        torch._foreach_sign_(updates)
        if self.weight_decay_method == "cautious":
            add_cautious_decay(updates, weights, group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-lr)
