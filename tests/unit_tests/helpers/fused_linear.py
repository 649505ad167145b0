# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A linear layer that fuses gradient accumulation by Transformer Engine's rules, on a CPU."""

from typing import Any

import torch


class FusedLinear(torch.autograd.Function):
    """Multiply by a weight; write its gradient into ``main_grad``, as Transformer Engine does.

    ``overwrite_main_grad``, read in the forward pass, decides whether what is there is added to.
    Autograd gets a gradient of nothing but NaN, which Megatron-FSDP must not use.

    Source: NVIDIA/TransformerEngine, ``transformer_engine/pytorch/module/linear.py``.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.weight, ctx.overwrites = weight, getattr(weight, "overwrite_main_grad", False)
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (grad_output,) = grad_outputs
        rows, weight = ctx.saved_tensors
        gradient = grad_output.flatten(0, -2).t() @ rows.flatten(0, -2)
        ctx.weight.main_grad = ctx.weight.get_main_grad()
        if ctx.overwrites:
            ctx.weight.main_grad.copy_(gradient)
        else:
            ctx.weight.main_grad.add_(gradient)
        ctx.weight.grad_added_to_main_grad = True
        return grad_output @ weight, torch.full_like(gradient, float("nan"))


def replace_linears_of_megatron() -> None:
    """Let Megatron's column- and row-parallel layers of this process be fused linears."""
    from megatron.core.tensor_parallel import layers

    def fused(input: torch.Tensor, weight: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stand for ``linear_with_grad_accumulation_and_async_allreduce``."""
        return FusedLinear.apply(input, weight)

    layers.linear_with_grad_accumulation_and_async_allreduce = fused


def fuse_linears_of_megatron(model: torch.nn.Module) -> None:
    """Turn on fused accumulation in Megatron's own layers of a model.

    They refuse it at construction without Apex, whose kernel Megatron-FSDP does not use.
    """
    for module in model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = True


def mark_as_grouped_experts(model: torch.nn.Module) -> None:
    """Do before each linear layer what Megatron does before Transformer Engine's fused experts."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    for module in model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.fuse_wgrad_accumulation = True
            module.register_forward_pre_hook(
                # Through an instance, as Megatron calls it.
                lambda layer, _: TEGroupedMLP.__new__(TEGroupedMLP)._ensure_main_grad(layer)
            )
