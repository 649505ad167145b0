# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Lion on the local rows of DTensor parameters; its import loads torch's compiler."""

import torch
from emerging_optimizers.scalar_optimizers import Lion

from megatron_muon.runtime.tensors import local_tensor
from megatron_muon.step.elementwise import decay_before_update


class FSDPLion(Lion):
    """Step emerging-optimizers' Lion on local tensors, all parameters of a group at once.

    The parent compiles its update (``torch.compile``) parameter by parameter, and would trace
    uneven DTensors, whose local parts differ by rank. The update is elementwise, so local rows
    suffice; results have the bits of the parent without compilation.

    State is a DTensor per parameter, as in the parent, and in checkpoints. Parameters without
    gradient, such as empty shards, are skipped.
    """

    @torch.no_grad()
    def step(self) -> None:
        """Step the parameters that have a gradient."""
        for group in self.param_groups:
            # Creates state at the first gradient of a parameter.
            self._init_group(group)
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            states = [self.state[param] for param in params]
            weights = [local_tensor(param) for param in params]
            grads = [local_tensor(param.grad) for param in params]
            averages = [local_tensor(state["exp_avg"]) for state in states]
            decay_before_update(self.weight_decay_method, weights, grads, group)
            for state in states:
                # emerging-optimizers 0.4 counts steps, and does not use them in Lion.
                if "step" in state:
                    state["step"] += 1
            beta1, beta2 = group["betas"]
            updates = torch._foreach_lerp(averages, grads, 1 - beta1)
            torch._foreach_lerp_(averages, grads, 1 - beta2)
            torch._foreach_sign_(updates)
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
