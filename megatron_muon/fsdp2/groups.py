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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd

from megatron_muon.fsdp2.fused import layout_of
from megatron_muon.fsdp2.parameters import partition_dim
from megatron_muon.rows.parameters import SplitSizes

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


@dataclass(frozen=True)
class Choice:
    """Algorithm of a parameter.

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


class _Owner(NamedTuple):
    """One of the places in which a model has a parameter.

    Args:
        name: Name of the parameter there, without wrappers.
        leaf: Its last part.
        shape: Of the parameter.
        module: Module that has the parameter.
        parents: Modules that contain that one, the innermost first.
    """

    name: str
    leaf: str
    shape: tuple[int, ...]
    module: torch.nn.Module
    parents: Sequence[torch.nn.Module]

    @property
    def is_embedding(self) -> bool:
        """Whether the module looks rows up."""
        if isinstance(self.module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            return True
        return "embed" in type(self.module).__name__.lower() and not self.is_linear

    @property
    def is_linear(self) -> bool:
        """Whether the module multiplies by its weight."""
        return isinstance(self.module, torch.nn.Linear)

    @property
    def is_in_block(self) -> bool:
        """Whether the module is a part of one of several numbered modules."""
        return _IN_BLOCK.search(self.name) is not None

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
        *path, own, _ = ["", "", *self.name.split(".")]
        depth = 0 if own == "gate" else 1 if path[-1] == "gate" else None
        is_beside = depth is not None and any(map(_says_experts, self.parents[depth:][:1]))
        return is_beside or "Router" in type(self.module).__name__

    @property
    def is_matrix(self) -> bool:
        """Whether the module multiplies by the parameter, a matrix."""
        # A bare tensor may be anything; weight_norm makes a direction and its length of a weight.
        is_factor = hasattr(self.module, "weight_g") and hasattr(self.module, "weight_v")
        return not is_factor and (self.is_linear or bool(_WEIGHT.fullmatch(self.leaf)))


def _says_experts(module: torch.nn.Module) -> bool:
    names = (type(module).__name__.lower(), *vars(module), *module._modules, *module._parameters)
    return any(name.endswith("experts") for name in names)


def _owners(model: torch.nn.Module) -> dict[int, list[_Owner]]:
    """Return where a model has each parameter: shared ones are in several places."""
    modules = dict(model.named_modules(remove_duplicate=False))
    owners: dict[int, list[_Owner]] = defaultdict(list)
    for name, param in model.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        short = _WRAPPERS.sub("", name)
        parents = []
        parent, depth = path, short.count(".")
        while parent:
            parent = parent.rpartition(".")[0]
            # A wrapper contains nothing but what it wraps.
            above = _WRAPPERS.sub("", parent + ".").count(".") if parent else 0
            if above < depth:
                parents.append(modules[parent])
                depth = above
        owner = _Owner(short, leaf, tuple(param.shape), modules[path], parents)
        owners[id(param)].append(owner)
    return owners


def choose(
    model: torch.nn.Module,
    *,
    elementwise_names: Sequence[str] = ELEMENTWISE_NAMES,
    elementwise: str = "adamw",
    flatten: bool = False,
    splits: Mapping[str, SplitSizes] | None = None,
) -> list[Choice]:
    """Choose the algorithm and layout of each trainable parameter; see :func:`parameter_groups`."""
    owners = _owners(model)
    rule = _Rule(owners, elementwise_names, elementwise, flatten)
    choices = [
        _with_split(rule.choose(name, param), splits or {})
        for name, param in model.named_parameters()
        if param.requires_grad
    ]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    of_muon = [each.name for each in choices if each.algorithm == "muon"]
    for argument, patterns, searched in (
        ("elementwise_names", set(elementwise_names).difference(ELEMENTWISE_NAMES), names),
        ("splits", set(splits or ()), of_muon),
    ):
        unused = [each for each in patterns if not any(re.search(each, name) for name in searched)]
        if unused and choices:
            raise ValueError(
                f"{argument}: expected patterns that find parameters"
                f"{' of Muon' if argument == 'splits' else ''}, got {sorted(unused)}, which find "
                "none. Look at model.named_parameters()"
            )
    if not choices:
        raise ValueError("model: expected trainable parameters, got none. Set requires_grad")
    return choices


class _Rule:
    """Evidence for each parameter of a model; arguments as for :func:`parameter_groups`."""

    def __init__(
        self,
        owners: Mapping[int, Sequence[_Owner]],
        elementwise_names: Sequence[str],
        elementwise: str,
        flatten: bool,
    ) -> None:
        self._owners, self._elementwise, self._flatten = owners, elementwise, flatten
        self._names = {pattern: f"name {pattern}" for pattern in elementwise_names}
        self._names |= {p: k for k, p in _BY_NAME.items() if p in self._names}
        # With patterns of their own, users choose heads and routers.
        self._by_default = self._names.keys() >= set(ELEMENTWISE_NAMES)
        every = [each for of_param in owners.values() for each in of_param if each.shape]
        # Positions are fewer than tokens, and often as many as a layer has outputs.
        self._num_rows = {
            each.shape[0]
            for each in every
            if each.is_embedding and not re.search(r"pos|wpe", each.name)
        }
        self._outside = [
            each
            for each in every
            if each.is_linear and len(each.shape) == 2 and not each.is_in_block
        ]

    def choose(self, name: str, param: torch.Tensor) -> Choice:
        """Choose the algorithm of a parameter."""
        owners = self._owners[id(param)]
        first = owners[0]
        is_convolution = isinstance(first.module, _ConvNd) and param.ndim > 2
        matrix = Choice(name, param, "muon", "linear", is_flattened=is_convolution)
        rest = replace(matrix, algorithm=self._elementwise, is_flattened=False)
        asked = [getattr(each, "use_muon", None) for each in (param, *(o.module for o in owners))]
        if False in asked:
            return replace(rest, reason="use_muon is False")
        sides = param.shape[:2] if is_convolution else param.shape[-2:]
        if True in asked:
            return self._with_layout(replace(matrix, reason="use_muon is True"), first)
        if is_convolution and not self._flatten:
            return replace(rest, reason="convolution")
        if not is_convolution and param.ndim not in (2, 3):
            return replace(rest, reason="vector" if param.ndim < 2 else f"{param.ndim} dimensions")
        if 1 in sides:
            return replace(rest, reason="a side of 1")
        if any(each.is_embedding for each in owners):
            return replace(rest, reason="embedding")
        for pattern, reason in self._names.items():
            if re.search(pattern, name) or any(re.search(pattern, each.name) for each in owners):
                is_unclear = reason == "embedding" and first.is_linear
                return replace(rest, reason=reason, is_unclear=is_unclear)
        if self._by_default and any(each.is_router for each in owners):
            return replace(rest, reason="router")
        if self._by_default and any(self._is_head(each) for each in owners):
            return replace(rest, reason="head, with as many outputs as an embedding has rows")
        if is_convolution:
            return replace(matrix, reason="convolution")
        if param.ndim == 3 and first.has_experts:
            return self._with_layout(replace(matrix, reason="experts"), first)
        if param.ndim == 2 and any(each.is_matrix for each in owners):
            return self._with_layout(matrix, first)
        return replace(rest, reason="no linear layer and no experts", is_unclear=True)

    def _is_head(self, owner: _Owner) -> bool:
        """Return whether a layer has the outputs of a vocabulary, which no later layer takes."""
        if owner not in self._outside or owner.shape[0] not in self._num_rows:
            return False
        outputs, inputs = owner.shape
        later = self._outside[self._outside.index(owner) + 1 :]
        return outputs != inputs and all(each.shape[1] != outputs for each in later)

    def _with_layout(self, choice: Choice, owner: _Owner) -> Choice:
        """Add how a matrix is stored, where its module says it."""
        if choice.is_flattened or partition_dim(choice.param) is not None:
            return choice
        is_weight = owner.leaf == "weight" and owner.parents
        container = owner.parents[0] if is_weight else owner.module
        key = owner.name.split(".")[-2] if is_weight else owner.leaf
        layout = layout_of(container, key, owner.module, choice.param)
        return replace(
            choice,
            split_sizes=layout.split_sizes,
            is_transposed=layout.is_transposed,
            is_unclear=layout.is_unclear,
            reason=choice.reason + ", fused, in one matrix" * layout.is_unclear,
        )


def _with_split(choice: Choice, splits: Mapping[str, SplitSizes]) -> Choice:
    """Take sizes that the user gives."""
    for pattern, sizes in splits.items():
        if choice.algorithm == "muon" and re.search(pattern, choice.name):
            sizes = tuple(sizes) if isinstance(sizes, list) else sizes
            return replace(choice, split_sizes=sizes, is_unclear=False)
    return choice


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
    log_choices(choices)
    return groups_of(choices, elementwise_options or {})


def groups_of(choices: Iterable[Choice], elementwise_options: Mapping[str, Any]) -> list[Any]:
    """Return the groups of parameters; see :func:`parameter_groups`."""
    kinds: dict[tuple[Any, ...], list[Choice]] = defaultdict(list)
    for each in choices:
        is_of_muon = each.algorithm == "muon"
        mesh = each.param.device_mesh if isinstance(each.param, DTensor) else None
        layout = (each.split_sizes, each.is_transposed, each.is_flattened)
        kinds[each.algorithm, layout if is_of_muon else mesh].append(each)
    groups = []
    # Muon's first, as a checkpoint of Muon and AdamW, two optimizers, most often has them.
    for (algorithm, _), of_kind in sorted(kinds.items(), key=lambda item: item[0][0] != "muon"):
        options = dict(elementwise_options)
        if algorithm == "muon":
            first = of_kind[0]
            options = {} if first.split_sizes is None else {"split_sizes": first.split_sizes}
            options |= {"transposed": True} if first.is_transposed else {}
            options |= {"flatten": True} if first.is_flattened else {}
        groups.append(
            {
                "params": [each.param for each in of_kind],
                "param_names": [each.name for each in of_kind],
                "algorithm": algorithm,
                **options,
            }
        )
    return groups


def log_choices(choices: Sequence[Choice]) -> None:
    """Log a line for each kind of choice, and the names of those that are unclear."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    kinds: dict[str, list[Choice]] = defaultdict(list)
    for each in choices:
        kinds[each.kind].append(each)
    lines = []
    for kind, of_kind in sorted(kinds.items(), key=lambda item: item[1][0].algorithm != "muon"):
        num_elements = sum(each.param.numel() for each in of_kind)
        names = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", each.name) for each in of_kind))
        text = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        lines.append(f"{kind}: {len(of_kind)} parameters, {num_elements:,} elements: {text}")
        if of_kind[0].is_unclear:
            logger.warning(
                "%s: unclear whether they are matrices of their own, so %s. Set use_muon on a "
                "parameter or its module, or pass elementwise_names or splits, to choose otherwise",
                ", ".join(names),
                kind,
            )
    logger.warning("the optimizer of each parameter:\n  %s", "\n  ".join(lines))
