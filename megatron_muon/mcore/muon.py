# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Momentum on row shards, Newton-Schulz on whole matrices."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import get_muon_scale_factor
from emerging_optimizers.utils import fp32_matmul_precision
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from torch.distributed.tensor import DTensor

from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.agreement import raise_where_any_rank_fails, raise_where_ranks_differ
from megatron_muon.runtime.engine import NewtonSchulzSettings
from megatron_muon.runtime.exchange import all_gather_rows
from megatron_muon.runtime.owner_compute import OwnedParameter, OwnerCompute, ShardedMatrix


class FSDPZeROTensorParallelMuon(TensorParallelMuon):
    """Step DTensor parameters whose rows Megatron-FSDP shards over data-parallel ranks.

    Equals :class:`TensorParallelMuon` on the unsharded model: momentum, Nesterov and weight decay
    are elementwise and run on this rank's rows; Newton-Schulz runs on whole matrices, and each rank
    applies its rows of the result. A parameter that every rank holds whole (``no_shard``) is
    stepped by this class too: the parent would hand a DTensor to Newton-Schulz, where ``shape`` is
    global to tensor parallelism.

    Momentum buffers exist from construction, for every parameter on every rank, empty shards
    included: ranks that hold different sets of optimizer state hang Megatron-FSDP's save.

    Args:
        params: DTensor parameters or parameter groups, in the same order on all ranks.
        matrices: What each parameter is a shard of.
        exchange: Who orthogonalizes what, and what travels.
        busy_seconds: Estimated Newton-Schulz time of this rank in other optimizers of the model.
        **muon_kwargs: Arguments of :class:`TensorParallelMuon`.

    Raises:
        ValueError: bf16 on the wire was asked for, and Newton-Schulz runs in fp32.
        RuntimeError: On all ranks, when one has a parameter without an entry in ``matrices``, not a
            float32 DTensor, or of another local shape than its layout's; or when ranks of a group
            hold different parameters or layouts, or came to different plans.

    Attributes:
        checks_gradients: Whether :meth:`step` starts by agreeing that gradients are complete and
            finite; :class:`FSDPMuonChainedOptimizer` does it for all its optimizers together.
        owner_computes: Plans and their engines, experts first; empty with ``all_gather``.
        newton_schulz_seconds: Estimated Newton-Schulz time of this rank, ``busy_seconds`` included.

    Communication: at construction a flag over all ranks and a hash, and see
        :class:`~megatron_muon.runtime.owner_compute.OwnerCompute`; each step a flag over all
        ranks, and what the exchange says.
    Memory: one momentum element for each local parameter element, in the parameter's dtype, and
        the buffers of each :class:`~megatron_muon.runtime.engine.Engine`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        matrices: Mapping[torch.Tensor, ShardedMatrix],
        exchange: ExchangeSettings | None = None,
        busy_seconds: float = 0.0,
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
        self.newton_schulz_seconds = busy_seconds
        self.owner_computes: list[OwnerCompute] = []
        if self.exchange.exchange == "owner":
            self._build_owner_computes(_newton_schulz_settings(muon_kwargs))
        else:
            self._compare_matrices()
        for param_group in self.param_groups:
            self._init_group(param_group, skip_non_grad_params=False)

    def _build_owner_computes(self, newton_schulz: NewtonSchulzSettings) -> None:
        """Plan experts first: they mostly lie whole on a rank, and dense matrices fill the rest.

        Without expert parallelism both kinds are in one optimizer, over groups of their own.
        """
        by_kind = {
            is_expert: [p for p in self._params if getattr(p, "expert_tp", False) is is_expert]
            for is_expert in (True, False)
        }
        raise_where_ranks_differ(
            [f"experts {bool(by_kind[True])}, dense matrices {bool(by_kind[False])}"],
            dist.group.WORLD,  # type: ignore[arg-type]
            self._device,
            "kinds of Muon parameters",
        )
        for params in by_kind.values():
            if params:
                owner_compute = OwnerCompute(
                    [self._owned(param) for param in params],
                    newton_schulz,
                    self.exchange,
                    busy_seconds=self.newton_schulz_seconds,
                    device=self._device,
                )
                self.newton_schulz_seconds = owner_compute.seconds
                self.owner_computes.append(owner_compute)

    def _compare_matrices(self) -> None:
        """Check that the ranks of each shard group hold the same parameters, cut the same way."""
        for group in self._distinct_groups():
            entries = [f"{m.fqn} {m.layout}" for m in self._all_matrices() if m.group is group]
            raise_where_ranks_differ(entries, group, self._device, "Muon parameters")

    def _owned(self, param: Any) -> OwnedParameter:
        """Tell how upstream's ``orthogonalize`` would cut a parameter, and over which ranks."""
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

    def _all_matrices(self) -> list[ShardedMatrix]:
        return [self._matrices[param] for param in self._all_params()]

    def _distinct_groups(self) -> list[dist.ProcessGroup]:
        """List the shard groups in parameter order, which is the same on all their ranks."""
        groups: list[dist.ProcessGroup] = []
        for matrix in self._all_matrices():
            if matrix.group is not None and all(matrix.group is not group for group in groups):
                groups.append(matrix.group)
        return groups

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
        groups = {param: group for group in self.param_groups for param in group["params"]}
        for param, group in groups.items():
            self._advance_momentum(param, group)
        if not self.owner_computes:
            for param, group in groups.items():
                settings = {key: value for key, value in group.items() if key != "params"}
                out = torch.empty_like(param._local_tensor)
                update = _with_local(param, self._update(param, group, out))
                with fp32_matmul_precision(self.fp32_matmul_prec):
                    orthogonal = self.orthogonalize(param, update, **settings)
                self._apply(param, group, orthogonal)
            return

        def update_of(param: Any, out: torch.Tensor) -> torch.Tensor:
            """Return the local rows of what is orthogonalized."""
            return self._update(param, groups[param], out)

        def apply_to(param: Any, rows: torch.Tensor) -> None:
            """Apply the local rows of the result."""
            self._apply(param, groups[param], _with_local(param, rows))

        with fp32_matmul_precision(self.fp32_matmul_prec):
            for owner_compute in self.owner_computes:
                owner_compute.step(update_of, apply_to)

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

    def _advance_momentum(self, param: DTensor, group: dict[str, Any]) -> None:
        """Apply weight decay to the local rows, and the gradient to their momentum."""
        if param.grad is None:
            return
        local, grad = param._local_tensor, param.grad._local_tensor  # type: ignore[attr-defined]
        self._apply_weight_decay_inplace(local, grad, group["lr"], group["weight_decay"])
        momentum = self.state[param]["momentum_buffer"]._local_tensor
        momentum.lerp_(grad, 1 - group["momentum"])

    def _update(self, param: DTensor, group: dict[str, Any], out: torch.Tensor) -> torch.Tensor:
        """Return the local rows of what is orthogonalized: the momentum, Nesterov's in ``out``."""
        momentum = self.state[param]["momentum_buffer"]._local_tensor
        if not self.nesterov or param.grad is None:
            return momentum
        grad = param.grad._local_tensor  # type: ignore[attr-defined]
        return torch.lerp(grad, momentum, group["momentum"], out=out)

    def _apply(self, param: DTensor, group: dict[str, Any], orthogonal: DTensor) -> None:
        """Apply the local rows of the result."""
        self.pre_weight_update_fn_inplace(param, orthogonal)
        param._local_tensor.add_(orthogonal._local_tensor, alpha=-group["lr"])
        self.post_weight_update_fn_inplace(param)

    def orthogonalize(self, p: DTensor, grad: DTensor, **kwargs: Any) -> DTensor:
        """Orthogonalize a sharded matrix on every rank: the exchange ``all_gather``.

        Args:
            p: The parameter; its attributes tell QKV and tensor-parallel layout.
            grad: Row shard of the (Nesterov) momentum, sharded like ``p``, float32.
            **kwargs: Settings of the parameter group, for the parent.

        Returns:
            This rank's rows of the scaled orthogonal matrix, a DTensor with the mesh and
            placements of ``p``, float32.

        Communication: one :func:`all_gather_rows` over the shard group, and the parent's over the
            tensor-parallel group in ``duplicated`` and ``distributed`` mode.
        Memory: see :func:`all_gather_rows`; the whole matrix and its orthogonalization.
        """
        matrix = self._matrices[p]
        rows = grad._local_tensor
        if matrix.group is not None and dist.get_world_size(matrix.group) > 1:
            rows = all_gather_rows(rows, matrix.layout, matrix.group)
        orthogonal = super().orthogonalize(p, rows, **kwargs)
        start, stop = matrix.local_range
        return _with_local(p, orthogonal[start:stop])


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
