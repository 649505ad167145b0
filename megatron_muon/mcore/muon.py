# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Momentum on row shards, Newton-Schulz on whole matrices."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.utils import fp32_matmul_precision
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from torch.distributed.tensor import DTensor

from megatron_muon.exchange import (
    all_gather_rows,
    raise_where_any_rank_fails,
    raise_where_ranks_differ,
)
from megatron_muon.layout import RowLayout

EXCHANGES = ("all_gather",)


@dataclass(frozen=True)
class ShardedMatrix:
    """What the optimizer must know of one DTensor parameter.

    Args:
        fqn: Fully qualified name, for errors.
        layout: Row shards of the tensor-parallel-local matrix.
        group: Group the rows are cut over; None where every rank holds the whole matrix.
    """

    fqn: str
    layout: RowLayout
    group: dist.ProcessGroup | None

    @property
    def local_range(self) -> tuple[int, int]:
        """Rows ``[start, stop)`` that this rank holds."""
        return self.layout.shards[dist.get_rank(self.group) if self.group is not None else 0]

    @property
    def local_shape(self) -> tuple[int, int]:
        """Shape of this rank's shard."""
        start, stop = self.local_range
        return (stop - start, self.layout.num_cols)


class FSDPZeROTensorParallelMuon(TensorParallelMuon):
    """Step DTensor parameters whose rows Megatron-FSDP shards over data-parallel ranks.

    Equals :class:`TensorParallelMuon` on the unsharded model: momentum, Nesterov and weight decay
    are elementwise and run on this rank's rows; the matrix is assembled for Newton-Schulz, which
    stays the parent's (QKV split, tensor-parallel modes, scale), and each rank keeps its rows of
    the result. A parameter that every rank holds whole (``no_shard``) needs no assembly. It is
    stepped by this class too, because the parent would hand a DTensor to Newton-Schulz, where
    ``shape`` is global to tensor parallelism.

    Momentum buffers exist from construction, for every parameter on every rank, empty shards
    included: ranks that hold different sets of optimizer state hang Megatron-FSDP's save.

    Args:
        params: DTensor parameters or parameter groups, in the same order on all ranks.
        matrices: What each parameter is a shard of.
        exchange: How matrices are assembled; ``"all_gather"`` gives each to every rank, which
            repeats Newton-Schulz.
        **muon_kwargs: Arguments of :class:`TensorParallelMuon`.

    Raises:
        ValueError: Unknown exchange.
        RuntimeError: On all ranks, when one has a parameter without an entry in ``matrices``, not a
            float32 DTensor, or of another local shape than its layout's; or when ranks of a group
            hold different parameters or layouts.

    Attributes:
        checks_gradients: Whether :meth:`step` starts by agreeing that no gradient is missing;
            :class:`FSDPMuonChainedOptimizer` does it for all its optimizers together instead.

    Communication: at construction one flag over all ranks and one hash per group; each step a flag
        over all ranks, and for each matrix what the exchange says.
    Memory: one momentum element for each local parameter element, in the parameter's dtype.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        matrices: Mapping[torch.Tensor, ShardedMatrix],
        exchange: str = "all_gather",
        **muon_kwargs: Any,
    ) -> None:
        if exchange not in EXCHANGES:
            raise ValueError(
                f"exchange: expected one of {EXCHANGES}, got {exchange!r}. "
                "Set --muon-fsdp-exchange accordingly."
            )
        super().__init__(params, **muon_kwargs)
        self.exchange = exchange
        self.checks_gradients = True
        self._matrices = matrices
        raise_where_any_rank_fails(
            self._parameter_problems(), None, self._device, "No optimizer was built."
        )
        self._groups = self._distinct_groups()
        for group in self._groups:
            raise_where_ranks_differ(
                [
                    f"{matrix.fqn} {matrix.layout}"
                    for matrix in self._all_matrices()
                    if matrix.group is group
                ],
                group,
                self._device,
                "Muon parameters",
            )
        for param_group in self.param_groups:
            self._init_group(param_group, skip_non_grad_params=False)

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
            RuntimeError: On all ranks, when a non-empty shard of one has no gradient; parameters
                and momentum are unchanged.
        """
        if closure is not None:
            raise ValueError("closure: expected None, got one. Compute the loss before step().")
        if self.checks_gradients:
            raise_where_any_rank_fails(
                missing_gradients(
                    {param: self._matrices[param].fqn for param in self._all_params()}
                ),
                None,
                self._device,
                MISSING_GRADIENT_ADVICE,
            )
        for group in self.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            for param in group["params"]:
                update = self._momentum_update(param, group)
                with fp32_matmul_precision(self.fp32_matmul_prec):
                    orthogonal = self.orthogonalize(param, update, **settings)
                self.pre_weight_update_fn_inplace(param, orthogonal)
                param._local_tensor.add_(orthogonal._local_tensor, alpha=-group["lr"])
                self.post_weight_update_fn_inplace(param)

    def _momentum_update(self, param: DTensor, group: dict[str, Any]) -> DTensor:
        """Advance the momentum of the local rows and return what is to be orthogonalized."""
        local = param._local_tensor
        momentum = self.state[param]["momentum_buffer"]._local_tensor
        if param.grad is None:
            return _with_local(param, torch.empty_like(local))
        grad = param.grad._local_tensor  # type: ignore[attr-defined]
        self._apply_weight_decay_inplace(local, grad, group["lr"], group["weight_decay"])
        momentum.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"]) if self.nesterov else momentum
        return _with_local(param, update)

    def orthogonalize(self, p: DTensor, grad: DTensor, **kwargs: Any) -> DTensor:
        """Orthogonalize a sharded matrix.

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


MISSING_GRADIENT_ADVICE = (
    "Every trainable parameter needs a reduced gradient before step(): call finish_grad_sync() "
    "after the backward pass. Nothing was updated."
)


def missing_gradients(fqns: Mapping[Any, str]) -> list[str]:
    """List the parameters that lack a gradient on this rank although they hold elements here.

    Args:
        fqns: Names of the DTensor parameters.

    Returns:
        One sentence each.
    """
    return [
        f"{fqn}: expected a gradient on a shard of shape {tuple(param._local_tensor.shape)}, "
        "got None"
        for param, fqn in fqns.items()
        if param.grad is None and param._local_tensor.numel() > 0
    ]


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
