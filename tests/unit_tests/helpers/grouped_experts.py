# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Experts with the parameters of Transformer Engine's grouped layers, which need a GPU."""

from typing import Any

import torch
from torch.nn import functional

# A gated layer; biases are on unless Megatron's flag turns them off.
FLAGS = ("without:--disable-bias-linear",)


def replace_experts() -> None:
    """Let Megatron's local layers have experts named as in ``TEGroupedMLP``, with its arithmetic.

    Parameters are ``linear_fc1.weight<i>`` and ``linear_fc1.bias<i>``, not those of modules in
    ``local_experts``.
    """
    from megatron.core.models import backends
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.experts import SequentialMLP

    class GroupedExperts(MegatronModule):
        """Stand for ``TEGroupedMLP``."""

        def __init__(self, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config=config)
            self.num_local_experts = num_local_experts
            experts = SequentialMLP(num_local_experts, config, *args, **kwargs).local_experts
            for name in ("linear_fc1", "linear_fc2"):
                layer = torch.nn.Module()
                for index, expert in enumerate(experts):
                    linear = getattr(expert, name)
                    layer.register_parameter(f"weight{index}", linear.weight)
                    layer.register_parameter(f"bias{index}", linear.bias)
                setattr(self, name, layer)

        def forward(
            self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
        ) -> tuple[torch.Tensor, None]:
            sizes = tokens_per_expert.tolist()
            outputs = []
            for index, (x, scale) in enumerate(
                zip(tokens.split(sizes), probs.split(sizes), strict=True)
            ):
                gate, up = self._linear("linear_fc1", index, x).chunk(2, dim=-1)
                hidden = (functional.silu(gate) * up * scale.unsqueeze(-1)).to(x.dtype)
                outputs.append(self._linear("linear_fc2", index, hidden))
            return torch.cat(outputs), None

        def _linear(self, name: str, index: int, x: torch.Tensor) -> torch.Tensor:
            layer = getattr(self, name)
            weight, bias = getattr(layer, f"weight{index}"), getattr(layer, f"bias{index}")
            return functional.linear(x, weight, bias)

    backends.SequentialMLP = GroupedExperts
