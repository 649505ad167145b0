# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Places of a parameter in the two formats: alone, and in the tensor of all layers and experts.

============================================================  ====================================
``torch_dist``                                                ``fsdp_dtensor``
============================================================  ====================================
a tensor of all layers, ``decoder.layers.mlp...``             one a layer, ``decoder.layers.0.mlp``
one of all experts, ``mlp.experts.experts.linear_fc1...``     one per expert
gate and up in one ``linear_fc1.weight``                      ``weight_w`` and ``weight_v``
``self_attention.linear_qkv.layer_norm_weight``               ``input_layernorm.weight``, if norms
                                                              are separate modules
============================================================  ====================================
"""

import argparse
import itertools
import re
from collections.abc import Iterator

from megatron_muon.tools.checkpoint.reading import Box

_DDP_LAYERS = re.compile(r"((?:.*\.)?layers\.)(?=[^\d.])")
_FSDP_LAYER = re.compile(r"((?:.*\.)?layers\.)(\d+)\.(.+)$")
_DDP_EXPERTS = ".experts.experts."
_FSDP_EXPERT = re.compile(r"(.*\.experts)\.(?:local_experts\.(\d+)\.)?(.+?)(\d*)$")
_GATED = re.compile(
    r"\.mlp\.(?:shared_experts\.|experts\.(?:local_experts\.\d+\.)?)?linear_fc1\.(?:weight|bias)\d*$"
)
# Norms that Transformer Engine fuses into a linear layer, and other modules do not.
_SEPARATE_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
_INDEX = "{}"  # stands for an index in a name
HALVES = ("_w", "_v")


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box of a whole tensor."""
    return (0,) * len(shape), shape


def parts_of(
    stacked: str, shape: tuple[int, ...], args: argparse.Namespace
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of the parameters of Megatron-FSDP that a tensor of DDP holds."""
    name = _DDP_LAYERS.sub(rf"\1{_INDEX}.", stacked)
    if args.moe_grouped_gemm and _DDP_EXPERTS in name:
        name = name.replace(_DDP_EXPERTS, ".experts.") + _INDEX
    name = name.replace(_DDP_EXPERTS, f".experts.local_experts.{_INDEX}.")
    for fused, separate in _SEPARATE_NORMS.items() if args.transformer_impl == "local" else ():
        name = name.replace(fused, separate)
    num_indices = name.count(_INDEX)
    suffixes: tuple[str, ...] = ("",)
    own_shape = shape[num_indices:]
    if args.swiglu and _GATED.search(name.replace(_INDEX, "0")):
        suffixes, own_shape = HALVES, (own_shape[0] // 2, *own_shape[1:])
    for indices in itertools.product(*map(range, shape[:num_indices])):
        for suffix in suffixes:
            yield name.format(*indices) + suffix, own_shape


def place_of(
    name: str, shape: tuple[int, ...], args: argparse.Namespace
) -> tuple[str, Box, tuple[int, ...]]:
    """Return the place of a parameter of Megatron-FSDP in a tensor of DDP.

    Returns:
        Name of the tensor, box in it, and its shape, which begins with the numbers of layers and
        experts.
    """
    indices, stack = list[int](), list[int]()
    stacked, starts, whole_shape = name, [0] * len(shape), shape
    if name.endswith(HALVES) and _GATED.search(name[:-2]):
        stacked, starts[0] = name[:-2], shape[0] * HALVES.index(name[-2:])
        whole_shape = (2 * shape[0], *shape[1:])
    if match := _FSDP_LAYER.match(stacked):
        indices.append(int(match[2]))
        stack.append(args.num_layers)
        stacked = match[3]
        for fused, separate in _SEPARATE_NORMS.items() if args.transformer_impl == "local" else ():
            stacked = stacked.replace(separate, fused)
        stacked = match[1] + stacked
    if match := _FSDP_EXPERT.match(stacked):
        indices.append(int(match[2] or match[4]))
        stack.append(args.num_experts)
        stacked = f"{match[1]}.experts.{match[3]}"
    box = (*indices, *starts), (*(1 for _ in indices), *shape)
    return stacked, box, (*stack, *whole_shape)
