# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon for DTensors: momentum on shards, Newton-Schulz on whole matrices."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
from torch.optim.optimizer import ParamsT

from megatron_muon.fsdp2.gradients import Agreement, by_holders, refuse_grad_scaler
from megatron_muon.fsdp2.loading import (
    ADVICE,
    Followed,
    arrange_state,
    call_post_hooks,
    call_pre_hooks,
    check_elementwise_state,
)
from megatron_muon.fsdp2.parameters import planned_parameters, view_parameters
from megatron_muon.fsdp2.settings import MOMENTUM, MuonArguments, key_problems, layout_of, values_of
from megatron_muon.fsdp2.validation import parameter_problems
from megatron_muon.runtime.agreement import (
    INTERRUPTED,
    first_line,
    gather_objects,
    raise_where_any_rank_fails,
)
from megatron_muon.runtime.plan_runner import profiler_range
from megatron_muon.step.dependencies import environment_problems
from megatron_muon.step.elementwise import (
    elementwise_bytes,
    state_of_empty_shards,
    step_without_hooks,
)
from megatron_muon.step.metrics import StepMetrics
from megatron_muon.step.muon_step import MuonStep
from megatron_muon.step.offload import Offload, as_announced

_REPLANNED = (
    "param_groups: expected the parameters, split_sizes, transposed and flatten of the plan, got "
    "others. Build a new optimizer"
)


