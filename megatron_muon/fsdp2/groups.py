# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Sort the parameters of a model into groups, by evidence that they are matrices.

The first rule that matches decides. A shared parameter has several names and modules: each counts.
docs/fsdp2.md has the reasons::

    use_muon of the parameter or its module         Muon if True, AdamW if False
    complex numbers                                 AdamW
    convolution                                     AdamW, or Muon with ``flatten``
    other than 2 or 3 dimensions, or a side of 1    AdamW
    module is an embedding, or name matches         AdamW: embedding, head, router, norm, bias, LoRA
    gate beside experts                             AdamW: router
    outside of blocks, as many outputs as tokens    AdamW: head
    batch of matrices of experts                    Muon
    weight of a linear layer, *_weight, *_proj      Muon
    other                                           AdamW, with a warning
"""

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules.conv import _ConvNd

from megatron_muon.fsdp2.fused import Layout, layout_of
from megatron_muon.fsdp2.parameters import as_split_sizes, partition_dim, without_wrappers
from megatron_muon.rows.parameters import SplitSizes
from megatron_muon.runtime.agreement import own_rank

logger = logging.getLogger(__name__)

# Kinds by regular expression, searched in names without wrappers: of the module or its parent.
_KINDS = {
    r"embed[^.]*(\.[^.]+)?$|(^|\.)w[tp]e\.[^.]+$": "embedding",
    # At the rates of LoRA, of 1e-3 and less, AdamW adapts faster (docs/fsdp2.md).
    r"(^|\.)lora_": "adapter",
    r"router(\.[^.]+)?\.[^.]+$": "router",
    # A module with several layers is a head outside of blocks alone: attention has heads too.
    r"(^|\.)(\w+_)?(heads?|logits|score|classifier|qa_outputs|seq_relationship|bbox_pred)"
    r"\.weight$|^(?!.*\.\d+\.[^.]+\.)(.*\.)?(\w+_)?(heads?|logits|score|classifier)\.\w+"
    r"\.weight$": "head",
    # Blocks have such layers too.
    r"^(?!.*(\.\d+\.[^.]+\.|att|mlp|ffn|feed)).*?"
    r"(^|\.)(output|output_layer|out_embed|proj_out|fc_out|final_layer|unembed)"
    r"\.[^.]+$": "output layer",
    r"norm[^.]*\.[^.]+$|(^|\.)ln_[^.]*\.[^.]+$": "norm",
    r"bias[^.]*$": "bias",
}
# Regular expressions for embeddings, adapters, heads, norms, biases and routers.
ELEMENTWISE_NAMES = tuple(_KINDS)

_IN_BLOCK = re.compile(r"\.\d+\.[^.]+\.")
_WEIGHT = re.compile(r"(\w*_)?(weight\w*|proj|[wv]\d+)")


class Choice(NamedTuple):
    """Algorithm and layout of a parameter.

    Args:
        name: First name in the model.
        param: The parameter.
        algorithm: Algorithm of its group.
        reason: Evidence, a few words.
        is_unclear: Whether there was no evidence, or contradicting evidence.
        layout: Keys of its group: ``split_sizes``, ``transposed`` and ``flatten``.
    """

    name: str
    param: torch.Tensor
    algorithm: str
    reason: str
    is_unclear: bool
    layout: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Algorithm, layout and reason, as a line of the log."""
        split = "".join(f", split {v}" for k, v in self.layout.items() if k == "split_sizes")
        transposed = ", transposed" * ("transposed" in self.layout)
        return f"{self.algorithm}{split}{transposed}: {self.reason}"


