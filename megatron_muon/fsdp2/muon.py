# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon for DTensors: momentum on shards, Newton-Schulz on whole matrices."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
from torch.optim.optimizer import ParamsT

from megatron_muon.fsdp2.gradients import Agreement, by_holders, refuse_grad_scaler
from megatron_muon.fsdp2.loading import (
    ADVICE,
    arrange_state,
    call_post_hooks,
    call_pre_hooks,
)
from megatron_muon.fsdp2.parameters import Group, planned_parameters, view_parameters
from megatron_muon.fsdp2.settings import (
    MuonArguments,
    group_problems,
    key_problems,
    layout_of,
)
from megatron_muon.fsdp2.validation import parameter_problems
from megatron_muon.runtime.agreement import (
    INTERRUPTED,
    first_line,
    gather_objects,
    raise_where_any_rank_fails,
)
from megatron_muon.runtime.arena import NOTHING, OtherBytes
from megatron_muon.step.dependencies import environment_problems
from megatron_muon.step.metrics import StepMetrics
from megatron_muon.step.muon_step import MuonStep

_REPLANNED = (
    "param_groups: expected split_sizes, transposed and flatten of construction, which decide the "
    "plan, got others. Build a new optimizer"
)


class Muon(WholeMatrixMuon):
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
        others: Parameter groups of another optimizer, as in ``MuonAdamW``: their gradients are
            checked too.
        options: Of ``MuonArguments``.

    Attributes:
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

    muon_step: MuonStep
    # Keys of groups that decide the plan, once it is made.
    _layouts: list[dict[str, Any]] | None = None
    fresh_if_moved: bool = False
    # From the first change of a step to its end: after an error between them, some weights and
    # momentum have changed, and others have not.
    _is_changing: bool = False
    state: dict[torch.Tensor, dict[str, Any]]

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        *,
        others: Sequence[Group] = (),
        **options: Any,  # noqa: ANN401 - of MuonArguments, by name
    ) -> None:
        arguments = MuonArguments(**options)
        self._settings = {**vars(arguments), "algorithm": "muon"}
        problems = []
        try:
            arguments.check()
            super().__init__(
                # torch refuses an empty list, as of a pipeline stage.
                list(params) or [{"params": []}],
                lr,
                momentum,
                weight_decay,
                nesterov=arguments.nesterov,
                weight_decay_method=arguments.weight_decay_method,
                fp32_matmul_prec=arguments.fp32_matmul_prec,
            )
        # Do not raise yet: other ranks are still in the constructor. Errors are raised together.
        except (TypeError, ValueError) as error:
            problems.append(str(error))
            self.param_groups: list[dict[str, Any]] = []
        replicas, tensor_group = arguments.process_group, arguments.tensor_group
        parameters, unplanned, device, rows_device = view_parameters(
            list(planned_parameters(self.param_groups)), replicas, tensor_group
        )
        problems += environment_problems() + unplanned
        problems += parameter_problems(self, parameters, rows_device)
        self.muon_step = step = MuonStep(
            [self],
            parameters,
            arguments.settings,
            arguments.moments,
            device,
            rows_device,
            problems=problems,
            has_others=bool(others),
        )
        self.engine = step.engine
        holders = by_holders(
            step.plan_inputs, list(planned_parameters(others)), replicas or tensor_group
        )
        self._agreement = Agreement(holders, step.group, device, arguments.check_gradients)
        self._layouts = self._layouts_now()

    def _layouts_now(self) -> list[dict[str, Any]]:
        return [layout_of(group) for group in self.param_groups if group["params"]]

    def refresh_main_params(self) -> None:
        """Let the next step read bfloat16 parameters that were changed outside of a step.

        Steps update float32 copies, and round them into the parameters: without this call the next
        one reverts a change, such as an average of weights, or weights that were loaded without the
        state of the optimizer. The first step, and the first one after ``load_state_dict()``, need
        no call.
        """
        self.muon_step.refresh_main_params()

    def record_metrics(self, is_on: bool = True) -> None:
        """Record metrics of every step for ``last_metrics()``, by a pass over its tensors."""
        self.muon_step.record_metrics(is_on)

    def last_metrics(self) -> StepMetrics:
        """Return the metrics of the last step; called by all ranks that step together.

        Raises:
            RuntimeError: ``record_metrics()`` was not called.

        Communication: a gather of objects. The host waits for the device.
        """
        return self.muon_step.last_metrics()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group at construction, as torch does; afterwards the plan is fixed."""
        if self._layouts is not None:
            raise RuntimeError(
                "add_param_group: expected all parameters at construction, which plans their "
                "exchange, got more. Build a new optimizer with all of them."
            )
        group = {**self.defaults, **param_group}
        if problems := key_problems(group, "muon", self._settings, is_new=True):
            raise ValueError("; ".join(problems))
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups; state that was removed is fresh, as in the next step.

        Raises:
            RuntimeError: Gradients of the last step were not finite (``check_gradients``).
        """
        self._agreement.refuse_last()
        self.muon_step.follow_state()
        return super().state_dict()

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - as object's
        """Refuse to be copied or pickled: process groups cannot be."""
        raise TypeError(
            "Muon: expected no copy, which would need process groups of its own. Build another "
            "one, and load the state of this one."
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load momentum and parameter groups; the splits of matrices stay.

        Called by all ranks that step together.

        Raises:
            RuntimeError: On all ranks, when one cannot load its state, or a parameter gets no
                momentum, or momentum with other shards. The old state stays.

        Communication: a gather of objects, and a flag, over the ranks that step together.
        """
        self._load(self, ["muon"] * len(self.param_groups), *call_pre_hooks(self, state_dict))
        call_post_hooks(self)

    def _load(
        self,
        optimizer: torch.optim.Optimizer,
        algorithms: Sequence[str],
        state_dict: Mapping[str, Any],
        problems: Sequence[str],
    ) -> bool:
        """Load the state of this optimizer, or of the one around it, on all ranks or on none.

        Args:
            optimizer: That optimizer.
            algorithms: Algorithms of its parameter groups.
            state_dict: Its state, with its errors, of ``call_pre_hooks()``.
            problems: These errors.

        Returns:
            Whether a rank has loaded state; False if all have loaded one from before a first step.
        """
        step = self.muon_step
        has_state = bool(problems or state_dict.get("state", True))
        if self._agreement.holders:
            has_state = any(gather_objects(has_state, step.group))
        state: dict[torch.Tensor, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        # The state views these tensors, and a load copies into them.
        moments: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            moments += [(own.values, own.values.clone()) for own in self.engine.moments]
            if not problems:
                # Without state that was removed no key would be expected.
                step.follow_state()
                state, groups, problems = arrange_state(
                    optimizer.param_groups,
                    algorithms,
                    self._settings,
                    state_dict,
                    self.state if has_state else {},
                    self.fresh_if_moved,
                )
            if not problems:
                step.complete_state(state)
        # Any error: other ranks may have loaded theirs.
        except Exception as error:
            problems = [first_line(error)]
        try:
            # A rank without parameters has no group to agree with.
            if self._agreement.holders:
                raise_where_any_rank_fails(problems, step.group, step.device, ADVICE)
            elif problems:
                raise RuntimeError("\n".join([*problems, ADVICE]))
        except RuntimeError:
            for values, old in moments:
                values.copy_(old)
            raise
        optimizer.state, optimizer.param_groups = defaultdict(dict, state), groups
        self.state = optimizer.state
        self._is_changing = False
        step.removed.clear()
        self._agreement.forget()
        return has_state

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update parameters and momentum by their gradients; called by all ranks together.

        A parameter that has no gradient on any rank keeps its value and momentum.

        Args:
            closure: Computes the loss and gradients; None if gradients are there.

        Returns:
            The loss of the closure.

        Raises:
            RuntimeError: On all ranks, when a gradient is not finite, or missing on some ranks;
                nothing was updated (but see ``check_gradients``). Gradients are scaled by a
                ``GradScaler``. The last step ended in the middle by an error on one rank, and no
                state has been loaded since.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        algorithms = ["muon"] * len(self.param_groups)
        problems = group_problems(self.param_groups, algorithms, self._settings)
        self._step_overlapped(None, problems)
        return loss

    @torch.no_grad()
    def _step_overlapped(
        self,
        overlap_fn: Callable[[], None] | None,
        problems: Sequence[str] = (),
        others: OtherBytes = NOTHING,
        fresh: Collection[torch.Tensor] = (),
    ) -> None:
        """Step, and call a function when the first rows are in transit.

        Args:
            overlap_fn: Other work, without communication.
            problems: Reasons for all ranks to refuse the step, as sentences.
            others: Memory of that work.
            fresh: Other parameters whose state is fresh in this step.
        """
        # A rank without parameters has nothing to step, and nothing to agree on.
        if not self._agreement.holders:
            return
        refuse_grad_scaler(self)
        problems = [*problems, *self.muon_step.reserve(others)]
        if self._is_changing:
            problems.append(INTERRUPTED)
        if self._layouts_now() != self._layouts:
            problems.append(_REPLANNED)
        try:
            without = self._agreement.check(problems, self.muon_step.removed.union(fresh))
        except RuntimeError:
            self.muon_step.release()
            raise
        self._is_changing = True
        self.muon_step.step(without, overlap_fn)
        self._is_changing = False
