# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Layout of a matrix, from its module: orientation, and the matrices fused into it.

Gate and up, or query, key and value, are often one parameter, and Newton-Schulz would mix them.
Attributes of the module and shapes of its other matrices state the layout. A name alone does not,
and then nothing is split.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_muon.rows.parameters import SplitSizes

# Fused gate and up, and the down projection that follows.
_GATED = {
    "gate_up_proj": "down_proj",
    "gate_up": "down",
    "input_linear": "output_linear",
    "Wi": "Wo",
    "w12": "w3",
    "w13": "w2",
    "fc1": "fc2",
    "linear_fc1": "linear_fc2",
    "dense_h_to_4h": "dense_4h_to_h",
    "ff_proj": "ff_out",
}
_GATE_OF = {down: up for up, down in _GATED.items()}
_QUERY_KEY_VALUE = ("query_key_value", "qkv_proj", "qkv", "Wqkv", "c_attn", "in_proj_weight")
_FUSED = re.compile(
    "|".join((*_QUERY_KEY_VALUE, "gate_?(and_)?up", "up_?(and_)?gate"))
    + r"|(^|_)w(12|13|31|1_?w[23]|3_?w1)(_|$)|(^|_)(to_|w_?)?(kv|qk)(_proj)?$"
)
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_GROUPS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "kv_heads",
    "num_query_groups",
    "n_query_groups",
)
_EXPERTS = ("num_experts", "num_local_experts", "moe_num_experts")


class Layout(NamedTuple):
    """Layout of a matrix.

    Args:
        split_sizes: See ``output_slices()``.
        is_transposed: Whether it is (inputs, outputs).
        is_unclear: Whether its name says that it is fused, and nothing states the sizes.
    """

    split_sizes: SplitSizes
    is_transposed: bool
    is_unclear: bool


def layout_of(
    name: str,
    param: torch.Tensor,
    module: torch.nn.Module,
    outer: Sequence[torch.nn.Module],
) -> Layout:
    """Return the layout of a matrix, or of the matrices of a batch.

    Args:
        name: Name of the parameter, without wrappers.
        param: ``(outputs, inputs)`` or its transpose, also as a batch.
        module: Module that has the parameter.
        outer: Modules around it, the innermost first.
    """
    *_, parent, key = ["", *name.split(".")]
    # Module with the other matrices of the layer: for a linear layer the one around it.
    container = module
    if key == "weight" and parent:
        container, key = outer[0], parent
    shape = tuple(param.shape[-2:])
    # Gates or experts as blocks of rows. A configuration does not count: modules beside the experts
    # have it too.
    num_blocks = _first_positive(_EXPERTS, module) or 1
    if isinstance(module, torch.nn.RNNBase | torch.nn.RNNCellBase):
        num_blocks = shape[0] // module.hidden_size
    is_stacked = 1 < num_blocks < shape[0] and shape[0] % num_blocks == 0
    if param.ndim == 2 and module is container and is_stacked:
        return Layout(num_blocks, False, False)
    # GPT-2's "Conv1D", a linear layer of transformers.
    is_conv1d = shape == (getattr(module, "nx", None), getattr(module, "nf", None))
    is_transposed = is_conv1d or getattr(container, "is_transposed", False) is True
    other = getattr(container, (_GATED | _GATE_OF).get(key, ""), None)
    # A parameter of the module, or of a linear layer in it.
    other = getattr(other, "weight", other)
    if isinstance(other, torch.Tensor):
        pair = shape, tuple(other.shape[-2:])
        up, down = pair if key in _GATED else pair[::-1]
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


def _query_key_value(container: torch.nn.Module, key: str, outputs: int, inputs: int) -> SplitSizes:
    """Return the split sizes of query, key and value, or None."""
    sources = container, getattr(container, "config", None)
    heads, groups = _first_positive(_HEADS, *sources), _first_positive(_GROUPS, *sources)
    head_dim = _first_positive(("head_dim", "head_size"), *sources)
    # Falcon and GPT-BigCode have the attribute; the name is Megatron's, for query, key and value
    # group by group.
    is_by_group = key == "query_key_value" or hasattr(container, "multi_query")
    if is_by_group:
        groups = groups or heads
    # A qkv_proj without a number of groups, as CodeGen's and MiniMax's, has another layout.
    elif groups in (None, heads) and (groups or key != "qkv_proj"):
        widths = (3 * inputs, 3 * (heads or 0) * (head_dim or 0))
        if outputs in widths or (groups and outputs % (3 * groups) == 0):
            return 3
        # GPT-2's cross-attention has no query in it.
        if key == "c_attn" and outputs == 2 * inputs:
            return 2
    if not heads or not groups or outputs % (heads + 2 * groups):
        return None
    dim = outputs // (heads + 2 * groups)
    if head_dim not in (None, dim):
        return None
    return (heads // groups * dim, dim, dim) if is_by_group else (heads * dim, *2 * (groups * dim,))


def _first_positive(names: Sequence[str], *sources: object) -> int | None:
    """Return the first positive number among attributes of modules and configurations."""
    numbers = (getattr(source, name, None) for source in sources for name in names)
    return next((number for number in numbers if type(number) is int and number > 0), None)
