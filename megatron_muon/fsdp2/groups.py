# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Sort the parameters of a model into groups, by evidence that they are matrices.

Muon gets weights of modules that multiply by them, and batches of experts. docs/fsdp2.md has the
rule as a table.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules.conv import _ConvNd

from megatron_muon.fsdp2.fused import Layout, layout_of
from megatron_muon.fsdp2.parameters import partition_dim
from megatron_muon.rows.parameters import SplitSizes
from megatron_muon.runtime.agreement import own_rank

logger = logging.getLogger(__name__)

# Regular expressions by kind, searched in names without wrappers: of the module or its parent.
_BY_NAME = {
    "embedding": r"embed[^.]*(\.[^.]+)?$|(^|\.)w[tp]e\.[^.]+$",
    # At the rates of LoRA, of 1e-3 and less, AdamW adapts faster (docs/fsdp2.md).
    "adapter": r"(^|\.)lora_",
    "router": r"router(\.[^.]+)?\.[^.]+$",
    # Of several layers outside of blocks, where attention has heads.
    "head": r"(^|\.)(\w+_)?(heads?|logits|score|classifier|qa_outputs|seq_relationship|bbox_pred)"
    r"\.weight$|^(?!.*\.\d+\.[^.]+\.)(.*\.)?(\w+_)?(heads?|logits|score|classifier)\.\w+\.weight$",
    # Blocks have such layers too.
    "output layer": r"^(?!.*(\.\d+\.[^.]+\.|att|mlp|ffn|feed)).*?"
    r"(^|\.)(output|output_layer|out_embed|proj_out|fc_out|final_layer|unembed)\.[^.]+$",
    "norm": r"norm[^.]*\.[^.]+$|(^|\.)ln_[^.]*\.[^.]+$",
    "bias": r"bias[^.]*$",
}
# Regular expressions for embeddings, adapters, heads, norms, biases and routers.
ELEMENTWISE_NAMES = tuple(_BY_NAME.values())

# Of torch.compile, DDP, FSDP1, activation checkpointing and LoRA.
_WRAPPERS = re.compile(
    r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module|base_layer|"
    r"original_module|modules_to_save\.\w+)\."
)
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
        split_sizes: See :class:`~megatron_muon.fsdp2.muon.Muon`.
        is_transposed: Whether matrices are stored as (inputs, outputs).
        is_flattened: Whether a convolution is a matrix of output channels.
    """

    name: str
    param: torch.Tensor
    algorithm: str
    reason: str
    is_unclear: bool = False
    split_sizes: SplitSizes = None
    is_transposed: bool = False
    is_flattened: bool = False

    @property
    def kind(self) -> str:
        """Algorithm, layout and reason, as a line of the log."""
        layout = "" if self.split_sizes is None else f", split {self.split_sizes}"
        return f"{self.algorithm}{layout}{', transposed' * self.is_transposed}: {self.reason}"


class _Place(NamedTuple):
    """A place of a parameter in a model.

    Args:
        name: Name of the parameter there, without wrappers.
        module: Module that has the parameter.
        parents: Modules around it, the innermost first.
    """

    name: str
    module: torch.nn.Module
    parents: Sequence[torch.nn.Module]

    @property
    def leaf(self) -> str:
        """Name of the parameter in its module."""
        return self.name.rpartition(".")[2]

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
    def has_experts(self) -> bool:
        """Whether the parameter is a batch of experts, by its name, or its module's attributes."""
        if "expert" in f"{self.name} {type(self.module).__name__}".lower():
            return True
        has_experts = any(map(_says_experts, (self.module, *self.parents[:1])))
        return has_experts and bool(_WEIGHT.fullmatch(self.leaf))

    @property
    def is_router(self) -> bool:
        """Whether it chooses experts: a gate beside them."""
        *_, above, name, _ = ["", "", *self.name.split(".")]
        beside = (
            self.parents[:1] if name == "gate" else self.parents[1:2] if above == "gate" else ()
        )
        return any(map(_says_experts, beside)) or "Router" in type(self.module).__name__

    @property
    def is_matrix(self) -> bool:
        """Whether the module multiplies by the parameter, a matrix."""
        # A bare tensor may be anything; weight_norm makes a direction and its length of a weight.
        is_factor = hasattr(self.module, "weight_g") and hasattr(self.module, "weight_v")
        return not is_factor and (self.is_linear or bool(_WEIGHT.fullmatch(self.leaf)))


def _says_experts(module: torch.nn.Module) -> bool:
    names = (type(module).__name__.lower(), *vars(module), *module._modules, *module._parameters)
    return any(name.endswith("experts") for name in names)


def _is_convolution(param: torch.Tensor, place: _Place) -> bool:
    return isinstance(place.module, _ConvNd) and param.ndim > 2