class _Occurrence(NamedTuple):
    """An occurrence of a parameter in a model; shared parameters have several.

    Args:
        name: Name of the parameter, without wrappers.
        module: Module that has the parameter.
        parents: Modules around it, the innermost first.
    """

    name: str
    module: torch.nn.Module
    parents: Sequence[torch.nn.Module]

    @property
    def is_linear(self) -> bool:
        """Whether the module multiplies by its weight."""
        return isinstance(self.module, torch.nn.Linear)

    @property
    def is_embedding(self) -> bool:
        """Whether the module looks rows up."""
        if isinstance(self.module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            return True
        return "embed" in type(self.module).__name__.lower() and not self.is_linear

    @property
    def is_router(self) -> bool:
        """Whether it is a gate beside experts, or a layer of that gate."""
        names = self.name.split(".")[-2:-4:-1]
        beside = self.parents[names.index("gate") :][:1] if "gate" in names else ()
        return any(map(_has_experts, beside)) or "Router" in type(self.module).__name__

    def is_matrix(self, num_dims: int) -> bool:
        """Whether the module multiplies by the parameter: a matrix, or the matrices of experts."""
        # A bare tensor may be anything.
        is_weight = bool(_WEIGHT.fullmatch(self.name.rpartition(".")[2]))
        if num_dims == 3:
            is_named = "expert" in f"{self.name} {type(self.module).__name__}".lower()
            beside = self.module, *self.parents[:1]
            return is_named or (is_weight and any(map(_has_experts, beside)))
        # weight_norm makes a direction and its length of a weight.
        return (self.is_linear or is_weight) and not hasattr(self.module, "weight_g")


def _has_experts(module: torch.nn.Module) -> bool:
    names = (type(module).__name__.lower(), *vars(module), *module._modules, *module._parameters)
    return any(name.endswith("experts") for name in names)


def _occurrences(model: torch.nn.Module) -> dict[torch.Tensor, list[_Occurrence]]:
    """Return the occurrences of all parameters."""
    # Modules come after their wrapper.
    modules = {
        without_wrappers(f"{path}.").strip("."): module
        for path, module in model.named_modules(remove_duplicate=False)
    }
    occurrences: dict[torch.Tensor, list[_Occurrence]] = defaultdict(list)
    for full_name, param in model.named_parameters(remove_duplicate=False):
        name = without_wrappers(full_name)
        path = name.split(".")[:-1]
        parents = [modules[".".join(path[:depth])] for depth in reversed(range(len(path)))]
        module = model.get_submodule(full_name.rpartition(".")[0])
        occurrences[param].append(_Occurrence(name, module, parents))
    return occurrences


def _heads(occurrences: Mapping[torch.Tensor, Sequence[_Occurrence]]) -> set[torch.Tensor]:
    """Return the layers outside of blocks with as many outputs as an embedding has rows.

    A layer whose outputs a later layer takes is no head.
    """
    # Positions are fewer than tokens, and often as many as a layer has outputs.
    vocabularies = {
        param.shape[0]
        for param, uses in occurrences.items()
        if param.ndim and any(o.is_embedding and not re.search("pos|wpe", o.name) for o in uses)
    }
    heads: set[torch.Tensor] = set()
    later_inputs: set[int] = set()
    for param, uses in reversed([*occurrences.items()]):
        if param.ndim == 2 and any(o.is_linear and not _IN_BLOCK.search(o.name) for o in uses):
            outputs, inputs = param.shape
            later_inputs.add(inputs)
            if outputs in vocabularies - later_inputs:
                heads.add(param)
    return heads


def choose(
    model: torch.nn.Module,
    *,
    elementwise_names: Sequence[str] = ELEMENTWISE_NAMES,
    elementwise: str = "adamw",
    flatten: bool = False,
    splits: Mapping[str, SplitSizes] | None = None,
) -> list[Choice]:
    """Choose algorithm and layout of all trainable parameters; see ``parameter_groups()``."""
    occurrences, splits = _occurrences(model), splits or {}
    own_names = set(elementwise_names).difference(ELEMENTWISE_NAMES)
    # With patterns of their own, users choose heads and routers.
    has_defaults = set(elementwise_names) >= set(ELEMENTWISE_NAMES)
    heads = _heads(occurrences)
    choices = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        uses = occurrences[param]
        is_convolution = isinstance(uses[0].module, _ConvNd) and param.ndim > 2
        evidence = "convolution" if is_convolution else "experts" if param.ndim == 3 else "linear"
        against = "convolution" if is_convolution and not flatten else None
        against = against or _evidence_against(param, uses, is_convolution)
        against = against or name_against([name, *(o.name for o in uses)], elementwise_names)
        if has_defaults and not against:
            if any(o.is_router for o in uses):
                against = "router"
            elif param in heads:
                against = "head, with as many outputs as an embedding has rows"
        is_matrix = is_convolution or any(o.is_matrix(param.ndim) for o in uses)
        requests = [getattr(o, "use_muon", None) for o in (param, *(o.module for o in uses))]
        if False in requests:
            against = "use_muon is False"
        elif True in requests:
            is_matrix, evidence, against = True, "use_muon is True", None
        if is_matrix and not against:
            layout, is_unclear = _layout(name, param, uses[0], splits, is_convolution)
            evidence += ", fused, in one matrix" * is_unclear
            choices.append(Choice(name, param, "muon", evidence, is_unclear, layout))
            continue
        # A linear layer called embedding is unclear too.
        is_unclear = not against or (against == "embedding" and all(o.is_linear for o in uses))
        reason = against or "no linear layer and no experts"
        choices.append(Choice(name, param, elementwise, reason, is_unclear, {}))
    if not choices:
        raise ValueError("model: expected trainable parameters, got none. Set requires_grad")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    muon_names = [choice.name for choice in choices if choice.algorithm == "muon"]
    for argument, noun, patterns, searched in (
        ("elementwise_names", "parameters", own_names, names),
        ("splits", "parameters of Muon", set(splits), muon_names),
    ):
        unused = [p for p in patterns if not any(re.search(p, name) for name in searched)]
        if unused:
            raise ValueError(
                f"{argument}: expected patterns that find {noun}, got {sorted(unused)}, which find "
                "none. Look at model.named_parameters()"
            )
    _log(choices)
    return choices


def _evidence_against(
    param: torch.Tensor, uses: Sequence[_Occurrence], is_convolution: bool
) -> str | None:
    """Return the reason of shape or module that a parameter is no matrix, or None."""
    if param.is_complex():
        return "complex"
    if not is_convolution and param.ndim not in (2, 3):
        return "vector" if param.ndim < 2 else f"{param.ndim} dimensions"
    if 1 in (param.shape[:2] if is_convolution else param.shape[-2:]):
        return "a side of 1"
    return "embedding" if any(o.is_embedding for o in uses) else None


def name_against(names: Sequence[str], patterns: Iterable[str]) -> str | None:
    """Return the kind of the first pattern that one of the names matches, or None."""
    for pattern in patterns:
        if any(re.search(pattern, name) for name in names):
            return _KINDS.get(pattern, f"name {pattern}")
    return None


def _layout(
    name: str,
    param: torch.Tensor,
    occurrence: _Occurrence,
    splits: Mapping[str, SplitSizes],
    is_convolution: bool,
) -> tuple[dict[str, Any], bool]:
    """Return the layout of a matrix, of the user or its module, and whether it is unclear."""
    layout = Layout(None, False, False)
    if not is_convolution and partition_dim(param) is None:
        *_, parent, leaf = ["", *occurrence.name.split(".")]
        is_layer = leaf == "weight" and parent
        container = occurrence.parents[0] if is_layer else occurrence.module
        layout = layout_of(container, parent if is_layer else leaf, occurrence.module, param)
    for pattern, sizes in splits.items():
        if re.search(pattern, name):
            layout = Layout(as_split_sizes(sizes), layout.is_transposed, False)
            break
    options = {
        "split_sizes": layout.split_sizes,
        "transposed": layout.is_transposed,
        "flatten": is_convolution,
    }
    # Other keys are not stored in checkpoints.
    kept = {
        key: value for key, value in options.items() if value is not None and value is not False
    }
    return kept, layout.is_unclear


def parameter_groups(
    model: torch.nn.Module,
    *,
    elementwise_names: Sequence[str] = ELEMENTWISE_NAMES,
    elementwise: str = "adamw",
    elementwise_options: Mapping[str, Any] | None = None,
    flatten: bool = False,
    splits: Mapping[str, SplitSizes] | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups of a model's trainable parameters for ``MuonAdamW``.

    Muon gets the weights of linear layers, other 2-D weights of modules that keep them, and batches
    of experts. The other algorithm gets vectors, embeddings and parameters shared with them, heads,
    routers, tensors with a side of 1, and all others (docs/fsdp2.md). ``use_muon`` of a
    parameter, or of its module, decides first; ``fully_shard`` makes new parameters,
    without attributes. Rank 0 logs the choice, a line a kind, and unclear parameters by name.

    Args:
        model: The model, sharded or not yet.
        elementwise_names: Regular expressions; parameters with a matching name are stepped element
            by element. The default, ``ELEMENTWISE_NAMES`` of ``megatron_muon.fsdp2.groups``,
            has embeddings, LoRA's adapters, routers, heads, output layers, norms and biases.
            Without it, heads and routers are matrices unless a pattern matches.
        elementwise: Algorithm of these, ``adamw`` or ``lion``.
        elementwise_options: Other keys of their groups, such as ``lr``.
        flatten: Whether Muon gets convolutions too, as matrices of output channels.
        splits: The ``split_sizes`` of matrices by regular expression of names; None keeps them
            whole. Other fused matrices are split if their module states the sizes.

    Returns:
        Groups with ``params``, ``param_names`` and ``algorithm``, Muon's first. Elementwise
        parameters have one group per mesh: torch steps one mesh at a time.

    Raises:
        ValueError: The model has no trainable parameter, or a pattern of the user's finds none.
    """
    choices = choose(
        model,
        elementwise_names=elementwise_names,
        elementwise=elementwise,
        flatten=flatten,
        splits=splits,
    )
    return as_groups(choices, elementwise_options)


def as_groups(
    choices: Iterable[Choice], elementwise_options: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Return the groups of parameters; see ``parameter_groups()``."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for choice in choices:
        is_muon = choice.algorithm == "muon"
        mesh = None if is_muon else getattr(choice.param, "device_mesh", None)
        options = choice.layout if is_muon else elementwise_options or {}
        group = groups.setdefault(
            (choice.algorithm, mesh, *choice.layout.items()),
            {"params": [], "param_names": [], "algorithm": choice.algorithm, **options},
        )
        group["params"].append(choice.param)
        group["param_names"].append(choice.name)
    # Muon's first, as a checkpoint of Muon and AdamW, two optimizers, most often has them.
    return sorted(groups.values(), key=lambda group: group["algorithm"] != "muon")


def _splits_of(choice: Choice) -> str:
    """Return the form of splits for a fused matrix."""
    *_, leaf = without_wrappers(choice.name).removesuffix(".weight").split(".")
    half = choice.param.shape[-1 if choice.layout.get("transposed") else -2] // 2
    sizes = (half, half // 2, half // 2) if "q" in leaf and "v" in leaf else (half, half)
    return f', or the outputs of its parts, as splits={{r"\\b{leaf}\\b": {sizes}}}'


def refuse_to_guess(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ValueError for parameters whose names and shapes are not those of matrices."""
    for group in groups:
        names = group.get("param_names") or [None] * len(group["params"])
        for name, param in zip(names, group["params"], strict=True):
            kind = name_against([name], ELEMENTWISE_NAMES) if name else "no name"
            if param.ndim not in (2, 3) and not group.get("flatten"):
                kind = f"shape {tuple(param.shape)}"
            if kind:
                raise ValueError(
                    f"{name or 'params'}: expected matrices with names, or groups with algorithm, "
                    f"got {kind}. Write MuonAdamW.from_model(model, ...), or where a configuration "
                    "names the optimizer megatron_muon.fsdp2.from_parameters"
                )


def _log(choices: Sequence[Choice]) -> None:
    """Log a line per kind of choice, and the names of unclear parameters."""
    if own_rank() != 0:
        return
    kinds: dict[str, list[Choice]] = defaultdict(list)
    for choice in sorted(choices, key=lambda choice: choice.algorithm != "muon"):
        kinds[choice.kind].append(choice)
    lines = []
    for kind, members in kinds.items():
        num_elements = sum(choice.param.numel() for choice in members)
        # Layers that differ in their number alone have one name.
        names = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", c.name) for c in members))
        lines.append(f"{kind}: {len(members)} parameters, {num_elements:,} elements: {names}")
        if members[0].is_unclear:
            logger.warning(
                "%s: unclear whether they are matrices of their own, so %s. To choose otherwise, "
                "set use_muon on a parameter or its module, or pass elementwise_names%s",
                names,
                kind,
                _splits_of(members[0]) * (members[0].algorithm == "muon"),
            )
    logger.warning("optimizers by parameter:\n  %s", "\n  ".join(lines))
