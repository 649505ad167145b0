# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon whose momentum is a sum, with AdamW groups, as dion and xtuner have it.

Written from the recurrences and names of their state: ``dion/muon.py``, ``dion/megabatch_base.py``
and ``dion/scalar_opts.py`` of microsoft/dion; ``xtuner/v1/optim/muon.py`` of InternLM/xtuner.
"""

import importlib
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
from torch.distributed.device_mesh import init_device_mesh

# Of both optimizers that are compared: bf16 would amplify how an average differs from a sum.
PRECISE = {"nesterov": True, "fp32_matmul_prec": "highest"}
PACKAGES = {"dion": "dion", "xtuner": "xtuner.v1.optim.muon"}


class SumMuon(torch.optim.Optimizer):
    """Step groups by their ``algorithm``.

    Args:
        groups: Parameter groups.
        style: ``dion`` or ``xtuner``, whose names the state has.
    """

    def __init__(self, groups: list[dict[str, Any]], style: str) -> None:
        defaults = {"lr": 0.02, "mu": 0.9, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8}
        super().__init__(groups, {**defaults, "weight_decay": 0.1, "algorithm": "muon", "step": 0})
        self.style = style
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["momentum"] = torch.zeros_like(param)
                if group["algorithm"] == "adamw":
                    state["variance"] = torch.zeros_like(param)
                    if style == "dion":
                        state["step_dev"] = torch.zeros(())
                elif style == "xtuner":
                    state["lr_ratio"] = 1.0
        # Only its Newton-Schulz is called.
        matrix = torch.nn.Parameter(torch.zeros(2, 2))
        self._whole = WholeMatrixMuon([matrix], **PRECISE)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step all parameters."""
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                state, grad = self.state[param], param.grad
                param.mul_(1 - group["lr"] * group["weight_decay"])
                if group["algorithm"] == "adamw":
                    self._step_adamw(param, state, group)
                    continue
                momentum = state["momentum"].mul_(group["mu"]).add_(grad)
                update = group["mu"] * momentum + grad
                update = self._whole.scaled_orthogonalize_fn(update)
                param.sub_(group["lr"] * update)

    def _step_adamw(self, param: torch.Tensor, state: dict[str, Any], group: Any) -> None:
        grad = param.grad
        state["momentum"].lerp_(grad, 1 - group["beta1"])
        state["variance"].mul_(group["beta2"]).addcmul_(grad, grad, value=1 - group["beta2"])
        step = group["step"]
        if self.style == "dion":
            state["step_dev"] += 1
            step = float(state["step_dev"])
        root = (state["variance"] / (1 - group["beta2"] ** step)).sqrt() + group["epsilon"]
        param.sub_(group["lr"] / (1 - group["beta1"] ** step) * state["momentum"] / root)


def package_muon(groups: list[dict[str, Any]], style: str) -> torch.optim.Optimizer:
    """Return an optimizer of dion or xtuner itself, with the Newton-Schulz of :class:`SumMuon`.

    No registry has them. PYTHONPATH must contain the folder ``dion`` of dion's repository; of
    xtuner's, ``xtuner/v1/optim/muon.py`` and ``xtuner/v1/utils/dtensor.py`` with empty
    ``__init__.py`` files, as its own import packages that need a GPU.
    """
    whole = WholeMatrixMuon([torch.nn.Parameter(torch.zeros(2, 2))], **PRECISE)

    def orthogonalize(update: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the scaled result of a bfloat16 update."""
        return whole.scaled_orthogonalize_fn(update.float())

    settings: dict[str, Any] = {"lr": 0.02, "mu": 0.9, "betas": (0.9, 0.95), "weight_decay": 0.1}
    settings |= {"nesterov": True, "newton_schulz_func": orthogonalize}
    if style == "dion":
        settings |= {"adjust_lr": None, "distributed_mesh": init_device_mesh("cpu", (1,))}
    else:
        settings["adjust_lr"] = "none"
    muon = importlib.import_module(PACKAGES[style]).Muon
    return muon([dict(group) for group in groups], **settings)
