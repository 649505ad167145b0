# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Sort the parameters of a model into groups, by evidence that they are matrices.

The first rule that matches decides. A shared parameter has several names and modules: each counts.
docs/fsdp2.md has the reasons::

    use_muon of the parameter or its module         Muon if True, AdamW if False
    convolution                                     AdamW, or Muon with ``flatten``
    complex numbers                                 AdamW
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
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules.conv import _ConvNd

from megatron_muon.fsdp2.fused import Layout, layout_of
from megatron_muon.fsdp2.parameters import (
    Group,
    as_split_sizes,
    partition_dim,
    planned_parameters,
    without_wrappers,
)
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

_NO_EVIDENCE = "no linear layer and no experts"
# Reasons for Muon; any other reason is for the elementwise algorithm.
_MUON_REASONS = ("use_muon is True", "flattened convolution", "experts", "linear")
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
        options: Other keys of its group; of Muon ``split_sizes``, ``transposed`` and ``flatten``.
    """

    name: str
    param: torch.Tensor
    algorithm: str
    reason: str
    is_unclear: bool
    options: Mapping[str, Any]

    @property
    def log_line(self) -> str:
        """Algorithm, other keys and reason, by which the log groups parameters."""
        keys = "".join(f", {key} {value}" for key, value in self.options.items())
        return f"{self.algorithm}{keys}: {self.reason}"


class _Use(NamedTuple):
    """An occurrence of a parameter in a model; shared parameters have several.

    Args:
        name: Name of the parameter, without wrappers.
        module: Module that has the parameter.
        outer: Modules around it, the innermost first, without wrappers.
    """

    name: str
    module: torch.nn.Module
    outer: Sequence[torch.nn.Module]

    @property
    def is_linear(self) -> bool:
        """Whether the module multiplies by its weight."""
        return isinstance(self.module, torch.nn.Linear)

    @property
    def is_embedding(self) -> bool:
        """Whether the module looks rows up."""
        is_named = "embed" in type(self.module).__name__.lower() and not self.is_linear
        return is_named or isinstance(self.module, torch.nn.Embedding | torch.nn.EmbeddingBag)

    @property
    def is_router(self) -> bool:
        """Whether it is a gate beside experts, or a layer of that gate."""
        gates = zip(self.name.split(".")[-2:-4:-1], self.outer, strict=False)
        is_beside = any(name == "gate" and _has_experts(module) for name, module in gates)
        return is_beside or "Router" in type(self.module).__name__

    def is_matrix(self, num_dims: int) -> bool:
        """Whether the module multiplies by the parameter: a matrix, or the matrices of experts."""
        # A bare tensor may be anything.
        is_weight = bool(_WEIGHT.fullmatch(self.name.rpartition(".")[2]))
        if num_dims == 3:
            is_named = "expert" in f"{self.name} {type(self.module).__name__}".lower()
            return is_named or (
                is_weight and any(map(_has_experts, (self.module, *self.outer[:1])))
            )
        # weight_norm makes a direction and its length of a weight.
        return (self.is_linear or is_weight) and not hasattr(self.module, "weight_g")


def _has_experts(module: torch.nn.Module) -> bool:
    names = (type(module).__name__.lower(), *vars(module), *module._modules, *module._parameters)
    return any(name.endswith("experts") for name in names)


def _uses(
    module: torch.nn.Module, prefix: str = "", outer: Sequence[torch.nn.Module] = ()
) -> Iterator[tuple[torch.Tensor, _Use]]:
    """Yield the parameters of a module and of the modules in it, once per name."""
    for leaf, param in module._parameters.items():
        if param is not None:
            yield param, _Use(prefix + leaf, module, outer)
    for key, child in module._modules.items():
        if child is not None:
            inner = without_wrappers(f"{prefix}{key}.")
            # One module per name: wrappers are left out.
            around = (module, *outer)[-inner.count(".") :] if inner else ()
            yield from _uses(child, inner, around)


def _heads(uses_by_param: Mapping[torch.Tensor, Sequence[_Use]]) -> set[torch.Tensor]:
    """Return the layers outside of blocks with as many outputs as an embedding has rows.

    A layer is no head if a later one has as many inputs as it has outputs.
    """
    # Without position embeddings: their number of rows is often that of a layer's outputs.
    vocabularies = {
        param.shape[0]
        for param, uses in uses_by_param.items()
        if param.ndim and any(u.is_embedding and not re.search("pos|wpe", u.name) for u in uses)
    }
    heads: set[torch.Tensor] = set()
    later_inputs: set[int] = set()
    for param, uses in reversed([*uses_by_param.items()]):
        if param.ndim == 2 and any(u.is_linear and not _IN_BLOCK.search(u.name) for u in uses):
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
    elementwise_options: Mapping[str, Any] | None = None,
    flatten: bool = False,
    splits: Mapping[str, SplitSizes] | None = None,
) -> list[Choice]:
    """Choose algorithm and layout of trainable parameters; see ``MuonAdamW.from_model()``."""
    splits = splits or {}
    other = elementwise, elementwise_options or {}
    uses: dict[torch.Tensor, list[_Use]] = defaultdict(list)
    for param, use in _uses(model):
        uses[param].append(use)
    # With patterns of their own, users choose heads and routers.
    heads = _heads(uses) if {*elementwise_names}.issuperset(_KINDS) else None
    choices = [
        _choice(name, param, uses[param], heads, elementwise_names, other, flatten, splits)
        for name, param in model.named_parameters()
        if param.requires_grad
    ]
    if not choices:
        raise ValueError("model: expected trainable parameters, got none. Set requires_grad")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    muon_names = [choice.name for choice in choices if choice.algorithm == "muon"]
    for argument, patterns, searched in (
        ("elementwise_names", {*elementwise_names}.difference(_KINDS), names),
        ("splits", splits, muon_names),
    ):
        if unused := [p for p in patterns if not any(re.search(p, name) for name in searched)]:
            raise ValueError(
                f"{argument}: expected patterns that find some of {searched[:4]} and so on, got "
                f"{sorted(unused)}, which find none. Look at model.named_parameters()"
            )
    _log(choices)
    return choices


def _choice(
    name: str,
    param: torch.Tensor,
    uses: Sequence[_Use],
    heads: Container[torch.Tensor] | None,
    elementwise_names: Sequence[str],
    other: tuple[str, Mapping[str, Any]],
    flatten: bool,
    splits: Mapping[str, SplitSizes],
) -> Choice:
    """Choose by the first rule that matches; ``heads`` is None where users choose heads."""
    modules, num_dims = [use.module for use in uses], param.ndim
    requests = [getattr(owner, "use_muon", None) for owner in (param, *modules)]
    is_convolution = isinstance(modules[0], _ConvNd) and num_dims > 2
    kind = name_against([name, *(use.name for use in uses)], elementwise_names)
    rules = (
        ("use_muon is False", False in requests),
        ("use_muon is True", True in requests),
        ("convolution", is_convolution and not flatten),
        ("complex", param.is_complex()),
        ("vector", num_dims < 2),
        (f"{num_dims} dimensions", num_dims > 3 and not is_convolution),
        ("a side of 1", 1 in (param.shape[:2] if is_convolution else param.shape[-2:])),
        ("embedding", any(use.is_embedding for use in uses)),
        (kind, kind),
        ("router", heads is not None and any(use.is_router for use in uses)),
        ("head, with as many outputs as an embedding has rows", param in (heads or ())),
        ("flattened convolution", is_convolution),
        ("experts" if num_dims == 3 else "linear", any(use.is_matrix(num_dims) for use in uses)),
        (_NO_EVIDENCE, True),
    )
    reason = next(str(reason) for reason, matches in rules if matches)
    if reason not in _MUON_REASONS:
        # A linear layer called embedding is unclear too.
        is_named = reason == "embedding" and all(use.is_linear for use in uses)
        algorithm, options = other
        is_unclear = is_named or reason == _NO_EVIDENCE
        return Choice(name, param, algorithm, reason, is_unclear, options)
    layout = Layout(None, False, False)
    if not is_convolution and partition_dim(param) is None:
        layout = layout_of(uses[0].name, param, modules[0], uses[0].outer)
    requested = [as_split_sizes(splits[pattern]) for pattern in splits if re.search(pattern, name)]
    if requested:
        layout = Layout(requested[0], layout.is_transposed, False)
    layout_keys = {
        "split_sizes": layout.split_sizes,
        "transposed": layout.is_transposed,
        "flatten": is_convolution,
    }
    # Other keys are not stored in checkpoints.
    options = {k: v for k, v in layout_keys.items() if v is not None and v is not False}
    reason += ", fused, in one matrix" * layout.is_unclear
    return Choice(name, param, "muon", reason, layout.is_unclear, options)


def name_against(names: Sequence[str], patterns: Iterable[str]) -> str | None:
    """Return the kind of the first pattern that one of the names matches, or None."""
    found = (p for p in patterns if any(re.search(p, name) for name in names))
    return next((_KINDS.get(pattern, f"name {pattern}") for pattern in found), None)


def parameter_groups(
    model: torch.nn.Module,
    **options: Any,  # noqa: ANN401 - of choose, by name
) -> list[dict[str, Any]]:
    """Return parameter groups of a model's trainable parameters for ``MuonAdamW``.

    Args:
        model: The model, sharded or not yet.
        options: Other arguments of ``MuonAdamW.from_model()`` that choose: ``elementwise_names``,
            ``elementwise``, ``elementwise_options``, ``flatten`` and ``splits``.

    Returns:
        Groups with ``params``, ``param_names`` and ``algorithm``, Muon's first. Elementwise
        parameters have one group per mesh: torch steps one mesh at a time.
    """
    return as_groups(choose(model, **options))


def as_groups(choices: Iterable[Choice]) -> list[dict[str, Any]]:
    """Return the groups of parameters; see ``parameter_groups()``."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, param, algorithm, *_, options in choices:
        mesh = None if algorithm == "muon" else getattr(param, "device_mesh", None)
        group = groups.setdefault(
            (algorithm, mesh, str(options)),
            {"params": [], "param_names": [], "algorithm": algorithm, **options},
        )
        group["params"].append(param)
        group["param_names"].append(name)
    # Muon's first, as a checkpoint of Muon and AdamW, two optimizers, most often has them.
    return sorted(groups.values(), key=lambda group: group["algorithm"] != "muon")


