# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon for DTensors: momentum on shards, Newton-Schulz on whole matrices."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.mixin import WeightDecayT
from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
from emerging_optimizers.orthogonalized_optimizers.muon import MuonScaleT
from emerging_optimizers.utils import FP32MatmulPrecT, fp32_matmul_precision
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from megatron_muon.fsdp2.batches import MatrixRows
from megatron_muon.fsdp2.gradients import parameters_without_gradient
from megatron_muon.fsdp2.plan_inputs import DTensorPlanInput, NamedParameter, find_plan_inputs
from megatron_muon.fsdp2.problems import (
    Settings,
    parameter_problem,
    repeated_problems,
    subclass_problems,
)
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.agreement import (
    first_line,
    raise_where_any_rank_fails,
    raise_where_ranks_differ,
)
from megatron_muon.runtime.dependencies import dependency_problems
from megatron_muon.runtime.dtensor_layout import local_tensor
from megatron_muon.runtime.momentum import advance_momentum
from megatron_muon.runtime.owner_compute import OwnerCompute

# Of a parameter group: they decide the plan, so those of construction stay. A group without them
# gets none: a checkpoint of torch.optim.Muon has no such keys.
_PLANNED = {"split_sizes": None, "transposed": False}


class Muon(WholeMatrixMuon):
    """Step matrices that ``fully_shard`` has sharded; one rank orthogonalizes a matrix.

    A step equals that of emerging-optimizers' ``Muon`` on the unsharded model: to the bit with
    ``exchange.wire`` fp32 and ``exchange.max_parts`` 1, otherwise but for rounding
    (docs/numerics.md). Mesh and placements of a parameter, or Megatron-FSDP, say which rows a rank
    holds; parameters may be on different meshes. Step the rest, such as embeddings, norms and
    biases, with AdamW.

    It is built by all ranks of the job together, once parameters are DTensors: before the first
    forward pass, or after a backward pass. A rank without parameters, as a pipeline stage may be,
    passes ``[]``.

    Args:
        params: Parameters, pairs of name and parameter, or groups of either. A matrix is
            ``(outputs, inputs)``; three dimensions are a batch of them. Groups may have, besides
            ``lr``, ``momentum`` and ``weight_decay``: ``split_sizes``, rows of blocks that are
            orthogonalized separately (a number of equal blocks, the rows of the blocks, or the rows
            of the blocks of a group that repeats, such as query, key and value), and
            ``transposed``, for matrices that are stored and scaled as ``(inputs, outputs)``.
        lr: Learning rate.
        momentum: Weight of the momentum's past.
        weight_decay: Coefficient.
        nesterov: Whether the gradient is averaged into the momentum once more.
        weight_decay_method: ``decoupled``, ``independent``, ``palm`` or ``l2``.
        fp32_matmul_prec: Precision of Newton-Schulz; ``medium`` is bf16.
        coefficient_type: Name of emerging-optimizers' coefficients.
        num_ns_steps: Newton-Schulz steps.
        scale_mode: How results are scaled by shape.
        extra_scale_factor: Another factor of results; 0.2 is the update size of AdamW.
        use_syrk: Must be False; ``exchange.newton_schulz`` chooses kernels.
        exchange: How matrices are exchanged; None for the defaults.
        group: Ranks that step together; None for all ranks that have parameters.

    Raises:
        RuntimeError: On all ranks, naming ranks and parameters, when one cannot be stepped (see
            docs/fsdp2.md), settings cannot work, or ranks have different settings, parameters or
            plans.

    Communication: at construction see :func:`~megatron_muon.fsdp2.plan_inputs.find_plan_inputs` and
        :class:`~megatron_muon.runtime.owner_compute.OwnerCompute`. Each step: see
        :func:`~megatron_muon.fsdp2.gradients.parameters_without_gradient` and
        :class:`~megatron_muon.runtime.engine.Engine`.
    Memory: one float32 per local element of a parameter; while a step runs another one, for
        results, one for each gradient in bfloat16, and what the engine stages.
    """

    # torch.amp.GradScaler then calls step() whatever it has found, so that it can be refused. It
    # would leave out the step of a rank whose gradients overflowed, for which the others wait.
    _step_supports_amp_scaling = True

    compute: OwnerCompute
    _inputs: list[DTensorPlanInput]
    _num_matrices: Counter[torch.Tensor]  # with rows on this rank, by parameter
    _is_built: bool = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        *,
        nesterov: bool = False,
        weight_decay_method: WeightDecayT = "decoupled",
        fp32_matmul_prec: FP32MatmulPrecT = "medium",
        coefficient_type: str = "quintic",
        num_ns_steps: int = 5,
        scale_mode: MuonScaleT = "spectral",
        extra_scale_factor: float = 1.0,
        use_syrk: bool = False,
        exchange: ExchangeSettings | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.exchange = exchange or ExchangeSettings()
        self._group = group
        settings = Settings(
            weight_decay_method,
            fp32_matmul_prec,
            coefficient_type,
            num_ns_steps,
            scale_mode,
            use_syrk,
            self.exchange,
        )
        problems = dependency_problems() + settings.problems()
        # torch refuses an empty list, which a pipeline stage may have.
        given = list(params)
        try:
            super().__init__(
                given or [{"params": []}],
                lr,
                momentum,
                weight_decay,
                nesterov=nesterov,
                weight_decay_method=weight_decay_method,
                fp32_matmul_prec=fp32_matmul_prec,
                coefficient_type=coefficient_type,
                num_ns_steps=num_ns_steps,
                scale_mode=scale_mode,
                extra_scale_factor=extra_scale_factor,
            )
        # Other ranks go on: they learn of it with all other problems.
        except (TypeError, ValueError) as error:
            problems.append(first_line(error))
            self.param_groups: list[dict[str, Any]] = []
        self._device = self._find_device()

        def scale(rows: int, cols: int) -> tuple[float, float]:
            """Return the two factors, which emerging-optimizers multiplies with in turn."""
            return get_muon_scale_factor(rows, cols, mode=scale_mode), extra_scale_factor

        self._plan(
            NewtonSchulzSettings(
                num_ns_steps, coefficient_type, fp32_matmul_prec == "medium", scale
            ),
            f"scale {scale_mode} {extra_scale_factor}, {nesterov=}, {weight_decay_method=}",
            problems,
        )
        # For all parameters from the start: checkpoints need no step to make state.
        for param_group in self.param_groups:
            self._init_group(param_group, skip_non_grad_params=False)
        self._is_built = True

    def _plan(
        self, newton_schulz: NewtonSchulzSettings, other_settings: str, problems: list[str]
    ) -> None:
        """Check parameters on all ranks, and plan their exchange.

        Args:
            newton_schulz: Settings of Newton-Schulz.
            other_settings: What else must be equal on all ranks, as text.
            problems: What has been found on this rank.
        """
        parameters = list(self._parameters())
        problems = problems + subclass_problems(self) + repeated_problems(parameters)
        problems += filter(None, (parameter_problem(each, self._device) for each in parameters))
        raise_where_any_rank_fails(problems, None, self._device, "No optimizer was built.")
        if dist.is_initialized():
            # What follows is collective, and which collectives depends on these.
            raise_where_ranks_differ(
                [
                    str(self.exchange),
                    f"{newton_schulz.steps} steps of {newton_schulz.coefficient_type} "
                    f"coefficients, precision {self.fp32_matmul_prec}",
                    other_settings,
                ],
                dist.group.WORLD,  # type: ignore[arg-type]
                self._device,
                "Muon settings",
            )
        found = find_plan_inputs(parameters, self._group, self._device)
        self._inputs, self._group = found.inputs, found.group
        # Kernels are checked here, in the precision of a step.
        with fp32_matmul_precision(self.fp32_matmul_prec):
            self.compute = OwnerCompute(
                [each.plan_input for each in self._inputs],
                newton_schulz,
                self.exchange,
                device=self._device,
                max_num_plans=found.max_num_plans,
            )
        self._num_matrices = Counter(rows.param for rows in self._all_rows())

    def _parameters(self) -> Iterator[NamedParameter]:
        number = 0
        for group in self.param_groups:
            names = group.get("param_names") or [
                f"parameter {number + i}" for i in range(len(group["params"]))
            ]
            number += len(names)
            sizes = group.get("split_sizes")
            for name, param in zip(names, group["params"], strict=True):
                yield NamedParameter(
                    name,
                    param,
                    tuple(sizes) if isinstance(sizes, list | tuple) else sizes,
                    group.get("transposed", False),
                )

    def _find_device(self) -> torch.device:
        """Return where flags are reduced, and parameters should be: the device of their meshes.

        A rank may have none: ranks agree by a gather of objects.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        types = [
            param.device_mesh.device_type if isinstance(param, DTensor) else param.device.type
            for param in params[:1]
        ]
        if not dist.is_initialized():
            return params[0].device if params else torch.device("cpu")
        of_ranks = [types] * dist.get_world_size()
        dist.all_gather_object(of_ranks, types)
        device_type = next((each[0] for each in of_ranks if each), "cpu")
        if device_type == "cpu":
            return torch.device("cpu")
        return torch.device(device_type, torch.get_device_module(device_type).current_device())

    def _all_rows(self) -> list[MatrixRows]:
        return [rows for each in self._inputs for rows in each.plan_input.handles.values()]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does at construction; later the plan is made."""
        if self._is_built:
            raise RuntimeError(
                "add_param_group: expected all parameters at construction, which plans their "
                "exchange, got more. Build a new optimizer with all of them."
            )
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - as object's
        """Refuse to be copied or pickled: process groups cannot be."""
        raise TypeError(
            "Muon: expected no copy, which would need process groups of its own. Build another "
            "one, and load the state of this one."
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load momentum and groups; how matrices are split stays that of this run.

        Called by all ranks that step together.

        Raises:
            RuntimeError: On all ranks, when a parameter gets no momentum, or one that is sharded
                otherwise.

        Communication: a flag over the ranks that step together.
        """
        own = [{key: group[key] for key in _PLANNED if key in group} for group in self.param_groups]
        problems = []
        try:
            super().load_state_dict(state_dict)
        # Other ranks may have loaded theirs.
        except (KeyError, TypeError, ValueError) as error:
            problems.append(first_line(error))
        for number, (group, planned) in enumerate(zip(self.param_groups, own, strict=True)):
            for key, default in _PLANNED.items():
                loaded, kept = group.pop(key, default), planned.get(key, default)
                if _as_tuple(loaded) != _as_tuple(kept):
                    warnings.warn(
                        f"group {number}: the checkpoint has {key} {loaded}, this run {kept}, "
                        "which it keeps.",
                        stacklevel=2,
                    )
            group.update(planned)
        for parameter in self._parameters():
            loaded = self.state[parameter.param].get("momentum_buffer")
            expected = _sharding(parameter.param)
            got = "nothing" if loaded is None else _sharding(loaded)
            if got != expected:
                problems.append(
                    f"{parameter.name}: expected momentum of {expected}, got {got}. Load through "
                    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
                )
        if self._inputs:
            raise_where_any_rank_fails(problems, self._group, self._device, "Do not train on.")

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
                nothing was updated. Gradients are scaled by a ``GradScaler``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A rank without parameters has nothing to step, and nothing to agree on.
        if not self._inputs:
            return loss
        if hasattr(self, "found_inf"):
            # GradScaler sets both, even if it has unscaled gradients.
            del self.found_inf, self.grad_scale
            raise RuntimeError(
                "step: expected gradients that are not scaled, got a GradScaler. Compute in "
                "bfloat16, which needs none."
            )
        problems = self.compute.memory_problems()
        without = parameters_without_gradient(self._inputs, self._group, self._device, problems)
        momentum, results = self._advance(without)
        # Loading a state replaces the dictionaries of groups, and schedulers change their values.
        group_of = {param: group for group in self.param_groups for param in group["params"]}
        missing = self._num_matrices.copy()
        with fp32_matmul_precision(self.fp32_matmul_prec):
            for done in self.compute.orthogonalize(
                {rows: rows.of(momentum[rows.param]) for rows in self._all_rows()},
                {rows: rows.of(results[rows.param]) for rows in self._all_rows()},
            ):
                missing.subtract(rows.param for rows in done)
                for param in {rows.param for rows in done}:
                    # All matrices of a batch at once.
                    if missing[param] == 0 and param not in without:
                        local_tensor(param).add_(results[param], alpha=-group_of[param]["lr"])
        # Results are new memory in every step.
        self.compute.forget()
        return loss

    def _advance(
        self, without: set[torch.Tensor]
    ) -> tuple[dict[torch.Tensor, torch.Tensor], dict[torch.Tensor, torch.Tensor]]:
        """Decay weights, and average gradients into momentum.

        Args:
            without: Parameters that have no gradient, and stay as they are.

        Returns:
            By parameter, the local tensor of what is orthogonalized, and where results go.
        """
        momentum: dict[torch.Tensor, torch.Tensor] = {}
        results: dict[torch.Tensor, torch.Tensor] = {}
        for group in self.param_groups:
            buffers = {p: local_tensor(self.state[p]["momentum_buffer"]) for p in group["params"]}
            # An empty shard may have no gradient, and has nothing to step.
            stepped = [p for p in buffers if p.grad is not None and p not in without]
            advanced = advance_momentum(
                group,
                [local_tensor(param) for param in stepped],
                # No copy, but of bfloat16.
                [local_tensor(param.grad).to(torch.float32) for param in stepped],
                [buffers[param] for param in stepped],
                weight_decay_method=self.weight_decay_method,
                nesterov=self.nesterov,
                # Gradients are the user's: a logger may read them after the step.
                overwrites_gradients=False,
            )
            # The exchange is planned for all parameters, including those that are not stepped.
            momentum |= {**buffers, **dict(zip(stepped, advanced, strict=True))}
            results |= {
                # With Nesterov the memory is new, and takes the result.
                param: rows if rows is not buffers[param] else torch.empty_like(rows)
                for param, rows in ((param, momentum[param]) for param in buffers)
            }
        return momentum, results


def _sharding(tensor: torch.Tensor) -> str:
    """Describe how a tensor is sharded."""
    text = f"local shape {tuple(local_tensor(tensor).shape)}"
    return f"{text}, {tensor.placements}" if isinstance(tensor, DTensor) else text


def _as_tuple(value: Any) -> Any:  # noqa: ANN401 - whatever a checkpoint holds
    """Return lists as tuples: a checkpoint may have made one of the other."""
    return tuple(value) if isinstance(value, list) else value
