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

# By what they find, searched in names without wrappers: the module's own name, or its parent's.
_BY_NAME = {
    "embedding": r"embed[^.]*(\.[^.]+)?$|(^|\.)w[tp]e\.[^.]+$",
    # At the rates of LoRA, of 1e-3 and less, AdamW adapts faster (docs/fsdp2.md).
    "adapter": r"(^|\.)lora_",
    "router": r"router(\.[^.]+)?\.[^.]+$",
    # Of several layers where it is no part of a block, in which attention has heads.
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
        name: Its first name in the model.
        param: The parameter.
        algorithm: Of its group.
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
    """One of the places in which a model has a parameter.

    Args:
        name: Name of the parameter there, without wrappers.
        module: Module that has the parameter.
        parents: Modules that contain that one, the innermost first.
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
        *_, above, own, _ = ["", "", *self.name.split(".")]
        beside = self.parents[:1] if own == "gate" else self.parents[1:2] if above == "gate" else ()
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
    """Return where a model has each parameter: shared ones are in several places."""
    # What a wrapper contains comes after it.
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

    A head is a layer outside of blocks with as many outputs as an embedding has rows, which no
    later layer takes.
    """
    # Positions are fewer than tokens, and often as many as a layer has outputs.
    vocabularies = {
        param.shape[0]
        for param, of_param in places.items()
        for each in of_param
        if param.ndim and each.is_embedding and not re.search(r"pos|wpe", each.name)
    }
    reasons = {}
    inputs_of_later: set[int] = set()
    for param, of_param in reversed([*places.items()]):
        for each in reversed(of_param):
            if each.is_linear and param.ndim == 2 and not _IN_BLOCK.search(each.name):
                outputs, inputs = param.shape
                if outputs in vocabularies and outputs not in {inputs, *inputs_of_later}:
                    reasons[param] = "head, with as many outputs as an embedding has rows"
                inputs_of_later.add(inputs)
        if any(each.is_router for each in of_param):
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
    """Choose algorithm and layout of each trainable parameter; see :func:`parameter_groups`."""
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
        of_param = places[param]
        evidence = _evidence(param, of_param)
        against = _evidence_against(name, param, of_param, patterns, flatten)
        against = against or routers_and_heads.get(param)
        asked = [getattr(each, "use_muon", None) for each in (param, *(p.module for p in of_param))]
        if False in asked:
            evidence, against = None, "use_muon is False"
        elif True in asked:
            evidence, against = "use_muon is True", None
        if evidence and not against:
            choices.append(_of_muon(name, param, evidence, of_param[0], splits))
            continue
        # A linear layer whose name says that it is an embedding.
        is_unclear = against == "embedding" and all(each.is_linear for each in of_param)
        if not against:
            against, is_unclear = "no linear layer and no experts", True
        choices.append(Choice(name, param, elementwise, against, is_unclear))
    if not choices:
        raise ValueError("model: expected trainable parameters, got none. Set requires_grad")
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    of_muon = [each.name for each in choices if each.algorithm == "muon"]
    for argument, expressions, searched in (
        ("elementwise_names", set(elementwise_names).difference(ELEMENTWISE_NAMES), names),
        ("splits", set(splits), of_muon),
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
    """Return why a parameter is no matrix, or None; patterns of names have their reasons."""
    is_convolution = _is_convolution(param, places[0])
    if is_convolution and not flatten:
        return "convolution"
    if not is_convolution and param.ndim not in (2, 3):
        return "vector" if param.ndim < 2 else f"{param.ndim} dimensions"
    if 1 in (param.shape[:2] if is_convolution else param.shape[-2:]):
        return "a side of 1"
    if any(each.is_embedding for each in places):
        return "embedding"
    names = [name, *(each.name for each in places)]
    for pattern, reason in patterns.items():
        if any(re.search(pattern, each) for each in names):
            return reason
    return None


def _evidence(param: torch.Tensor, places: Sequence[_Place]) -> str | None:
    """Return why a parameter is a matrix or a batch of matrices, or None."""
    if _is_convolution(param, places[0]):
        return "convolution"
    if param.ndim == 3:
        return "experts" if places[0].has_experts else None
    return "linear" if any(each.is_matrix for each in places) else None


def _of_muon(
    name: str,
    param: torch.Tensor,
    reason: str,
    place: _Place,
    splits: Mapping[str, SplitSizes],
) -> Choice:
    """Choose Muon, with sizes that the user gives, or the layout that the module states."""
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
    """Return groups of a model's trainable parameters for :class:`MuonAdamW`.

    Muon gets the weights of linear layers, other 2-D weights of modules that keep them, and batches
    of experts. The other algorithm gets vectors, embeddings and parameters shared with them, heads,
    routers, tensors with a side of 1, and whatever is neither (docs/fsdp2.md). ``use_muon`` of a
    parameter, or of its module, decides before all else; ``fully_shard`` makes new parameters,
    without attributes. Rank 0 logs the choice, a line a kind, and what is unclear by name.

    Args:
        model: The model, sharded or not yet.
        elementwise_names: Regular expressions; a parameter one of whose names one of them finds is
            stepped element by element. Without the default ones, heads and routers are matrices
            unless found.
        elementwise: Algorithm of these, ``adamw`` or ``lion``.
        elementwise_options: Other keys of their groups, such as ``lr``.
        flatten: Whether Muon gets convolutions too, as matrices of output channels.
        splits: By regular expression, the ``split_sizes`` of matrices that it finds; None keeps
            them whole. Otherwise fused matrices are split if their module says the sizes.

    Returns:
        Groups with ``params``, ``param_names`` and ``algorithm``, Muon's first. Parameters of
        several meshes that are stepped element by element are in a group each: torch steps one mesh
        at a time.

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
    for each in choices:
        is_muon = each.algorithm == "muon"
        mesh = None if is_muon else getattr(each.param, "device_mesh", None)
        options: dict[str, Any] = {} if is_muon else dict(elementwise_options)
        if each.split_sizes is not None:
            options["split_sizes"] = each.split_sizes
        options |= {"transposed": True} if each.is_transposed else {}
        options |= {"flatten": True} if each.is_flattened else {}
        group = groups.setdefault(
            (each.algorithm, mesh, each.split_sizes, each.is_transposed, each.is_flattened),
            {"params": [], "param_names": [], "algorithm": each.algorithm, **options},
        )
        group["params"].append(each.param)
        group["param_names"].append(each.name)
    # Muon's first, as a checkpoint of Muon and AdamW, two optimizers, most often has them.
    return sorted(groups.values(), key=lambda group: group["algorithm"] != "muon")


def log(choices: Sequence[Choice]) -> None:
    """Log a line for each kind of choice, and the names of those that are unclear."""
    if own_rank() != 0:
        return
    kinds: dict[str, list[Choice]] = defaultdict(list)
    for each in sorted(choices, key=lambda each: each.algorithm != "muon"):
        kinds[each.kind].append(each)
    lines = []
    for kind, of_kind in kinds.items():
        num_elements = sum(each.param.numel() for each in of_kind)
        names = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", each.name) for each in of_kind))
        lines.append(f"{kind}: {len(of_kind)} parameters, {num_elements:,} elements: {names}")
        if of_kind[0].is_unclear:
            logger.warning(
                "%s: unclear whether they are matrices of their own, so %s. Set use_muon on a "
                "parameter or its module, or pass elementwise_names or splits, to choose otherwise",
                names,
                kind,
            )
    logger.warning("the optimizer of each parameter:\n  %s", "\n  ".join(lines))