def _places(model: torch.nn.Module) -> dict[torch.Tensor, list[_Place]]:
    """Return the places of all parameters; shared ones have several."""
    # Modules come after their wrapper.
    modules = {
        _WRAPPERS.sub("", f"{path}.").lstrip("."): module
        for path, module in model.named_modules(remove_duplicate=False)
    }
    places: dict[torch.Tensor, list[_Place]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        short = _WRAPPERS.sub("", name)
        *path, _ = short.split(".")
        parents = [
            modules["".join(f"{part}." for part in path[:depth])]
            for depth in reversed(range(len(path)))
        ]
        places[param].append(_Place(short, model.get_submodule(name.rpartition(".")[0]), parents))
    return places


def _routers_and_heads(places: Mapping[torch.Tensor, Sequence[_Place]]) -> dict[torch.Tensor, str]:
    """Return the parameters that choose experts or tokens, with the evidence.

    A head is a layer outside of blocks with as many outputs as rows of an embedding, and no later
    layer takes them.
    """
    # Positions are fewer than tokens, and often as many as a layer has outputs.
    vocabularies = {
        param.shape[0]
        for param, its_places in places.items()
        for place in its_places
        if param.ndim and place.is_embedding and not re.search(r"pos|wpe", place.name)
    }
    reasons = {}
    inputs_of_later: set[int] = set()
    for param, its_places in reversed([*places.items()]):
        for place in reversed(its_places):
            if place.is_linear and param.ndim == 2 and not _IN_BLOCK.search(place.name):
                outputs, inputs = param.shape
                if outputs in vocabularies and outputs not in {inputs, *inputs_of_later}:
                    reasons[param] = "head, with as many outputs as an embedding has rows"
                inputs_of_later.add(inputs)
        if any(place.is_router for place in its_places):
            reasons[param] = "router"
    return reasons


def choose(
    model: torch.nn.Module,
    *,
    elementwise_names: Sequence[str] = ELEMENTWISE_NAMES,
    elementwise: str = "adamw",
    flatten: bool = False,
    splits: Mapping[str, SplitSizes] | None = None,
) -> list[Choice]:
    """Choose algorithm and layout of all trainable parameters; see :func:`parameter_groups`."""
    places, splits = _places(model), splits or {}
    patterns = {pattern: f"name {pattern}" for pattern in elementwise_names}
    patterns |= {pattern: kind for kind, pattern in _BY_NAME.items() if pattern in patterns}
    # With patterns of their own, users choose heads and routers.
    has_defaults = patterns.keys() >= set(ELEMENTWISE_NAMES)
    routers_and_heads = _routers_and_heads(places) if has_defaults else {}
    choices = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        its_places = places[param]
        evidence = _evidence(param, its_places)
        against = _evidence_against(name, param, its_places, patterns, flatten)
        against = against or routers_and_heads.get(param)
        requests = [
            getattr(owner, "use_muon", None)
            for owner in (param, *(place.module for place in its_places))
        ]
        if False in requests:
            evidence, against = None, "use_muon is False"
        elif True in requests:
            evidence, against = "use_muon is True", None
        if evidence and not against:
            choices.append(_choose_muon(name, param, evidence, its_places[0], splits))
            continue
        # A linear layer called embedding.
        is_unclear = against == "embedding" and all(place.is_linear for place in its_places)
        if not against:
            against, is_unclear = "no linear layer and no experts", True
        choices.append(Choice(name, param, elementwise, against, is_unclear))
    if not choices:
        raise ValueError("model: expected trainable parameters, got none. Set requires_grad")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    muon_names = [choice.name for choice in choices if choice.algorithm == "muon"]
    for argument, expressions, searched in (
        ("elementwise_names", set(elementwise_names).difference(ELEMENTWISE_NAMES), names),
        ("splits", set(splits), muon_names),
    ):
        unused = [e for e in expressions if not any(re.search(e, name) for name in searched)]
        if unused:
            raise ValueError(
                f"{argument}: expected patterns that find parameters"
                f"{' of Muon' if argument == 'splits' else ''}, got {sorted(unused)}, which find "
                "none. Look at model.named_parameters()"
            )
    return choices


def _evidence_against(
    name: str,
    param: torch.Tensor,
    places: Sequence[_Place],
    patterns: Mapping[str, str],
    flatten: bool,
) -> str | None:
    """Return the reason that a parameter is no matrix, or None."""
    is_convolution = _is_convolution(param, places[0])
    if is_convolution and not flatten:
        return "convolution"
    if not is_convolution and param.ndim not in (2, 3):
        return "vector" if param.ndim < 2 else f"{param.ndim} dimensions"
    if 1 in (param.shape[:2] if is_convolution else param.shape[-2:]):
        return "a side of 1"
    if any(place.is_embedding for place in places):
        return "embedding"
    names = [name, *(place.name for place in places)]
    for pattern, reason in patterns.items():
        if any(re.search(pattern, name) for name in names):
            return reason
    return None


def _evidence(param: torch.Tensor, places: Sequence[_Place]) -> str | None:
    """Return the reason that a parameter is a matrix or a batch of matrices, or None."""
    if _is_convolution(param, places[0]):
        return "convolution"
    if param.ndim == 3:
        return "experts" if places[0].has_experts else None
    return "linear" if any(place.is_matrix for place in places) else None


def _choose_muon(
    name: str,
    param: torch.Tensor,
    reason: str,
    place: _Place,
    splits: Mapping[str, SplitSizes],
) -> Choice:
    """Choose Muon, with the user's sizes or the layout of the module."""
    layout = Layout(None, False, False)
    is_convolution = _is_convolution(param, place)
    if not is_convolution and partition_dim(param) is None:
        is_weight = place.leaf == "weight" and place.parents
        container = place.parents[0] if is_weight else place.module
        key = place.name.split(".")[-2] if is_weight else place.leaf
        layout = layout_of(container, key, place.module, param)
    for pattern, sizes in splits.items():
        if re.search(pattern, name):
            sizes = tuple(sizes) if isinstance(sizes, list) else sizes
            layout = Layout(sizes, layout.is_transposed, False)
            break
    reason += ", fused, in one matrix" * layout.is_unclear
    sizes, is_transposed, is_unclear = layout
    return Choice(name, param, "muon", reason, is_unclear, sizes, is_transposed, is_convolution)


def parameter_groups(
    model: torch.nn.Module,
    *,
    elementwise_names: Sequence[str] = ELEMENTWISE_NAMES,
    elementwise: str = "adamw",
    elementwise_options: Mapping[str, Any] | None = None,
    flatten: bool = False,
    splits: Mapping[str, SplitSizes] | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups of a model's trainable parameters for :class:`MuonAdamW`.

    Muon gets the weights of linear layers, other 2-D weights of modules that keep them, and batches
    of experts. The other algorithm gets vectors, embeddings and parameters shared with them, heads,
    routers, tensors with a side of 1, and all others (docs/fsdp2.md). ``use_muon`` of a
    parameter, or of its module, decides first; ``fully_shard`` makes new parameters,
    without attributes. Rank 0 logs the choice, a line a kind, and unclear parameters by name.

    Args:
        model: The model, sharded or not yet.
        elementwise_names: Regular expressions; parameters with a matching name are stepped element
            by element. Without the default ones, heads and routers are matrices unless a pattern
            matches.
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
    log(choices)
    return groups_of(choices, elementwise_options or {})


def groups_of(choices: Iterable[Choice], elementwise_options: Mapping[str, Any]) -> list[Any]:
    """Return the groups of parameters; see :func:`parameter_groups`."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for choice in choices:
        is_muon = choice.algorithm == "muon"
        mesh = None if is_muon else getattr(choice.param, "device_mesh", None)
        options: dict[str, Any] = {} if is_muon else dict(elementwise_options)
        if choice.split_sizes is not None:
            options["split_sizes"] = choice.split_sizes
        options |= {"transposed": True} if choice.is_transposed else {}
        options |= {"flatten": True} if choice.is_flattened else {}
        group = groups.setdefault(
            (choice.algorithm, mesh, choice.split_sizes, choice.is_transposed, choice.is_flattened),
            {"params": [], "param_names": [], "algorithm": choice.algorithm, **options},
        )
        group["params"].append(choice.param)
        group["param_names"].append(choice.name)
    # Muon's first, as a checkpoint of Muon and AdamW, two optimizers, most often has them.
    return sorted(groups.values(), key=lambda group: group["algorithm"] != "muon")


def log(choices: Sequence[Choice]) -> None:
    """Log a line per kind of choice, and the names of unclear parameters."""
    if own_rank() != 0:
        return
    kinds: dict[str, list[Choice]] = defaultdict(list)
    for choice in sorted(choices, key=lambda choice: choice.algorithm != "muon"):
        kinds[choice.kind].append(choice)
    lines = []
    for kind, members in kinds.items():
        num_elements = sum(choice.param.numel() for choice in members)
        names = ", ".join(
            dict.fromkeys(re.sub(r"\.\d+\.", ".*.", choice.name) for choice in members)
        )
        lines.append(f"{kind}: {len(members)} parameters, {num_elements:,} elements: {names}")
        if members[0].is_unclear:
            logger.warning(
                "%s: unclear whether they are matrices of their own, so %s. Set use_muon on a "
                "parameter or its module, or pass elementwise_names or splits, to choose otherwise",
                names,
                kind,
            )
    logger.warning("optimizers by parameter:\n  %s", "\n  ".join(lines))
