# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon on hand-made row shards, beside upstream's Muon on the whole matrices."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from helpers.device import device, kind
from helpers.device import init_group as init_group
from helpers.layouts import rows_cut_at

# Rows of each rank, for (rows, cols); tall, wide and square, uneven, empty and one-row shards.
LAYOUTS: dict[int, list[tuple[int, list[int]]]] = {
    1: [(24, [48]), (48, [24]), (32, [32])],
    2: [(24, [31, 17]), (48, [24, 0]), (32, [1, 31]), (8, [16, 16])],
    3: [(24, [0, 47, 1]), (48, [8, 8, 8]), (32, [0, 0, 32]), (8, [5, 1, 2])],
    4: [(24, [1, 0, 46, 1]), (48, [7, 5, 0, 12]), (32, [8, 8, 8, 8]), (20, [3, 0, 0, 1])],
    8: [
        (24, [1, 0, 30, 1, 0, 0, 16, 0]),
        (48, [0, 0, 0, 0, 24, 0, 0, 0]),
        (48, [3, 3, 3, 3, 3, 3, 3, 3]),
        (32, [0, 0, 0, 0, 0, 0, 1, 31]),
        (20, [1, 0, 0, 0, 0, 0, 0, 1]),
    ],
}
# Two query groups of 4 + 2 + 2 rows a head dimension of 4: borders at rows 8, 12, 16, 24, ...
QKV_SPLIT = [8, 4, 4]
QKV_ROWS = {1: [32], 2: [7, 25], 3: [0, 9, 23], 4: [1, 10, 0, 21], 8: [5, 6, 0, 0, 8, 1, 2, 10]}


def whole_matrix(shape: tuple[int, int], seed: int, block: int) -> Any:
    """Draw the same matrix on every rank of a shard group."""
    import torch

    generator = torch.Generator().manual_seed(seed + 10**6 * block)
    return torch.randn(shape, generator=generator).to(device())


def with_local(like: Any, local: Any) -> Any:
    """Wrap local rows as a DTensor with the mesh, placements and global shape of another."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


@dataclass
class Optimizers:
    """Muon on shards and upstream's Muon, over the same parameters.

    Args:
        sharded: Ours, with a ``muon_step`` over it alone, whose ``step`` and ``compute`` it has.
        whole: Upstream's, on the tensor-parallel-local matrices.
        params: DTensor parameters, and the whole ones, and what the first are shards of.
        tensor_rank: Position of this rank in the tensor group.
    """

    sharded: Any
    whole: Any
    params: list[tuple[Any, Any, Any]]
    tensor_rank: int

    def set_gradients(self, step: int) -> None:
        """Give both the same gradients."""
        for index, (param, reference, matrix) in enumerate(self.params):
            grad = whole_matrix(reference.shape, 1000 * step + index, self._block(param))
            start, stop = matrix.own_box[0]
            reference.grad = grad.clone()
            # As Megatron-FSDP attaches gradients: none where the shard is empty.
            param.grad = with_local(param, grad[start:stop].clone()) if stop > start else None

    def _block(self, param: Any) -> int:
        return self.tensor_rank if param.partition_dim >= 0 else 0

    def state(self) -> list[tuple[Any, Any]]:
        """Copy the local parameters and their momentum."""
        return [
            (
                param._local_tensor.clone(),
                self.sharded.state[param]["momentum_buffer"]._local_tensor.clone(),
            )
            for param, _, _ in self.params
        ]

    def set_state(self, state: Sequence[tuple[Any, Any]]) -> None:
        """Copy back what :meth:`state` returned."""
        for (param, _, _), (value, momentum) in zip(self.params, state, strict=True):
            param._local_tensor.copy_(value)
            self.sharded.state[param]["momentum_buffer"]._local_tensor.copy_(momentum)

    def differences(self, atol: float = 0.0, rtol: float = 0.0) -> list[str]:
        """List parameters and momentum that differ from the reference's rows."""
        import torch

        different = []
        for (value, momentum), (_, reference, matrix) in zip(
            self.state(), self.params, strict=True
        ):
            rows = slice(*matrix.own_box[0])
            expected = self.whole.state[reference]["momentum_buffer"][rows]
            # Offloaded momentum is in CPU memory.
            if not torch.equal(momentum.to(expected), expected):
                different.append(f"{matrix.name}: momentum")
            if not torch.allclose(value, reference[rows], atol=atol, rtol=rtol):
                worst = (value - reference[rows]).abs().max().item()
                different.append(f"{matrix.name}: parameter, by up to {worst:.1e}")
        return different


