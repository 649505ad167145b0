# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers as users write them, with errors at every moment; options of registered classes."""

import contextlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from emerging_optimizers import registry

from megatron_muon.step.owned_matrix import registered_class

registered_class("soap")
# Names of all classes of emerging-optimizers.
NAMES = registry.get_optimizer_name_list()
# Options of the classes that need some, or that would not tell much without.
OPTIONS: dict[str, dict[str, Any]] = {
    "adaptive_muon": {"momentum": 0.9, "moment2_method": "namo"},
    "muon_hyperball": {"hyperball_radius": 3.0},
    "oblique_sgd": {"dim": 1},
    "soap": {"max_update_rms": 0.5},
}


def without_noise(name: str) -> Any:
    """Replace random numbers: no reference draws those of one matrix after another in our order."""
    randn = torch.randn
    noise = mock.patch.multiple(
        torch,
        randn_like=torch.ones_like,
        randn=lambda *args, **key: (randn if "generator" in key else torch.ones)(*args, **key),
    )
    return noise if name == "psgd_pro" else contextlib.nullcontext()


class Halving(torch.optim.Optimizer):
    """A user's class: it replaces tensors, counts steps in an attribute, and has nested state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.num_steps = 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["sums"] = {"rows": p.new_zeros(len(p)), "cols": p.new_zeros(p.shape[1])}
                state["sums"]["rows"] += p.grad.sum(1)
                state["sums"]["cols"] = state["sums"]["cols"] + p.grad.sum(0)
                scale = group["lr"] / self.num_steps
                p.data = p.data - scale * state["sums"]["rows"][:, None] * state["sums"]["cols"]


class Fussy(Halving):
    """A user's class that refuses a matrix."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        if any(len(p) == 5 for p in self.param_groups[0]["params"]):
            raise ValueError("no five rows")


class Early(Halving):
    """A user's class whose constructor makes state, and whose state is the gradient itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"first": p.detach().clone(), "names": ["a", None]}

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                last = state.get("last", state["first"])
                p.data = p.data - self.param_groups[0]["lr"] * (p.grad + last)
                state["last"] = p.grad


class Failing(Early):
    """A user's class that raises on the owner of one matrix, after its change."""

    fails: bool = False

    def step(self, closure: Any = None) -> None:
        super().step()
        if self.fails and any(len(p) == 5 for p in self.param_groups[0]["params"]):
            raise ValueError("no convergence")


class Counting(Halving):
    """A user's class that counts steps in its groups."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["num_steps"] = self.num_steps


class OneSided(Halving):
    """A user's class whose constructor raises on one rank."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        assert dist.get_rank() != 1, "no such file"
        super().__init__(params, lr)
