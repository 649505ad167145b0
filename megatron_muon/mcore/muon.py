# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Momentum on row shards, Newton-Schulz on whole matrices."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
from emerging_optimizers.utils import fp32_matmul_precision
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from torch.distributed.tensor import DTensor

from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.agreement import raise_where_any_rank_fails, raise_where_ranks_differ
from megatron_muon.runtime.all_gather_compute import AllGatherCompute
from megatron_muon.runtime.newton_schulz import NewtonSchulzSettings
from megatron_muon.runtime.owner_compute import OwnedParameter, OwnerCompute
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

    Args:
        params: DTensor parameters or parameter groups, in the same order on all ranks.
        matrices: What each parameter is a shard of.
        exchange: Who orthogonalizes what, and what travels; None for the defaults.
        initial_load_s: Estimated Newton-Schulz seconds of this rank in other optimizers of the
            model.
        **muon_kwargs: Arguments of :class:`TensorParallelMuon`.

    Raises:
        ValueError: bf16 on the wire was asked for, and Newton-Schulz runs in fp32.
        RuntimeError: On all ranks, when one has a parameter without an entry in ``matrices``, not a
            float32 DTensor, or of another local shape than its layout's; or when ranks of a group
            hold different parameters or layouts, or came to different plans.

    Communication: at construction a flag over all ranks and a hash, and see
        :class:`~megatron_muon.runtime.owner_compute.OwnerCompute`. Each step: a flag over all
        ranks, and that of ``orthogonalize`` of each of :attr:`computes`.
    Memory: one momentum element for each local parameter element, in the parameter's dtype, and
        the buffers of each :class:`~megatron_muon.runtime.engine.Engine`.
    """

    # Whether step() starts by agreeing that gradients are complete and finite.
    # FSDPMuonChainedOptimizer turns it off, and checks gradients of all its optimizers together.
    checks_gradients: bool
    # One for experts and one for dense matrices, experts first; a single one with all_gather.
    computes: list[OwnerCompute | AllGatherCompute]
    # Estimated Newton-Schulz seconds of this rank, the initial load included.
    load_s: float
    exchange: ExchangeSettings
    _matrices: Mapping[torch.Tensor, ShardedMatrix]
    _params: list[Any]  # as at construction
    _group_of: dict[Any, dict[str, Any]]  # parameter group of each parameter, in this step

    def __init__(
        self,
        params: Iterable[Any],
        *,
        matrices: Mapping[torch.Tensor, ShardedMatrix],
        exchange: ExchangeSettings | None = None,
        initial_load_s: float = 0.0,
        **muon_kwargs: Any,
    ) -> None:
        super().__init__(params, **muon_kwargs)
        self.exchange = exchange or ExchangeSettings()
        self.checks_gradients = True
        self.load_s = initial_load_s
        self._matrices = matrices
        self._params = self._all_params()
        raise_where_any_rank_fails(
            self._parameter_problems(), None, self._device, "No optimizer was built."
        )
        if self.exchange.mode == "owner":
            self.computes = [*self._owner_computes(_newton_schulz_settings(muon_kwargs))]
        else:
            by_param = {param: matrices[param] for param in self._params}
            self.computes = [AllGatherCompute(by_param, self._orthogonalize_whole, self._device)]
        for param_group in self.param_groups:
            self._init_group(param_group, skip_non_grad_params=False)

    def _owner_computes(self, newton_schulz: NewtonSchulzSettings) -> Iterator[OwnerCompute]:
        """Plan experts first: they mostly lie whole on a rank, and dense matrices fill the rest.

        Without expert parallelism both kinds are in one optimizer, over groups of their own.
        """
        by_kind = {
            is_expert: [p for p in self._params if getattr(p, "expert_tp", False) is is_expert]
            for is_expert in (True, False)
        }
        # Each OwnerCompute is collective. A rank without experts would miss the first one.
        raise_where_ranks_differ(
            [f"experts {bool(by_kind[True])}, dense matrices {bool(by_kind[False])}"],
            dist.group.WORLD,  # type: ignore[arg-type]
            self._device,
            "kinds of Muon parameters",
        )
        for params in by_kind.values():
            if params:
                compute = OwnerCompute(
                    [self._owned(param) for param in params],
                    newton_schulz,
                    self.exchange,
                    initial_load_s=self.load_s,
                    device=self._device,
                )
                self.load_s = compute.load_s
                yield compute

    def _owned(self, param: Any) -> OwnedParameter:
        """Return how upstream's ``orthogonalize`` splits a parameter, and over which ranks."""
        groups = self.pg_collection
        tensor_group = partition_dim = None
        if groups is not None and self.tp_mode != "blockwise":
            tensor_group = groups.expt_tp if getattr(param, "expert_tp", False) else groups.tp
            partition_dim = getattr(param, "partition_dim", None)
        is_joined = (
            tensor_group is not None
            and partition_dim in (0, 1)
            and dist.get_world_size(tensor_group) > 1
        )
        split_shapes = None
        if self.split_qkv and self.is_qkv_fn is not None and self.is_qkv_fn(param):
            split_shapes = tuple(getattr(param, "qkv_split_shapes", None) or self.qkv_split_shapes)
        return OwnedParameter(
            param,
            self._matrices[param],
            tensor_group if is_joined else None,
            partition_dim if is_joined else None,
            split_shapes,
        )

    def _all_params(self) -> list[Any]:
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def _device(self) -> torch.device:
        param = self._all_params()[0]
        return param._local_tensor.device if isinstance(param, DTensor) else param.device

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
        """
        if closure is not None:
            raise ValueError("closure: expected None, got one. Compute the loss before step().")
        if self.checks_gradients:
            raise_where_gradients_fail(
                {param: self._matrices[param].fqn for param in self._params},
                self.parameter_changes(),
                self._device,
            )
        # Groups are read in each step: schedulers change learning rates in place.
        self._group_of = {p: group for group in self.param_groups for p in group["params"]}
        for param in self._params:
            self._advance_momentum(param)
        with fp32_matmul_precision(self.fp32_matmul_prec):
            for compute in self.computes:
                for param, rows in compute.orthogonalize(self._momentum_rows):
                    self._apply_rows(param, rows)

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

    def _advance_momentum(self, param: Any) -> None:
        """Apply weight decay to the local rows, and the gradient to their momentum."""
        # Megatron-FSDP attaches no gradient to an empty shard.
        if param.grad is None:
            return
        group = self._group_of[param]
        local, grad = param._local_tensor, param.grad._local_tensor
        self._apply_weight_decay_inplace(local, grad, group["lr"], group["weight_decay"])
        momentum = self.state[param]["momentum_buffer"]._local_tensor
        momentum.lerp_(grad, 1 - group["momentum"])

    def _momentum_rows(self, param: Any, out: torch.Tensor) -> torch.Tensor:
        """Return the local rows of the momentum. With Nesterov they are written to ``out``."""
        momentum = self.state[param]["momentum_buffer"]._local_tensor
        if not self.nesterov or param.grad is None:
            return momentum
        grad = param.grad._local_tensor
        return torch.lerp(grad, momentum, self._group_of[param]["momentum"], out=out)

    def _orthogonalize_whole(self, param: Any, momentum: torch.Tensor) -> torch.Tensor:
        """Orthogonalize and scale a whole matrix with upstream's own code, for ``all_gather``."""
        group = self._group_of[param]
        return self.orthogonalize(
            param, momentum, **{key: value for key, value in group.items() if key != "params"}
        )

    def _apply_rows(self, param: Any, rows: torch.Tensor) -> None:
        """Subtract the local rows of the result from the parameter, with upstream's hooks."""
        self.pre_weight_update_fn_inplace(param, _with_local(param, rows))
        param._local_tensor.add_(rows, alpha=-self._group_of[param]["lr"])
        self.post_weight_update_fn_inplace(param)


