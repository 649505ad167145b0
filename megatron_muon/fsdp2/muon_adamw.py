# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One optimizer for all parameters: Muon for matrices, AdamW or Lion for the rest."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch.optim.optimizer import ParamsT

from megatron_muon.fsdp2.groups import ELEMENTWISE_NAMES, as_groups, choose, refuse_to_guess
from megatron_muon.fsdp2.muon import Muon
from megatron_muon.fsdp2.parameters import planned_parameters
from megatron_muon.fsdp2.settings import MOMENTUM, PLANNED
from megatron_muon.rows.parameters import SplitSizes
from megatron_muon.runtime.agreement import own_rank

logger = logging.getLogger(__name__)


class MuonAdamW(Muon):
    """Step matrices with ``Muon``, and other parameters with torch's ``AdamW``, or Lion.

    Drop-in replacement for trainers that accept a single optimizer. It may be built before the
    model is sharded: the exchange of matrices is planned at the first ``step()``, or when a state
    is loaded, by all ranks together; errors of parameters come then. Until the first step,
    parameters may be replaced in their groups, groups added, and the optimizer copied and pickled.

    AdamW's step runs while the first rows of matrices are in transit.

    Args:
        params: Parameters, pairs of name and parameter, or groups of either. A group may have
            ``algorithm``: ``muon``, the default beside groups that have one, with the keys of
            ``Muon``; ``adamw``, with the keys of ``torch.optim.AdamW``; ``lion``, with ``betas``.
            It moves to ``algorithms``: groups then equal the groups of ``Muon`` and AdamW, so that
            states of the two separate optimizers load. If no group has one, parameters are matrices
            with names, for Muon.
        lr: Learning rate, also of AdamW's groups that have none.
        momentum: Weight of Muon's momentum.
        weight_decay: Coefficient, also of AdamW's groups that have none.
        scale_mode: Scale of Muon's updates by shape. ``match_adamw`` gives them the size of AdamW's
            updates, so that one learning rate fits both; ``Muon`` lists the others.
        nesterov: Whether Muon averages the gradient into the momentum once more.
        betas: Decay rates of the averages of AdamW and Lion.
        eps: Term that AdamW adds to its divisor.
        foreach: Whether AdamW updates lists of tensors at once; None lets torch choose.
        fused: Whether AdamW updates in fused kernels; None lets torch choose.
        muon_options: Other arguments of ``Muon``, among them ``exchange`` and, for plain tensors,
            ``process_group`` and ``tensor_group``.

    Attributes:
        algorithms: Algorithms by parameter group.
        muon: The step of matrices; None before their exchange is planned.
        fresh_if_moved: As in ``Muon``.

    Raises:
        TypeError: An unknown argument, or a list that ``Muon`` would not take.
        ValueError: An unknown algorithm, parameters without algorithm that may be no matrices, a
            key that no step reads, a parameter twice, or an argument that AdamW refuses.

    Communication: none at construction. Steps as ``Muon``; the first step or load also as its
        construction. AdamW and Lion communicate nothing.
    Memory: as ``Muon`` for its parameters; two tensors per parameter for AdamW, one for Lion.
    """

    _is_lazy = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = MOMENTUM,
        weight_decay: float = 0.01,
        *,
        nesterov: bool = True,
        scale_mode: str = "match_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        foreach: bool | None = None,
        fused: bool | None = None,
        **muon_options: Any,  # noqa: ANN401 - of Muon, by name
    ) -> None:
        self._options = {"nesterov": nesterov, "scale_mode": scale_mode, **muon_options}
        self._inner: dict[str, torch.optim.Optimizer] = {}
        self._reasons: dict[str, str] = {}
        listed = list(params)
        is_chosen = any(isinstance(item, dict) and "algorithm" in item for item in listed)
        common = {"lr": lr, "weight_decay": weight_decay}
        # On every rank alone: there may be no process group yet. All ranks have the same arguments.
        self._set_groups(
            listed,
            {
                "muon": {**common, "momentum": momentum},
                "adamw": {**common, "betas": betas, "eps": eps, "foreach": foreach, "fused": fused},
                "lion": {**common, "betas": betas},
            },
        )
        if listed and not is_chosen:
            refuse_to_guess(self.param_groups)
            if own_rank() == 0:
                logger.warning(
                    "MuonAdamW: no group names its algorithm, so Muon steps all parameters, "
                    "embeddings and heads too. MuonAdamW.from_model() chooses by module and name."
                )

    @classmethod
    def from_model(
        cls,
        model: torch.nn.Module,
        lr: float = 3e-4,
        *,
        elementwise_names: Sequence[str] = ELEMENTWISE_NAMES,
        elementwise: str = "adamw",
        elementwise_options: Mapping[str, Any] | None = None,
        flatten: bool = False,
        splits: Mapping[str, SplitSizes] | None = None,
        **options: Any,  # noqa: ANN401 - of __init__, by name
    ) -> Self:
        """Build it for a model.

        Muon gets the weights of linear layers, other 2-D weights of modules that keep them, and
        batches of experts. The other algorithm gets vectors, embeddings and parameters shared with
        them, heads, routers, tensors with a side of 1, and all others (docs/fsdp2.md).
        ``use_muon`` of a parameter, or of its module, decides first; ``fully_shard`` makes new
        parameters, without attributes. Rank 0 logs the choice, and unclear parameters by name.

        Args:
            model: The model, sharded or not yet.
            lr: Learning rate.
            elementwise_names: Regular expressions; parameters with a matching name are stepped
                element by element. The default, ``ELEMENTWISE_NAMES`` of
                ``megatron_muon.fsdp2.groups``, has embeddings, LoRA's adapters, routers, heads,
                output layers, norms and biases. Without it, heads and routers are matrices unless a
                pattern matches.
            elementwise: Algorithm of these, ``adamw`` or ``lion``.
            elementwise_options: Other keys of their groups, such as ``lr`` and ``betas``.
            flatten: Whether Muon gets convolutions too, as matrices of output channels.
            splits: The ``split_sizes`` of matrices by regular expression of names, such as
                ``{"wqkv": (64, 32, 32)}``; None keeps them whole. Other fused matrices are split if
                their module states the sizes.
            options: Other arguments of the class.

        Raises:
            ValueError: The model has no trainable parameter, or a pattern of the user's finds none.
        """
        choices = choose(
            model,
            elementwise_names=elementwise_names,
            elementwise=elementwise,
            elementwise_options=elementwise_options,
            flatten=flatten,
            splits=splits,
        )
        optimizer = cls(as_groups(choices), lr, **options)
        optimizer._reasons = {choice.name: choice.reason for choice in choices}
        return optimizer

    def summary(self) -> str:
        """Return one line per parameter: name, shape, algorithm, layout, and the reason."""
        lines = []
        names = {p.param: p.name for p in planned_parameters(self.param_groups)}
        for algorithm, group in zip(self.algorithms, self.param_groups, strict=True):
            layout = [f"{key} {group[key]}" for key in PLANNED if group.get(key)]
            for param in group["params"]:
                reason = self._reasons.get(name := names[param], "given")
                lines.append("  ".join([name, f"{(*param.shape,)}", algorithm, *layout, reason]))
        return "\n".join(lines)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, until the first step or load of a state; see ``Muon.add_param_group()``."""
        super().add_param_group(param_group)
        if (algorithm := self.algorithms[-1]) != "muon":
            # Defaults of matrices, and momentum, which is there for schedules: see _others().
            for key in self.defaults.keys() - self._defaults[algorithm].keys():
                del param_group[key]
            # The optimizer of the algorithm checks values, and adds its other keys.
            self._inner.pop(algorithm, None)
            self._others()

    def _others(self) -> list[torch.optim.Optimizer]:
        for algorithm in ("adamw", "lion"):
            groups = self._groups(algorithm)
            if not groups:
                continue
            if algorithm not in self._inner:
                optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW
                if algorithm == "lion":
                    # Its import loads torch's compiler: seconds and memory for few users.
                    from megatron_muon.step.lion import FSDPLion

                    optimizer_class = FSDPLion
                # Its constructor checks arguments, but no keys of groups: both are passed.
                self._inner[algorithm] = optimizer_class(groups, **self._defaults[algorithm])
            for group in groups:
                # OneCycleLR and CyclicLR set it in all groups, as it is in the defaults.
                if "momentum" in group:
                    group["betas"] = (group["momentum"], *group["betas"][1:])
            optimizer = self._inner[algorithm]
            # The same dictionaries: schedulers change their values, and loading replaces them.
            optimizer.param_groups, optimizer.state = groups, self.state
        return [*self._inner.values()]

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of copies and pickles, until the exchange is planned."""
        return {**super().__getstate__(), "_reasons": self._reasons, "_inner": {}}
