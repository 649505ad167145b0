# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Sort the parameters of a model into groups by name, shape and kind of module."""

import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd

logger = logging.getLogger(__name__)

# Regular expressions, searched in names: embeddings, heads, norms, biases and routers.
ELEMENTWISE_NAMES = (
    r"embed|(^|\.)w[tp]e\.",
    r"(^|\.)(lm_head|head|score|classifier)\.|^(model\.)?output\.weight$",
    r"norm|(^|\.)ln_",
    r"bias$",
    r"router|(^|\.)gate\.",
)


def parameter_groups(
    model: torch.nn.Module,
    *,
    elementwise_names: Sequence[str] = ELEMENTWISE_NAMES,
    elementwise: str = "adamw",
    elementwise_options: Mapping[str, Any] | None = None,
    flatten: bool = False,
) -> list[dict[str, Any]]:
    """Return groups of a model's trainable parameters for :class:`MuonAdamW`.

    Muon gets matrices, and batches of matrices (three dimensions, as of experts). The other
    algorithm gets vectors, embeddings (``torch.nn.Embedding``), and what a pattern finds. Rank 0
    logs what went where, with the names of matrices that Muon does not get.

    Args:
        model: The model, sharded or not yet.
        elementwise_names: Regular expressions; a parameter whose name one of them finds is stepped
            element by element.
        elementwise: Algorithm of these, ``adamw`` or ``lion``.
        elementwise_options: Other keys of their groups, such as ``lr``.
        flatten: Whether Muon gets convolutions too, as matrices of output channels.

    Returns:
        Groups with ``params``, ``param_names`` and ``algorithm``, Muon's first. Parameters of
        several meshes that are stepped element by element are in a group each: torch steps one mesh
        at a time.

    Raises:
        ValueError: The model has no trainable parameter, or a pattern of the user's finds none.
    """
    kinds: dict[tuple[Any, ...], dict[str, torch.Tensor]] = defaultdict(dict)
    unused = set(elementwise_names) if elementwise_names is not ELEMENTWISE_NAMES else set()
    surprising = []
    owners = {
        id(param): module
        for module in model.modules()
        for param in module.parameters(recurse=False)
    }
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        module = owners[id(param)]
        found = [pattern for pattern in elementwise_names if re.search(pattern, name)]
        unused.difference_update(found)
        is_convolution = isinstance(module, _ConvNd) and param.ndim > 2
        is_matrix = param.ndim in (2, 3) if not is_convolution else flatten
        if is_matrix and not found and not isinstance(module, torch.nn.Embedding):
            kinds["muon", is_convolution][name] = param
            continue
        mesh = param.device_mesh if isinstance(param, DTensor) else None
        kinds[elementwise, mesh][name] = param
        if param.ndim > 1:
            surprising.append(name)
    if unused or not kinds:
        raise ValueError(
            f"elementwise_names: expected patterns that find parameters, got {sorted(unused)}, "
            "which find none. Look at model.named_parameters()"
            if kinds
            else "model: expected trainable parameters, got none. Set requires_grad"
        )
    groups = []
    # Muon's first, as a checkpoint of Muon and AdamW, two optimizers, most often has them.
    for (algorithm, kind), params in sorted(kinds.items(), key=lambda item: item[0][0] != "muon"):
        options = {} if algorithm == "muon" else dict(elementwise_options or {})
        if algorithm == "muon" and kind:
            options["flatten"] = True
        groups.append(
            {
                "params": list(params.values()),
                "param_names": list(params),
                "algorithm": algorithm,
                **options,
            }
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        _log(groups, elementwise, surprising)
    return groups


def _log(groups: Sequence[Mapping[str, Any]], elementwise: str, surprising: Sequence[str]) -> None:
    """Log what went where, and the matrices that Muon does not get."""
    for group in groups:
        logger.info(
            "%s: %d parameters, %d elements",
            group["algorithm"],
            len(group["params"]),
            sum(param.numel() for param in group["params"]),
        )
    logger.info("%s, not muon, steps %s", elementwise, ", ".join(surprising) or "no matrix")