def raise_where_gradients_fail(
    fqns: Mapping[Any, str], problems: Sequence[str], device: torch.device
) -> None:
    """Check on all ranks together that every gradient is there and finite.

    Args:
        fqns: Names of the DTensor parameters.
        problems: What else is wrong on this rank, a sentence each.
        device: Where a flag is reduced.

    Raises:
        RuntimeError: On all ranks, naming rank and parameter, when a non-empty shard of one has no
            gradient, or one that is not finite.

    Communication: one all-reduce of a single int32 over all ranks of the job, read on the host.
    """
    missing = [
        f"{fqn}: expected a gradient on a shard of shape {tuple(param._local_tensor.shape)}, "
        "got None"
        for param, fqn in fqns.items()
        if param.grad is None and param._local_tensor.numel() > 0
    ]
    grads = {
        fqn: param.grad._local_tensor
        for param, fqn in fqns.items()
        if param.grad is not None and param.grad._local_tensor.numel() > 0
    }
    # A norm is not finite where an element is not; it is a fused pass, and a fast one.
    norms = torch._foreach_norm(list(grads.values())) if grads else [torch.zeros((), device=device)]
    not_finite = ~torch.stack([norm.float() for norm in norms]).isfinite()
    raise_where_any_rank_fails(
        [*problems, *missing],
        None,
        device,
        "Every trainable parameter needs a finite, reduced gradient before step(): call "
        "finish_grad_sync() after the backward pass, and look for NaN or Inf in the loss. Nothing "
        "was updated.",
        suspects=not_finite.sum(dtype=torch.int32),
        explain=lambda: [
            f"{fqn}: expected a finite gradient, got NaN or Inf, or a norm beyond float32, in a "
            f"shard of shape {tuple(grad.shape)}"
            for (fqn, grad), is_bad in zip(grads.items(), not_finite.tolist(), strict=False)
            if is_bad
        ],
    )


def _newton_schulz_settings(muon_kwargs: Mapping[str, Any]) -> NewtonSchulzSettings:
    """Read what upstream keeps in a closure, with its defaults."""
    parameters = inspect.signature(TensorParallelMuon.__init__).parameters
    values = {name: muon_kwargs.get(name, each.default) for name, each in parameters.items()}

    def scale(num_rows: int, num_cols: int) -> tuple[float, float]:
        """Return upstream's two factors, which it multiplies with one after the other."""
        factor = get_muon_scale_factor(num_rows, num_cols, mode=values["scale_mode"])
        return factor, values["extra_scale_factor"]

    return NewtonSchulzSettings(
        steps=values["num_ns_steps"],
        coefficient_type=values["coefficient_type"],
        is_bf16=values["fp32_matmul_prec"] == "medium",
        scale=scale,
    )


def _with_local(like: DTensor, local: torch.Tensor) -> DTensor:
    """Wrap a local tensor as a DTensor with the mesh, placements and global shape of another."""
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
