# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""An Adam that keeps its step counter in parameter groups, as Transformer Engine's does."""

import functools
from pathlib import Path
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW with one counter a group, under the name by which Megatron knows the fused ones.

    Source: NVIDIA/TransformerEngine, ``transformer_engine/pytorch/optimizers/fused_adam.py``.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        adam_w_mode: bool,
        capturable: bool,
    ) -> None:
        assert adam_w_mode and not capturable
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            step = group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                rows, grad = param._local_tensor, param.grad._local_tensor
                mean, square = (
                    self.state[param].setdefault(name, torch.zeros_like(param))._local_tensor
                    for name in ("exp_avg", "exp_avg_sq")
                )
                rows.mul_(1 - group["lr"] * group["weight_decay"])
                mean.lerp_(grad, 1 - beta1)
                square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                denominator = (square / (1 - beta2**step)).sqrt().add_(group["eps"])
                rows.addcdiv_(mean, denominator, value=-group["lr"] / (1 - beta1**step))


def use_fused_adam() -> None:
    """Let Megatron build it in place of torch's, as where Transformer Engine is installed."""
    from megatron.core import optimizer

    optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False


def watch_adam(is_fused: bool, iteration: int, folder: str) -> None:
    """Choose an Adam, and write its counters and states on each rank as an iteration left them."""
    from megatron.training import get_args

    if is_fused:
        use_fused_adam()
    adam: Any = FusedAdam if is_fused else torch.optim.AdamW
    original = adam.step

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if get_args().curr_iteration == iteration:
            owners = self.param_groups if is_fused else self.state.values()
            params = [param for group in self.param_groups for param in group["params"]]
            found = {
                "counters": [float(owner["step"]) for owner in owners],
                "states": [
                    self.state[param][name]._local_tensor.clone()
                    for param in params
                    for name in ("exp_avg", "exp_avg_sq")
                ],
            }
            torch.save(found, Path(folder) / f"adam_{torch.distributed.get_rank()}.pt")
        return original(self, *args, **kwargs)

    adam.step = step