def build_optimizers(
    num_shards: int,
    settings: dict[str, Any] | None = None,
    exchange: dict[str, Any] | None = None,
    *,
    num_tensor_ranks: int = 1,
    num_replicas: int = 1,
    cases: Sequence[tuple[int, Sequence[int]]] | None = None,
    blocks: Sequence[Sequence[int]] | None = None,
    by_head: Sequence[bool] = (),
    sharded: Any = None,
    whole: Any = None,
) -> Optimizers:
    """Make both optimizers on a grid of replicas x shards x tensor-parallel ranks.

    Args:
        num_shards: Ranks that rows are sharded over.
        settings: Arguments of both optimizers.
        exchange: Arguments of ``ExchangeSettings``.
        num_tensor_ranks: Tensor-parallel ranks.
        num_replicas: Ranks that hold the same rows.
        cases: Columns and rows by shard of each matrix, the last one that of query, key and value;
            None for those of :data:`LAYOUTS`.
        blocks: Rows of a group that go to each block, for each matrix; None for the last one alone.
        by_head: Whether the blocks of each matrix are heads, which tensor-parallel ranks do not
            join; empty for none.
        sharded: Class of ours; None for Muon's.
        whole: Class of the reference; None for upstream's Muon.
    """
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
    from torch.distributed.device_mesh import init_device_mesh

    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon, build_muon_step
    from megatron_muon.plan.settings import ExchangeSettings

    names = ("replica", "shard", "tensor")
    mesh = init_device_mesh(
        kind(), (num_replicas, num_shards, num_tensor_ranks), mesh_dim_names=names
    )
    tensor = mesh["tensor"].get_group()
    params = []
    cases = cases or [*LAYOUTS[num_shards], (24, QKV_ROWS[num_shards])]
    for index, (cols, rows) in enumerate(cases):
        layout = rows_cut_at(sum(rows), cols, list(rows))
        param, reference = _parameter_and_reference(
            index,
            layout,
            mesh,
            is_qkv=blocks is not None or index == len(cases) - 1,
            split_shapes=blocks[index] if blocks is not None else None,
        )
        if by_head and by_head[index]:
            # Upstream joins what is sharded.
            param.is_split_by_head, reference.partition_dim = True, -1
        part = _part(f"layer.{index}.weight", param, layout, mesh)
        params.append((param, reference, part))
    arguments = _arguments(tensor) | (settings or {})
    muon = (sharded or FSDPZeROTensorParallelMuon)(
        [param for param, _, _ in params],
        tensor_shards={param: part for param, _, part in params},
        **arguments,
    )
    muon.muon_step = build_muon_step([muon], ExchangeSettings(**(exchange or {})))
    muon.step, muon.engine = muon.muon_step.step, muon.muon_step.engine
    return Optimizers(
        muon,
        (whole or TensorParallelMuon)([reference for _, reference, _ in params], **arguments),
        params,
        tensor.rank(),
    )


def _arguments(tensor: Any) -> dict[str, Any]:
    """Return the arguments of both optimizers, for a group of tensor-parallel ranks."""
    return {
        "lr": 0.02,
        "weight_decay": 0.1,
        "nesterov": True,
        "split_qkv": True,
        "is_qkv_fn": lambda param: param.is_qkv,
        "qkv_split_shapes": QKV_SPLIT,
        "pg_collection": SimpleNamespace(tp=tensor, expt_tp=tensor, gtp_remat=None),
        "tp_mode": "duplicated" if tensor.size() > 1 else "blockwise",
    }


