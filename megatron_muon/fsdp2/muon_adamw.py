# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One optimizer for all parameters: Muon for matrices, AdamW or Lion for the rest."""

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch.optim.optimizer import ParamsT

from megatron_muon.fsdp2.gradients import refuse_grad_scaler
from megatron_muon.fsdp2.groups import ELEMENTWISE_NAMES, as_groups, choose, refuse_to_guess
from megatron_muon.fsdp2.loading import (
    ADVICE,
    arrange_state,
    call_post_hooks,
    call_pre_hooks,
    check_elementwise_state,
)
from megatron_muon.fsdp2.muon import Muon
from megatron_muon.fsdp2.parameters import planned_parameters
from megatron_muon.fsdp2.settings import (
    PLANNED,
    MuonArguments,
    group_problems,
    key_problems,
)
from megatron_muon.rows.parameters import SplitSizes
from megatron_muon.runtime.agreement import first_line, gather_objects, own_rank
from megatron_muon.runtime.plan_runner import profiler_range
from megatron_muon.step.elementwise import (
    elementwise_bytes,
    state_of_empty_shards,
    step_without_hooks,
)

logger = logging.getLogger(__name__)

_ALGORITHMS = ("muon", "adamw", "lion")
_CHANGED = (
    "param_groups: expected the parameters of the first step, got others. Build a new optimizer"
)