def _splits_advice(choice: Choice) -> str:
    """Return advice to pass ``splits`` for a fused matrix, the end of a sentence."""
    *_, leaf = without_wrappers(choice.name).removesuffix(".weight").split(".")
    return f', or the outputs of its parts, as splits={{r"\\b{leaf}\\b": (outputs, outputs)}}'


def refuse_to_guess(groups: Sequence[Group]) -> None:
    """Raise a ValueError for parameters that may be no matrices by name or shape."""
    for group in groups:
        for parameter in planned_parameters([group]):
            kind = name_against([parameter.name], ELEMENTWISE_NAMES)
            if parameter.param.ndim not in (2, 3) and not parameter.flattens:
                kind = f"shape {tuple(parameter.param.shape)}"
            if not group.get("param_names"):
                kind = "no name"
            if kind:
                raise ValueError(
                    f"{parameter.name}: expected matrices with names, or groups with algorithm, "
                    f"got {kind}. Write MuonAdamW.from_model(model, ...), or where a "
                    "configuration names the optimizer megatron_muon.fsdp2.from_parameters"
                )


def _log(choices: Sequence[Choice]) -> None:
    """Log a line per kind of choice, and the names of unclear parameters."""
    if own_rank() != 0:
        return
    kinds: dict[str, list[Choice]] = defaultdict(list)
    for choice in sorted(choices, key=lambda choice: choice.algorithm != "muon"):
        kinds[choice.log_line].append(choice)
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
                _splits_advice(members[0]) * (members[0].algorithm == "muon"),
            )
    logger.warning("optimizers by parameter:\n  %s", "\n  ".join(lines))