def _parameter_and_reference(
    index: int, layout: Any, mesh: Any, *, is_qkv: bool, split_shapes: Sequence[int] | None
) -> tuple[Any, Any]:
    """Make this rank's rows of a matrix, and the whole matrix that upstream steps."""
    import torch

    tensor = mesh["tensor"].get_group()
    partition_dim = (0, 1, -1)[0 if is_qkv else index % 3] if tensor.size() > 1 else -1
    shape = (layout.num_rows, layout.num_cols)
    value = whole_matrix(shape, index, tensor.rank() * (partition_dim >= 0))
    reference = torch.nn.Parameter(value.clone())
    start, stop = layout.shards[mesh["shard"].get_group().rank()]
    param = _sharded_parameter(value, slice(start, stop), mesh, partition_dim)
    for each in (param, reference):
        each.is_qkv, each.partition_dim = is_qkv, partition_dim
        if split_shapes is not None:
            each.qkv_split_shapes = list(split_shapes)
    return param, reference


def _sharded_parameter(whole: Any, rows: slice, mesh: Any, partition_dim: int) -> Any:
    """Make a DTensor parameter of some rows of a matrix, as Megatron-FSDP does."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape, names, placements = list(whole.shape), ["replica", "shard"], [Replicate(), Shard(0)]
    if partition_dim >= 0:
        shape[partition_dim] *= mesh["tensor"].size()
        names, placements = [*names, "tensor"], [*placements, Shard(partition_dim)]
    param = torch.nn.Parameter(
        DTensor.from_local(
            whole[rows].clone(),
            mesh[tuple(names)],
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=(shape[1], 1),
        )
    )
    # What is read of Megatron-FSDP beside its rows.
    param.orig_param = torch.empty(whole.shape, device="meta")
    index = SimpleNamespace(tp_dim="tensor", get_submesh=lambda names: mesh[names])
    buffers = SimpleNamespace(
        dist_index=index,
        param_to_param_group={param.orig_param: 0},
        parameter_groups=[SimpleNamespace(is_expert_param=False)],
    )
    param._megatron_fsdp_model = SimpleNamespace(param_and_grad_buffer=buffers)
    return param


def _part(name: str, param: Any, layout: Any, mesh: Any) -> Any:
    """Describe the rows of a matrix that the ranks of this tensor-parallel rank hold."""
    from torch.distributed.tensor import Replicate, Shard

    from megatron_muon.rows.parameters import PlannedParameter, as_dtensor

    ranks = mesh.mesh[:, :, mesh.get_local_rank("tensor")].tolist()
    cols = (0, layout.num_cols)
    boxes = {
        rank: (rows, cols)
        for replica in ranks
        for rank, rows in zip(replica, layout.shards, strict=True)
    }
    shape = (layout.num_rows, layout.num_cols)
    view = as_dtensor(param._local_tensor, mesh["replica", "shard"], [Replicate(), Shard(0)], shape)
    return PlannedParameter(name, param, view, known_boxes=boxes)


def each_of(function: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> list[Any]:
    """Start the group of all ranks, and return what a function returns for each case."""
    init_group()
    return [function(*case) for case in cases]


def step_both(optimizers: Optimizers, comm_dtype: str, num_steps: int = 3) -> None:
    """Step both, the reference with the norm of this ``comm_dtype``."""
    from contextlib import nullcontext
    from unittest import mock

    from helpers.whole_matrices import float64_normalize

    norm: Any = nullcontext()
    if comm_dtype == "bf16":
        norm = mock.patch("torch.nn.functional.normalize", float64_normalize)
    for step in range(num_steps):
        optimizers.set_gradients(step)
        optimizers.sharded.step()
        with norm:
            optimizers.whole.step()


@contextmanager
def split_always(num_parts: int) -> Iterator[None]:
    """Split every matrix that may be split over this many owners, whether it pays or not."""
    from unittest import mock

    def choose(matrices: Sequence[Any], *_: Any) -> list[int]:
        """Split all, over at most the ranks that there are."""
        return [min(num_parts, len(each.ranks)) for each in matrices]

    with mock.patch("megatron_muon.plan.owners._choose_parts", choose):
        yield