class MuonAdamW(torch.optim.Optimizer):
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
        muon: The optimizer of matrices; None before their exchange is planned.
        fresh_if_moved: Whether a state is loaded that lacks parameters, which then start afresh.

    Raises:
        TypeError: An unknown argument, or a list that ``Muon`` would not take.
        ValueError: An unknown algorithm, parameters without algorithm that may be no matrices, a
            key that no step reads, a parameter twice, or an argument that AdamW refuses.

    Communication: none at construction. Steps as ``Muon``; the first step or load also as its
        construction. AdamW and Lion communicate nothing.
    Memory: as ``Muon`` for its parameters; two tensors per parameter for AdamW, one for Lion.
    """

    # torch.amp.GradScaler then always calls step(), which refuses it.
    _step_supports_amp_scaling = True
    fresh_if_moved: bool = False
    algorithms: tuple[str, ...] = ()
    muon: Muon | None = None
    # Parameters of the plan.
    _planned: Sequence[int] = ()
    # Whether there is state of Muon: from the first step on.
    _has_stepped: bool = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = 0.95,
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
        arguments = MuonArguments(**self._options)
        self._settings = {**vars(arguments), "algorithm": "muon"}
        # On every rank alone: there may be no process group yet. All ranks have the same arguments.
        arguments.check()
        listed = list(params)
        is_chosen = any(isinstance(item, dict) and "algorithm" in item for item in listed)
        common = {"lr": lr, "weight_decay": weight_decay}
        self._defaults: dict[str, dict[str, Any]] = {
            "muon": {**common, "momentum": momentum},
            "adamw": {**common, "betas": betas, "eps": eps, "foreach": foreach, "fused": fused},
            "lion": {**common, "betas": betas},
        }
        self._inner: dict[str, torch.optim.Optimizer] = {}
        self._reasons: dict[str, str] = {}
        # torch refuses an empty list, as of a pipeline stage.
        super().__init__(listed or [{"params": []}], common | {"momentum": momentum})  # type: ignore[arg-type]
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

    def __repr__(self) -> str:
        """Return the groups with their algorithms."""
        text = super().__repr__()
        for number, algorithm in enumerate(self.algorithms):
            text = text.replace(f"Group {number}\n", f"Group {number}: {algorithm}\n", 1)
        return text

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
        """Add a group, until the first step.

        Raises:
            RuntimeError: The exchange of matrices has been planned.
            ValueError: The algorithm is unknown.
        """
        if self.muon is not None:
            raise RuntimeError(
                "add_param_group: expected all parameters before the first step, which plans their "
                "exchange, got more. Build a new optimizer with all of them."
            )
        algorithm = param_group.pop("algorithm", "muon")
        if algorithm not in _ALGORITHMS:
            raise ValueError(
                f"algorithm: expected one of {_ALGORITHMS}, got {algorithm!r}. Choose one"
            )
        for key, value in self._defaults[algorithm].items():
            param_group.setdefault(key, value)
        if problems := key_problems(param_group, algorithm, self._settings, is_new=True):
            raise ValueError("; ".join(problems))
        super().add_param_group(param_group)
        if algorithm != "muon":
            # A default that is there for schedules, see _elementwise().
            del param_group["momentum"]
        self.algorithms += (algorithm,)
        # The optimizer of the algorithm checks values, and adds its other keys.
        self._inner.pop(algorithm, None)
        self._elementwise(algorithm)

    def _groups(self, algorithm: str) -> list[dict[str, Any]]:
        pairs = zip(self.algorithms, self.param_groups, strict=True)
        return [group for name, group in pairs if name == algorithm]

    def _elementwise(self, algorithm: str) -> torch.optim.Optimizer | None:
        """Return the optimizer of an algorithm over its groups, with this one's state."""
        groups = self._groups(algorithm)
        if not groups or algorithm == "muon":
            return None
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
        return optimizer

    def _plan(self) -> Muon:
        """Plan the exchange of matrices once; called by all ranks together."""
        if self.muon is None:
            others = self._groups("adamw") + self._groups("lion")
            self.muon = Muon(self._groups("muon"), others=others, **self._options)
            self._planned = self._ids()
        self.muon.param_groups = self._groups("muon")
        if self._has_stepped:
            # Users may have replaced it.
            self.muon.state = self.state
        return self.muon

    def _ids(self) -> list[int]:
        """Identify all parameters; the plan keeps them alive."""
        return [id(param) for group in self.param_groups for param in group["params"]]

    # Private, but its public form imports torch's compiler at once.
    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters by their gradients; called by all ranks together.

        Args:
            closure: Computes the loss and gradients; None if gradients are there.

        Returns:
            The loss of the closure.

        Raises:
            RuntimeError: As ``Muon.step()``, with nothing updated; at the first step also as the
                construction of ``Muon``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_grad_scaler(self)
        if not isinstance(self.state, defaultdict):
            self.state = defaultdict(dict, self.state)
        muon = self._plan()

        def step_others() -> None:
            """Step AdamW's and Lion's parameters."""
            with profiler_range("elementwise"):
                for other in others:
                    with state_of_empty_shards(other):
                        step_without_hooks(other)

        others = [other for name in _ALGORITHMS if (other := self._elementwise(name)) is not None]
        memory = elementwise_bytes(others, muon.muon_step.device)
        problems = group_problems(self.param_groups, self.algorithms, self._settings)
        replaced, fresh = check_elementwise_state(self.algorithms, self.param_groups, self.state)
        problems += replaced + ([] if self._ids() == self._planned else [_CHANGED])
        muon._step_overlapped(step_others, problems, memory, fresh if self._has_stepped else ())
        # Muon's state appears here, with AdamW's: torch's checkpoints step where there is no state.
        if not self._has_stepped:
            self.state.update({param: values for param, values in muon.state.items() if values})
            self._has_stepped = True
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups; state that was removed is fresh, as in the next step.

        Raises:
            RuntimeError: As ``Muon.state_dict()``.
        """
        if self.muon is not None:
            self.muon._agreement.refuse_last()
        if self._has_stepped and self.state:
            self._plan().muon_step.follow_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all groups; called by all ranks together.

        Args:
            state_dict: Of this class, or without state: if no rank has any before the first step,
                only the groups are taken, and nothing is planned.

        Raises:
            RuntimeError: As ``Muon.load_state_dict()``, or as the construction of ``Muon``.

        Communication: a flag over the ranks that step together; at first also two gathers of
            objects over the job, and the construction of ``Muon``.
        """
        state_dict, problems = call_pre_hooks(self, state_dict)
        has_state = bool(problems or state_dict.get("state", True))
        # A rank without parameters and state plans with the others.
        if self.muon is not None or any(gather_objects(has_state)):
            muon = self._plan()
            muon.fresh_if_moved = self.fresh_if_moved
            self._has_stepped = muon._load(self, self.algorithms, state_dict, problems)
            if not self._has_stepped:
                self.state = defaultdict(dict)
        else:
            groups: list[dict[str, Any]] = []
            try:
                _, groups, problems = arrange_state(
                    self.param_groups,
                    self.algorithms,
                    self._settings,
                    state_dict,
                    {},
                    self.fresh_if_moved,
                )
            # Other ranks may have loaded theirs.
            except (KeyError, TypeError, ValueError) as error:
                problems = [first_line(error)]
            if of_all_ranks := dict.fromkeys(itertools.chain(*gather_objects(problems))):
                raise RuntimeError("\n".join([*of_all_ranks, ADVICE]))
            self.param_groups = groups
        call_post_hooks(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of copies and pickles, until the exchange is planned."""
        if self.muon is not None:
            raise TypeError(
                "MuonAdamW: expected no copy after the first step, which makes process groups. "
                "Build another one, and load the state of this one."
            )
        names = ("_defaults", "_options", "_settings", "algorithms", "_reasons")
        attributes = {name: getattr(self, name) for name in names}
        return {**super().__getstate__(), **attributes, "_inner": {}}