class Muon(torch.optim.Optimizer):
    """Step matrices that ``fully_shard`` has sharded; one rank orthogonalizes a matrix.

    A step equals emerging-optimizers' ``Muon`` on the unsharded model: to the bit with
    ``exchange.comm_dtype`` fp32 and ``exchange.max_owners`` 1, otherwise but for rounding
    (docs/numerics.md). Mesh and placements of a parameter, or the buffer of Megatron-FSDP, define
    the rows of a rank; parameters may be on different meshes. Step the rest, such as embeddings,
    norms and biases, with AdamW.

    It is built by all ranks of the job together, once parameters are DTensors: before the first
    forward pass, or after a backward pass. A rank without parameters, as a pipeline stage may be,
    passes ``[]``.

    Args:
        params: Parameters, pairs of name and parameter, or groups of either. A matrix is
            ``(outputs, inputs)``; three dimensions are a batch of them. Groups may have, besides
            ``lr``, ``momentum`` and ``weight_decay``: ``split_sizes``, rows of blocks that are
            orthogonalized separately (a number of equal blocks; the rows of all blocks, with a last
            -1 for the remaining rows; or the rows of a group of blocks that repeats, such as query,
            key and value), ``transposed``, for matrices that are stored and scaled as ``(inputs,
            outputs)``, and ``flatten``, for convolutions: all dimensions but the first are columns.
        lr: Learning rate.
        momentum: EMA coefficient.
        weight_decay: Coefficient.
        options: Of ``MuonArguments``.

    Attributes:
        algorithms: Algorithms by parameter group.
        muon: The step of matrices; None before their exchange is planned.
        fresh_if_moved: Whether a state is loaded if it lacks parameters, or has state of another
            algorithm for them. They get fresh state, and parameter groups without a match in the
            checkpoint keep their values. Initially False: such a state is refused.

    Raises:
        RuntimeError: On all ranks, naming ranks and parameters, when a parameter cannot be stepped
            (see docs/fsdp2.md), settings cannot work, or ranks have different settings, parameters
            or plans.

    Communication: at construction see ``find_plan_inputs()`` and ``build_engine()``. In a step see
        ``Agreement`` and ``Engine``.
    Memory: one float32 per local element of a parameter, or half with ``momentum_dtype`` bfloat16;
        one more for parameters in bfloat16, against lost updates. While a step runs, another one
        for results, and staging memory. With ``CPUOffloadPolicy`` all but staging is in CPU memory.
    """

    # torch.amp.GradScaler then always calls step(), which refuses it. It would skip the step of one
    # rank with overflows, and the others would wait.
    _step_supports_amp_scaling = True
    # Whether the exchange is planned, and the state made, by the first step or load.
    _is_lazy = False

    algorithms: tuple[str, ...] = ()
    muon: MuonStep | None = None
    fresh_if_moved: bool = False
    # Of all state, once the exchange is planned; None without ``offload_state``.
    _offload: Offload | None = None
    # Whether ``state`` has the state of matrices.
    _has_state: bool = False
    # Tensors of the state of AdamW and Lion that were checked in the last step.
    _followed: Followed = ()
    # Whether a step has begun to change weights and state. If it is still set in the next step, an
    # error left some of them changed, and others not.
    _is_changing: bool = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = MOMENTUM,
        weight_decay: float = 0.01,
        **options: Any,  # noqa: ANN401 - of MuonArguments, by name
    ) -> None:
        self._options = options
        problems = []
        common = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        try:
            self._set_groups(params, {"muon": common})
        # Do not raise yet: other ranks are still in the constructor. Errors are raised together.
        except (TypeError, ValueError) as error:
            problems.append(str(error))
            self.param_groups, self.algorithms = [], ()
        self._planned_step(problems)
        self._show_state()

    def _set_groups(self, params: Iterable[Any], defaults: dict[str, dict[str, Any]]) -> None:
        """Check arguments, and make the parameter groups, given defaults by algorithm."""
        arguments = MuonArguments(**self._options)
        self._settings = {**vars(arguments), "algorithm": "muon"}
        arguments.check()
        own = arguments.group_defaults(defaults["muon"])
        self._settings["keys"] = (*own,)
        self._defaults = defaults = {**defaults, "muon": own}
        # torch refuses an empty list, as of a pipeline stage.
        super().__init__(list(params) or [{"params": []}], {**defaults["muon"]})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, until the exchange is planned.

        Raises:
            RuntimeError: It has been planned.
            ValueError: The algorithm is unknown, or a key is read by no step.
        """
        if self.muon is not None:
            raise RuntimeError(
                "add_param_group: expected all parameters before their exchange is planned, got "
                "more. Build a new optimizer with all of them."
            )
        algorithm = param_group.pop("algorithm", "muon")
        if algorithm not in self._defaults:
            raise ValueError(
                f"algorithm: expected one of {(*self._defaults,)}, got {algorithm!r}. Choose one"
            )
        for key, value in self._defaults[algorithm].items():
            param_group.setdefault(key, value)
        if problems := key_problems(param_group, algorithm, self._settings, is_new=True):
            raise ValueError("; ".join(problems))
        super().add_param_group(param_group)
        self.algorithms += (algorithm,)

    def _groups(self, *algorithms: str) -> list[dict[str, Any]]:
        pairs = zip(self.algorithms, self.param_groups, strict=True)
        return [group for algorithm, group in pairs if algorithm in algorithms]

    def _others(self) -> Sequence[torch.optim.Optimizer]:
        """Return the optimizers of other algorithms, with this one's groups and state."""
        return ()

    def _planned_step(self, problems: Sequence[str] = ()) -> MuonStep:
        """Return the step of matrices; at first it is planned, by all ranks together."""
        if self.muon is None:
            # It never steps: it holds the groups and the state of matrices.
            self._matrices = WholeMatrixMuon([{"params": []}])
        self._matrices.param_groups = self._groups("muon")
        if self._has_state:
            self._matrices.state = self.state
        if self.muon is None:
            arguments = MuonArguments(**self._options)
            replicas, tensor_group = arguments.process_group, arguments.tensor_group
            others = [*planned_parameters(self._groups("adamw", "lion"))]
            parameters, unplanned, device, rows_device = view_parameters(
                [*planned_parameters(self._groups("muon"))], replicas, tensor_group
            )
            wrong = parameter_problems(type(self), parameters, rows_device)
            step = arguments.step_class(
                [self._matrices],
                parameters,
                arguments.settings,
                device,
                rows_device,
                problems=[*problems, *environment_problems(), *unplanned, *wrong],
                has_others=bool(others),
            )
            holders = by_holders(step.plan_inputs, others, replicas or tensor_group)
            self._agreement = Agreement(holders, step.group, device, arguments.check_gradients)
            self.muon, self._planned = step, self._planned_groups()
            if arguments.offload_state:
                self._offload = Offload(self._state_tensors, device)
        return self.muon

    def _planned_groups(self) -> list[Any]:
        """Return what decides the plan, which keeps the parameters alive."""
        groups = [group for group in self.param_groups if group["params"]]
        return [(layout_of(group), [*map(id, group["params"])]) for group in groups]

    def _state_tensors(self) -> list[torch.Tensor]:
        values = itertools.chain(*(values.values() for values in self.state.values()))
        return [value for value in values if isinstance(value, torch.Tensor)]

    def _show_state(self) -> None:
        """Show the state of matrices in ``state``, in CPU memory with ``offload_state``."""
        if not self._has_state:
            self.state.update(self._matrices.state)
            self._has_state = True
        if self._offload is not None:
            self._offload.to_cpu()

    def refresh_main_params(self) -> None:
        """Let the next step read bfloat16 parameters that were changed outside of a step.

        Steps update float32 copies, and round them into the parameters: without this call the next
        one reverts a change, such as an average of weights, or weights that were loaded without the
        state of the optimizer. The first step, and the first one after ``load_state_dict()``, need
        no call.
        """
        if self.muon is not None:
            self.muon.refresh_main_params()

    def record_metrics(self, is_on: bool = True) -> None:
        """Record metrics of every step for ``last_metrics()``; called by all ranks together."""
        self._planned_step().record_metrics(is_on)

    def last_metrics(self) -> StepMetrics:
        """Return the metrics of the last step; called by all ranks that step together.

        Raises:
            RuntimeError: ``record_metrics()`` was not called.

        Communication: a gather of objects. The host waits for the device.
        """
        return self._planned_step().last_metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups; state that was removed is fresh, as in the next step.

        Raises:
            RuntimeError: Gradients of the last step were not finite (``check_gradients``).
        """
        if self.muon is not None:
            self._agreement.refuse_last()
        # torch's checkpoints make state by a step where there is none.
        if self._has_state and (self.state or not self._is_lazy):
            self._planned_step().follow_state()
        state_dict = super().state_dict()
        if self._offload is not None:
            state_dict["state"] = {
                number: {key: as_announced(value) for key, value in values.items()}
                for number, values in state_dict["state"].items()
            }
        return state_dict

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of copies and pickles, until the exchange is planned."""
        if self.muon is not None:
            raise TypeError(
                f"{type(self).__name__}: expected no copy once the exchange is planned, which "
                "makes process groups. Build another one, and load the state of this one."
            )
        names = ("_options", "_settings", "_defaults", "algorithms")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all groups; the splits of matrices stay.

        Called by all ranks that step together; before a plan by all ranks of the job.

        Args:
            state_dict: Of this class, or without state: if no rank has any before a plan, only the
                groups are taken, and nothing is planned.

        Raises:
            RuntimeError: On all ranks, when one cannot load its state, or a parameter gets no
                momentum, or momentum with other shards. The old state stays. Also as the
                construction of ``Muon``, where it plans.

        Communication: a gather of objects, and a flag, over the ranks that step together; before a
            plan also two gathers of objects over the job.
        """
        state_dict, problems = call_pre_hooks(self, state_dict)
        has_state = bool(problems or state_dict.get("state", True))
        step = self.muon
        # A rank without parameters and state plans with the others.
        if step is None and any(gather_objects(has_state)):
            step = self._planned_step()
        if step is not None and self._agreement.holders:
            has_state = any(gather_objects(has_state, step.group))
        state: dict[torch.Tensor, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        try:
            # Without state that was removed no key would be expected.
            if step is not None:
                self._planned_step().follow_state()
            if not problems:
                state, groups, problems = arrange_state(
                    self.param_groups,
                    self.algorithms,
                    self._settings,
                    state_dict,
                    self._matrices.state if step is not None and has_state else {},
                    self.fresh_if_moved,
                )
            if step is not None and not problems:
                step.complete_state(state)
        # Any error: other ranks may have loaded theirs.
        except Exception as error:
            problems = [first_line(error)]
        self._refuse_load(problems)
        self.param_groups = groups
        if step is not None:
            self._has_state = has_state or not self._is_lazy
            self._matrices.state = defaultdict(dict, state)
            self.state = self._matrices.state if self._has_state else defaultdict(dict)
            self._is_changing = False
            if self._has_state:
                step.use_loaded()
            step.removed.clear()
            self._agreement.forget()
            if self._offload is not None:
                self._offload.to_cpu()
        call_post_hooks(self)

    def _refuse_load(self, problems: Sequence[str]) -> None:
        """Raise on all ranks that load together, if one has a problem."""
        if self.muon is None:
            problems = [*dict.fromkeys(itertools.chain(*gather_objects(problems)))]
        # A rank without parameters has no group to agree with.
        elif self._agreement.holders:
            raise_where_any_rank_fails(problems, self.muon.group, self.muon.device, ADVICE)
        if problems:
            raise RuntimeError("\n".join([*problems, ADVICE]))

    # Private, but its public form imports torch's compiler at once.
    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters by their gradients; called by all ranks together.

        A parameter that has no gradient on any rank keeps its value and state.

        Args:
            closure: Computes the loss and gradients; None if gradients are there.

        Returns:
            The loss of the closure.

        Raises:
            RuntimeError: On all ranks, when a gradient is not finite, or missing on some ranks;
                nothing was updated (but see ``check_gradients``). Gradients are scaled by a
                ``GradScaler``. The last step ended in the middle by an error on one rank, and no
                state has been loaded since. Also as the construction of ``Muon``, where it plans.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_grad_scaler(self)
        if not isinstance(self.state, defaultdict):
            self.state = defaultdict(dict, self.state)
        step = self._planned_step()
        # A rank without parameters has nothing to step, and nothing to agree on.
        if self._agreement.holders:
            self._step(step, self._others())
        self._show_state()
        return loss

    def _step(self, step: MuonStep, others: Sequence[torch.optim.Optimizer]) -> None:
        """Agree to step, and step matrices, and others when the first rows are in transit."""

        def step_others() -> None:
            """Step AdamW's and Lion's parameters, without communication."""
            with profiler_range("elementwise"):
                for other in others:
                    with state_of_empty_shards(other):
                        step_without_hooks(other)

        if self._offload is not None:
            self._offload.to_device()
        problems, fresh, self._followed = check_elementwise_state(
            self.param_groups, self.algorithms, self.state, self._followed
        )
        values = values_of(self.param_groups, self.algorithms, self._settings)
        for number, pair in enumerate(zip(self.param_groups, self.algorithms, strict=True)):
            wrong = key_problems(*pair, self._settings)
            problems += [f"group {number}: {problem}" for problem in wrong]
        problems += step.reserve(elementwise_bytes(others, step.device))
        problems += self._offload.problems if self._offload is not None else ()
        if self._is_changing:
            problems.append(INTERRUPTED)
        if self._planned_groups() != self._planned:
            problems.append(_REPLANNED)
        # Without state yet, none was removed: the first step makes it.
        removed = step.removed.union(fresh if self._has_state else ())
        try:
            without = self._agreement.check(problems, removed, values)
        except RuntimeError:
            step.release()
            self._show_state()
            raise
        self._is_changing = True
        step.step(without, step_others)
        self._is_changing = False
