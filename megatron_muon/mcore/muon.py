# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Momentum on row shards, Newton-Schulz on whole matrices."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import (
    OrthogonalizedOptimizer,
    get_muon_scale_factor,
)
from emerging_optimizers.utils import fp32_matmul_precision
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from torch.distributed.tensor import DTensor

from megatron_muon.mcore.gradient_check import raise_where_gradients_fail
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.flags import naming_flags
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.agreement import raise_where_any_rank_fails, raise_where_ranks_differ
from megatron_muon.runtime.all_gather_compute import AllGatherCompute
from megatron_muon.runtime.dtensor_layout import local_tensor
from megatron_muon.runtime.momentum import advance_momentum
from megatron_muon.runtime.owned_parameters import OwnedParameter, lay_out
from megatron_muon.runtime.owner_compute import OwnerCompute
from megatron_muon.runtime.sharded_matrix import ShardedMatrix


class FSDPZeROTensorParallelMuon(TensorParallelMuon):
    """Step DTensor parameters whose rows Megatron-FSDP shards over data-parallel ranks.

    A step is momentum, orthogonalize, apply. It equals that of :class:`TensorParallelMuon` on the
    unsharded model: momentum, Nesterov and weight decay are elementwise and run on this rank's
    rows; Newton-Schulz runs on whole matrices, and each rank applies its rows of the result.

    A parameter that every rank holds whole (``no_shard``) is stepped by this class too: the parent
    would hand a DTensor to Newton-Schulz, where ``shape`` is global to tensor parallelism.

    Momentum buffers exist from construction, for every parameter on every rank, empty shards
    included: ranks that hold different sets of optimizer state hang Megatron-FSDP's save.

    :meth:`step` overwrites gradients: their memory serves as scratch, and holds the update in the
    end. A copy of them would take as much memory as the momentum.

    Args:
        params: DTensor parameters or parameter groups, in the same order on all ranks.
        matrices: What each parameter is a shard of.
        exchange: Who orthogonalizes what, and what travels; None for the defaults.
        experts: The optimizer of the experts, where they have one of their own. Its matrices share
            a schedule with those of this one: it is stepped first, and advances its momentum; the
            step of this one does the rest for both.
        is_stepped_first: Whether this is that optimizer of experts: another one plans its matrices,
            and completes its step.
        **muon_kwargs: Arguments of :class:`TensorParallelMuon`.

    Raises:
        ValueError: bf16 on the wire was asked for, and Newton-Schulz runs in fp32.
        RuntimeError: On all ranks, when one has a parameter without an entry in ``matrices``, not a
            float32 DTensor, or of another local shape than its layout's; or when ranks of a group
            hold different parameters or layouts, or came to different plans.

    Communication: at construction a flag over all ranks and a hash, and see
        :class:`~megatron_muon.runtime.owner_compute.OwnerCompute`. Each step: a flag over all
        ranks, and that of ``orthogonalize`` of :attr:`compute`.
    Memory: one momentum element for each local parameter element, in the parameter's dtype; while
        a step runs, what :class:`~megatron_muon.runtime.engine.Engine` stages.
    """

    # Whether step() starts by agreeing that gradients are complete and finite.
    # FSDPMuonChainedOptimizer turns it off, and checks gradients of all its optimizers together.
    checks_gradients: bool
    _scales_results = True  # whether Newton-Schulz does; a subclass may do it later
    is_stepped_first: bool  # never with all_gather, where each gathers its own matrices
    # None until the optimizer of the dense matrices has planned this one's.
    compute: OwnerCompute | AllGatherCompute | None
    exchange: ExchangeSettings
    _matrices: Mapping[torch.Tensor, ShardedMatrix]
    _params: list[Any]  # as at construction
    _group_of: dict[Any, dict[str, Any]]  # parameter group of each parameter, in this step
    # What this step orthogonalizes, and where results go, until they are there.
    _begun: tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]] | None

    def __init__(
        self,
        params: Iterable[Any],
        *,
        matrices: Mapping[torch.Tensor, ShardedMatrix],
        exchange: ExchangeSettings | None = None,
        experts: "FSDPZeROTensorParallelMuon | None" = None,
        is_stepped_first: bool = False,
        **muon_kwargs: Any,
    ) -> None:
        super().__init__(params, **muon_kwargs)
        self.exchange = exchange or ExchangeSettings()
        self.checks_gradients = True
        self._matrices = matrices
        self._params = self._all_params()
        raise_where_any_rank_fails(
            self._parameter_problems(), None, self._device, "No optimizer was built."
        )
        newton_schulz = _newton_schulz_settings(muon_kwargs, is_scaled=self._scales_results)
        # What follows is collective, and which collectives depends on these. A rank without experts
        # would miss the first OwnerCompute.
        raise_where_ranks_differ(
            [
                f"experts {bool(self._of_kind(True))}, dense matrices {bool(self._of_kind(False))}",
                f"{type(self).__name__}, {self.exchange}",
                f"{newton_schulz.steps} steps of {newton_schulz.coefficient_type} coefficients, "
                f"precision {self.fp32_matmul_prec}",
            ],
            dist.group.WORLD,  # type: ignore[arg-type]
            self._device,
            "kinds of Muon parameters, and settings",
        )
        self._experts = experts
        self.is_stepped_first = is_stepped_first
        self._begun = None
        self.compute = None
        if self.exchange.mode == "owner":
            if not is_stepped_first:
                self.compute = self._owner_compute(newton_schulz)
        else:
            # Each gathers its own matrices.
            self._experts, self.is_stepped_first = None, False
            by_param = {param: matrices[param] for param in self._params}
            self.compute = AllGatherCompute(by_param, self._orthogonalize_whole, self._device)
        for param_group in self.param_groups:
            self._init_group(param_group, skip_non_grad_params=False)

    def _owner_compute(self, newton_schulz: NewtonSchulzSettings) -> OwnerCompute:
        """Plan experts first: they mostly lie whole on a rank, and dense matrices fill the rest.

        Without expert parallelism both kinds are in one optimizer, over groups of their own.
        """
        optimizers = [each for each in (self._experts, self) if each is not None]
        kinds = [kind for optimizer in optimizers for kind in optimizer._kinds()]
        # Shapes may be timed here, which has to be done as a step does it.
        with naming_flags(), fp32_matmul_precision(self.fp32_matmul_prec):
            compute = OwnerCompute(
                [lay_out(kind, self._device) for kind in kinds],
                newton_schulz,
                self.exchange,
                device=self._device,
            )
        if self._experts is not None:
            self._experts.compute = compute
        return compute

    def _kinds(self) -> Iterator[list[OwnedParameter]]:
        """Yield the parameters of each kind that there is, experts first."""
        for params in (self._of_kind(True), self._of_kind(False)):
            if params:
                yield [self._owned(param) for param in params]

    def _of_kind(self, is_expert: bool) -> list[Any]:
        return [p for p in self._params if getattr(p, "expert_tp", False) is is_expert]

    def _owned(self, param: Any) -> OwnedParameter:
        """Return how upstream's ``orthogonalize`` splits a parameter, and over which ranks."""
        tensor_group = self._tensor_group(param)
        is_sharded = tensor_group is not None and self._is_tensor_sharded(param)
        # Each head lies on one tensor-parallel rank, and is orthogonalized there.
        is_by_head = getattr(param, "is_split_by_head", False)
        is_joined = is_sharded and self.tp_mode != "blockwise" and not is_by_head
        split_shapes = None
        if self.split_qkv and self.is_qkv_fn is not None and self.is_qkv_fn(param):
            split_shapes = tuple(getattr(param, "qkv_split_shapes", None) or self.qkv_split_shapes)
        return OwnedParameter(
            param,
            self._matrices[param],
            tensor_group if is_joined else None,
            param.partition_dim if is_joined else None,
            split_shapes,
            # Experts are never replicated: every rank has others, or other rows of them.
            has_copies=(
                tensor_group is not None
                and not is_sharded
                and not getattr(param, "expert_tp", False)
            ),
        )

    def _tensor_group(self, param: Any) -> dist.ProcessGroup | None:
        """Return the tensor-parallel group of a parameter; None where it is one rank."""
        groups, is_expert = self.pg_collection, getattr(param, "expert_tp", False)
        if groups is None:
            return None
        group: dist.ProcessGroup | None = groups.expt_tp if is_expert else groups.tp
        return group if group is not None and dist.get_world_size(group) > 1 else None

    def _is_tensor_sharded(self, param: Any) -> bool:
        """Return whether tensor-parallel ranks hold different parts of a parameter."""
        is_cut = getattr(param, "partition_dim", None) in (0, 1)
        return is_cut and self._tensor_group(param) is not None

    def _all_params(self) -> list[Any]:
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def _device(self) -> torch.device:
        param = self._all_params()[0]
        return local_tensor(param).device

    def _parameter_problems(self) -> list[str]:
        problems = []
        for param in self._all_params():
            matrix = self._matrices.get(param)
            if matrix is None:
                problems.append(
                    f"parameter of shape {tuple(param.shape)}: expected an entry in matrices, got "
                    "none. Build the optimizer through build_megatron_fsdp_emerging_optimizer"
                )
            elif not isinstance(param, DTensor) or param.dtype != torch.float32:
                problems.append(
                    f"{matrix.fqn}: expected a float32 DTensor, got {type(param).__name__} of "
                    f"{param.dtype}. Wrap the model in Megatron-FSDP with fp32 main parameters "
                    "(--megatron-fsdp-main-params-dtype fp32)"
                )
            elif tuple(param._local_tensor.shape) != matrix.local_shape:
                problems.append(
                    f"{matrix.fqn}: expected a local shard of shape {matrix.local_shape}, got "
                    f"{tuple(param._local_tensor.shape)}. Pass the layout the model was sharded by"
                )
        return problems

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update parameters and momentum by their gradients.

        Args:
            closure: Unsupported; must be None.

        Raises:
            ValueError: A closure was passed.
            RuntimeError: On all ranks, when a non-empty shard of one has no gradient or one that
                is not finite, or when parameters have changed; parameters and momentum have not.
                Also when the experts' optimizer has not been stepped before.
        """
        if closure is not None:
            raise ValueError("closure: expected None, got one. Compute the loss before step().")
        if self._experts is not None and self._experts._begun is None:
            raise RuntimeError(
                "step: expected the optimizer of the experts to be stepped before that of the "
                "dense matrices, got a step of the second alone. Step FSDPMuonChainedOptimizer."
            )
        self._begun = self._begin_step()
        if self.is_stepped_first:
            return
        optimizers = [each for each in (self._experts, self) if each is not None]
        momentum: dict[Any, torch.Tensor] = {}
        results: dict[Any, torch.Tensor] = {}
        for optimizer in optimizers:
            assert optimizer._begun is not None
            momentum |= optimizer._begun[0]
            results |= optimizer._begun[1]
            optimizer._begun = None
        assert self.compute is not None  # only an optimizer that is stepped first may have none
        with fp32_matmul_precision(self.fp32_matmul_prec):
            for params in self.compute.orthogonalize(momentum, results):
                for optimizer in optimizers:
                    optimizer._apply(params)
            for optimizer in optimizers:
                optimizer._finish_step()

    def _begin_step(self) -> tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]]:
        """Check gradients, and advance the momentum.

        Returns:
            By parameter, what is orthogonalized and where the result goes, as
            :meth:`Engine.orthogonalize` takes them.
        """
        if self.checks_gradients:
            raise_where_gradients_fail(
                {param: self._matrices[param].fqn for param in self._params},
                self.parameter_changes(),
                self._device,
            )
        # Groups are read in each step: schedulers change learning rates in place.
        self._group_of = {p: group for group in self.param_groups for p in group["params"]}
        momentum = self._advance_momentum()
        # Gradients have been read: their memory takes the result. Nobody reads them after a step;
        # the training loop zeroes them before the next backward pass.
        return momentum, {
            # Without a gradient the shard is empty, and so is its momentum.
            param: rows if param.grad is None else local_tensor(param.grad)
            for param, rows in momentum.items()
        }

    def parameter_changes(self) -> list[str]:
        """List what has changed about the parameters since construction, a sentence each."""
        now = self._all_params()
        if len(now) != len(self._params) or any(
            a is not b for a, b in zip(now, self._params, strict=True)
        ):
            return [
                f"param_groups: expected the {len(self._params)} parameters of construction, got "
                f"{len(now)}, or others. Build a new optimizer"
            ]
        return [
            f"{self._matrices[param].fqn}: expected a local shard of shape "
            f"{self._matrices[param].local_shape}, got {tuple(param._local_tensor.shape)}. Build a "
            "new optimizer after the model was sharded again"
            for param in now
            if tuple(param._local_tensor.shape) != self._matrices[param].local_shape
        ]

    def _advance_momentum(self) -> dict[Any, torch.Tensor]:
        """Apply weight decay to the local rows, and the gradients to their momentum.

        Returns:
            By parameter, the local rows of what is orthogonalized, ``(local_rows, cols)`` float32:
            with Nesterov in the memory of the gradient, otherwise the momentum itself.
        """
        rows: dict[Any, torch.Tensor] = {}
        for group in self.param_groups:
            momentum = {p: local_tensor(self.state[p]["momentum_buffer"]) for p in group["params"]}
            rows |= momentum
            # Megatron-FSDP attaches no gradient to an empty shard.
            held = [param for param in group["params"] if param.grad is not None]
            advanced = advance_momentum(
                group,
                [local_tensor(param) for param in held],
                [local_tensor(param.grad) for param in held],
                [momentum[param] for param in held],
                weight_decay_method=self.weight_decay_method,
                nesterov=self.nesterov,
                overwrites_gradients=True,
            )
            rows.update(zip(held, advanced, strict=True))
        return rows

    def _orthogonalize_whole(self, param: Any, momentum: torch.Tensor) -> torch.Tensor:
        """Orthogonalize and scale a whole matrix with upstream's own code, for ``all_gather``."""
        group = self._group_of[param]
        return self.orthogonalize(
            param, momentum, **{key: value for key, value in group.items() if key != "params"}
        )

    def _by_group(self, params: Sequence[Any]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
        """Yield parameter groups, each with its own among some parameters.

        Parameters of which this rank holds no rows are left out.
        """
        by_group: dict[int, list[Any]] = defaultdict(list)
        for param in params:
            # An empty shard has no gradient, and nothing to subtract. Others are another
            # optimizer's.
            if param.grad is not None and param in self._group_of:
                by_group[id(self._group_of[param])].append(param)
        for held in by_group.values():
            yield self._group_of[held[0]], held

    def _apply(self, params: Sequence[Any]) -> None:
        """Subtract the local rows of the results from parameters, with upstream's hooks."""
        for group, held in self._by_group(params):
            if self._has_hooks:
                for param in held:
                    self.pre_weight_update_fn_inplace(param, param.grad)
            torch._foreach_add_(
                [local_tensor(param) for param in held],
                [local_tensor(param.grad) for param in held],
                alpha=-group["lr"],
            )
            if self._has_hooks:
                for param in held:
                    self.post_weight_update_fn_inplace(param)

    def _finish_step(self) -> None:
        """Do what needs the results of all parameters."""

    @property
    def _has_hooks(self) -> bool:
        """Whether a subclass looks at single updates; upstream's own hooks do nothing."""
        return any(
            getattr(type(self), name) is not getattr(OrthogonalizedOptimizer, name)
            for name in ("pre_weight_update_fn_inplace", "post_weight_update_fn_inplace")
        )


def scale_settings(muon_kwargs: Mapping[str, Any]) -> tuple[str, float]:
    """Return scale mode and extra factor among arguments of Muon, with upstream's defaults."""
    parameters = inspect.signature(TensorParallelMuon.__init__).parameters
    mode, factor = (
        muon_kwargs.get(name, parameters[name].default)
        for name in ("scale_mode", "extra_scale_factor")
    )
    return mode, factor


def _newton_schulz_settings(
    muon_kwargs: Mapping[str, Any], *, is_scaled: bool
) -> NewtonSchulzSettings:
    """Read what upstream keeps in a closure, with its defaults."""
    parameters = inspect.signature(TensorParallelMuon.__init__).parameters
    values = {name: muon_kwargs.get(name, each.default) for name, each in parameters.items()}

    mode, extra_factor = scale_settings(muon_kwargs)

    def scale(num_rows: int, num_cols: int) -> tuple[float, float]:
        """Return upstream's two factors, which it multiplies with one after the other."""
        if not is_scaled:
            return 1.0, 1.0
        return get_muon_scale_factor(num_rows, num_cols, mode=mode), extra_factor

    return NewtonSchulzSettings(
        steps=values["num_ns_steps"],
        coefficient_type=values["coefficient_type"],
        is_bf16=values["fp32_matmul_prec"] == "medium",
        scale=scale,
    )
