# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Layout of a matrix, from its module: orientation, and the matrices fused into it.

Gate and up, or query, key and value, are often one parameter, and Newton-Schulz would mix them.
Attributes of the module and shapes of its other matrices state the layout. A name alone does not,
and then nothing is split.
"""

import re
from typing import NamedTuple

import torch

from megatron_muon.rows.parameters import SplitSizes

# Fused gate and up, and the matrix behind them.
_GATED = {
    "gate_up_proj": "down_proj",
    "gate_up": "down",
    "input_linear": "output_linear",
    "Wi": "Wo",
    "w12": "w3",
    "fc1": "fc2",
    "linear_fc1": "linear_fc2",
    "dense_h_to_4h": "dense_4h_to_h",
    "ff_proj": "ff_out",
}
_QUERY_KEY_VALUE = ("query_key_value", "qkv_proj", "qkv", "Wqkv", "c_attn", "in_proj_weight")
_FUSED = re.compile("|".join((*_QUERY_KEY_VALUE, "gate_up", "qkv")))
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_GROUPS = (
    *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads"),
    *("num_query_groups", "n_query_groups"),
)
_EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts")


class Layout(NamedTuple):
    """Layout of a matrix.

    Args:
        split_sizes: See :func:`~megatron_muon.rows.matrices.output_slices`.
        is_transposed: Whether it is (inputs, outputs).
        is_unclear: Whether its name says that it is fused, and nothing states the sizes.
    """

    split_sizes: SplitSizes
    is_transposed: bool
    is_unclear: bool


def layout_of(
    container: torch.nn.Module, key: str, module: torch.nn.Module, param: torch.Tensor
) -> Layout:
    """Return the layout of a matrix, or of the matrices of a batch.

    Args:
        container: Module with the other matrices of the layer: the parent of a linear layer.
        key: Name of the matrix in it.
        module: Module that has the parameter.
        param: ``(outputs, inputs)`` or its transpose, also as a batch.
    """
    shape = tuple(param.shape[-2:])
    # Stacked rows: of gates, and of experts in two dimensions. Not by a configuration: modules
    # beside the experts have it too.
    numbers = [vars(module)[name] for name in _EXPERTS if type(vars(module).get(name)) is int]
    size = shape[0] // (max(numbers, default=0) or shape[0])
    if isinstance(module, torch.nn.RNNBase | torch.nn.RNNCellBase):
        size = module.hidden_size
    if param.ndim == 2 and module is container and 1 < size < shape[0] and shape[0] % size == 0:
        return Layout(shape[0] // size, False, False)
    # GPT-2's "Conv1D", a linear layer of transformers.
    is_conv1d = shape == (getattr(module, "nx", None), getattr(module, "nf", None))
    is_transposed = is_conv1d or getattr(container, "is_transposed", False) is True
    gated = _gated_shapes(container, key, param)
    if gated is not None:
        up, down = gated
        # At most one is true: down would have twice its inputs.
        is_by_columns = up[::-1] == (2 * down[0], down[1])
        if is_by_columns or up == (2 * down[1], down[0]):
            is_transposed = is_by_columns
            if key in _GATED:
                is_interleaved = getattr(container, "is_concatenated", True) is False
                return Layout((1, 1) if is_interleaved else 2, is_transposed, False)
    outputs, inputs = shape[::-1] if is_transposed else shape
    sizes = _query_key_value(container, key, outputs, inputs) if key in _QUERY_KEY_VALUE else None
    return Layout(sizes, is_transposed, sizes is None and _FUSED.search(key) is not None)


def _gated_shapes(
    container: torch.nn.Module, key: str, param: torch.Tensor
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shapes of a fused gate and up, and of the matrix behind it; None of others."""
    for up, down in _GATED.items():
        if key in (up, down):
            # Parameters of the module, or of linear layers in it; ``param`` may be in a wrapper.
            both = [param if name == key else getattr(container, name, None) for name in (up, down)]
            weights = [getattr(module, "weight", module) for module in both]
            if all(isinstance(weight, torch.Tensor) for weight in weights):
                return tuple(weights[0].shape[-2:]), tuple(weights[1].shape[-2:])  # type: ignore[union-attr]
    return None


def _query_key_value(container: torch.nn.Module, key: str, outputs: int, inputs: int) -> SplitSizes:
    """Return the split sizes of query, key and value, or None."""
    heads, groups = _number(container, _HEADS), _number(container, _GROUPS)
    head_dim = _number(container, ("head_dim", "head_size"))
    # Falcon and GPT-BigCode have the attribute; the name is Megatron's, for query, key and value
    # group by group.
    is_by_group = key == "query_key_value" or hasattr(container, "multi_query")
    if is_by_group:
        groups = groups or heads
    # CodeGen's and MiniMax's are neither, and have heads alone.
    elif groups or key != "qkv_proj":
        widths = (3 * inputs, 3 * (heads or 0) * (head_dim or 0))
        has_equal_blocks = outputs in widths or (groups and outputs % (3 * groups) == 0)
        if groups in (None, heads) and has_equal_blocks:
            return 3
        # GPT-2's cross-attention has no query in it.
        if key == "c_attn" and outputs == 2 * inputs:
            return 2
    if not heads or not groups or outputs % (heads + 2 * groups):
        return None
    dim = outputs // (heads + 2 * groups)
    if head_dim not in (None, dim) or (is_by_group and heads % groups):
        return None
    return (heads // groups * dim, dim, dim) if is_by_group else (heads * dim, *2 * (groups * dim,))


def _number(module: torch.nn.Module, names: tuple[str, ...]) -> int | None:
    """Return the first of some numbers that a module or its configuration has."""
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            number = getattr(holder, name, None)
            if type(number) is int and number > 0:
                return number
    return None
