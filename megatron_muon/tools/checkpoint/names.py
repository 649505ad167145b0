# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Names of a parameter in the two formats: alone, and in the tensor of all layers and experts.

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
from typing import NamedTuple

from megatron_muon.mcore.checkpoint_reading import Box

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
_INDEX = "\0"  # stands for an index in a name


class Part(NamedTuple):
    """A parameter of Megatron-FSDP in the tensor of all layers and experts that DDP stores.

    Args:
        name: Name of the parameter under Megatron-FSDP.
        stacked: Name of the tensor under DDP.
        indices: Index by layer and expert.
        half: 0 for the rows of the gate, 1 for the rows of up, None for all.
    """

    name: str
    stacked: str
    indices: tuple[int, ...]
    half: int | None

    def box(self, shape: tuple[int, ...]) -> Box:
        """Return the box of a parameter of this shape in the stacked tensor."""
        rows = ((self.half or 0) * shape[0], *(0 for _ in shape[1:])) if shape else ()
        return (*self.indices, *rows), (*(1 for _ in self.indices), *shape)


def parts_of(
    stacked: str, shape: tuple[int, ...], args: argparse.Namespace, *, has_halves: bool = True
) -> Iterator[Part]:
    """Yield the parameters of Megatron-FSDP that a tensor of DDP holds."""
    name = _DDP_LAYERS.sub(rf"\1{_INDEX}.", stacked)
    if args.moe_grouped_gemm and _DDP_EXPERTS in name:
        name = name.replace(_DDP_EXPERTS, ".experts.") + _INDEX
    name = name.replace(_DDP_EXPERTS, f".experts.local_experts.{_INDEX}.")
    for fused, separate in _SEPARATE_NORMS.items() if args.transformer_impl == "local" else ():
        name = name.replace(fused, separate)
    is_gated = has_halves and args.swiglu and _GATED.search(name.replace(_INDEX, "0"))
    for indices in itertools.product(*map(range, shape[: name.count(_INDEX)])):
        indexed = name
        for index in indices:
            indexed = indexed.replace(_INDEX, str(index), 1)
        for suffix, half in (("_w", 0), ("_v", 1)) if is_gated else (("", None),):
            yield Part(indexed + suffix, stacked, indices, half)


def part_of(name: str, args: argparse.Namespace) -> tuple[Part, tuple[int, ...]]:
    """Return the place of a parameter of Megatron-FSDP, and the numbers of layers and experts."""
    indices, stack = list[int](), list[int]()
    stacked, half = name, None
    if name.endswith(("_w", "_v")) and _GATED.search(name[:-2]):
        stacked, half = name[:-2], int(name.endswith("_v"))
    if match := _FSDP_LAYER.match(stacked):
        indices.append(int(match[2]))
        stack.append(args.num_layers)
        stacked = match[3]
        for fused, separate in _SEPARATE_NORMS.items() if args.transformer_impl == "local" else ():
            if stacked.startswith(separate):
                stacked = fused + stacked.removeprefix(separate)
        stacked = match[1] + stacked
    if match := _FSDP_EXPERT.match(stacked):
        indices.append(int(match[2] or match[4]))
        stack.append(args.num_experts)
        stacked = f"{match[1]}.experts.{match[3]}"
    return Part(name, stacked, tuple(indices), half), tuple(stack)
