# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon on hand-made row shards, beside upstream's Muon on the whole matrices."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from helpers.device import init_group as init_group
from helpers.device import kind
from helpers.fsdp2_models import Part, drawn
from helpers.whole_matrices import WholeMuon, differences, float64_normalize

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
    return drawn(shape, seed + 10**6 * block)


def with_local(like: Any, local: Any) -> Any:
    """Wrap local rows as a DTensor with the mesh, placements and global shape of another."""
    return _dtensor(local, like.device_mesh, like.placements, like.shape)


def _dtensor(local: Any, mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> Any:
    # Of matrices and vectors: only their rows are sharded.
    shape, stride = torch.Size(shape), torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


@dataclass
class Optimizers:
    """An optimizer on row shards and the reference on whole parameters."""

    sharded: Any
    whole: Any
    # Sharded parameter, whole one, and a part with the name and box of the first.
    params: list[tuple[Any, Any, Any]]
    tensor_rank: int = 0
    key: str = "momentum_buffer"

    def set_gradients(self, step: int) -> None:
        for index, (param, reference, part) in enumerate(self.params):
            block = self.tensor_rank if getattr(param, "partition_dim", -1) >= 0 else 0
            grad = whole_matrix(reference.shape, 1000 * step + index, block)
            start, stop = part.own_box[0]
            reference.grad = grad.clone()
            # As Megatron-FSDP attaches gradients: none where the shard is empty.
            param.grad = with_local(param, grad[start:stop].clone()) if stop > start else None

    def state(self) -> list[tuple[Any, Any]]:
        return [
            (param._local_tensor.clone(), self.sharded.state[param][self.key]._local_tensor.clone())
            for param, _, _ in self.params
        ]

    def set_state(self, state: Sequence[tuple[Any, Any]]) -> None:
        for (param, _, _), (value, momentum) in zip(self.params, state, strict=True):
            param._local_tensor.copy_(value)
            self.sharded.state[param][self.key]._local_tensor.copy_(momentum)

    def differences(self, atol: float = 0.0, rtol: float = 0.0) -> list[str]:
        """List parameters, and tensors of their states, that differ from the reference's rows."""
        different = []
        for param, reference, part in self.params:
            rows = slice(*part.own_box[0])
            for key, whole in self.whole.state[reference].items():
                if torch.is_tensor(whole) and whole.shape == reference.shape:
                    found = self.sharded.state[param][key]._local_tensor
                    if not torch.equal(found.to(whole), whole[rows]):
                        different.append(f"{part.name}: {key}")
            if not torch.allclose(param._local_tensor, reference[rows], atol=atol, rtol=rtol):
                worst = (param._local_tensor - reference[rows]).abs().max().item()
                different.append(f"{part.name}: parameter, by up to {worst:.1e}")
        return different

    def joined(self, index: int, seed: int) -> Any:
        """Draw a matrix as Newton-Schulz sees it: of all tensor-parallel ranks if they join it."""
        param, reference, _ = self.params[index]
        is_cut, tensor = param.partition_dim >= 0, self.sharded.pg_collection.tp
        if not (is_cut and self.sharded.is_joined(param)):
            return whole_matrix(reference.shape, seed, self.tensor_rank * is_cut)
        blocks = [whole_matrix(reference.shape, seed, rank) for rank in range(tensor.size())]
        return torch.cat(blocks, param.partition_dim)

    def joined_parts(self) -> list[Part]:
        """Return parameters for ``WholeMuon``, with the joined matrices and their blocks."""
        parts = []
        for index, (param, reference, part) in enumerate(self.params):
            whole, box = self.joined(index, index), []
            for axis, (start, stop) in enumerate(part.own_box):
                is_joined = whole.shape[axis] > reference.shape[axis]
                first = self.tensor_rank * reference.shape[axis] * is_joined
                box.append(slice(first + start, first + stop))
            keys = {"split_sizes": self.sharded.planned(param).blocks}
            parts.append(Part(param, whole, keys, index=tuple(box)))
        return parts


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
            None for those of ``LAYOUTS``.
        blocks: Rows of a group that go to each block, for each matrix; None for the last one alone.
        by_head: Whether the blocks of each matrix are heads, which tensor-parallel ranks do not
            join; empty for none.
        sharded: Class of ours; None for Muon's.
        whole: Class of the reference; None for upstream's Muon.
    """
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon, build_muon_step
    from megatron_muon.plan.settings import ExchangeSettings

    names = ("replica", "shard", "tensor")
    shape = (num_replicas, num_shards, num_tensor_ranks)
    mesh = init_device_mesh(kind(), shape, mesh_dim_names=names)
    tensor = mesh["tensor"].get_group()
    cases = cases or [*LAYOUTS[num_shards], (24, QKV_ROWS[num_shards])]
    params = []
    for index, (cols, rows) in enumerate(cases):
        is_qkv = blocks is not None or index == len(cases) - 1
        dim = (0, 1, -1)[0 if is_qkv else index % 3] if num_tensor_ranks > 1 else -1
        param, reference, part = _sharded_matrix(index, cols, rows, mesh, dim)
        param.is_qkv = reference.is_qkv = is_qkv
        if blocks is not None:
            param.qkv_split_shapes = reference.qkv_split_shapes = list(blocks[index])
        if by_head and by_head[index]:
            # Upstream joins what is sharded.
            param.is_split_by_head, reference.partition_dim = True, -1
        params.append((param, reference, part))
    arguments = {
        "lr": 0.02,
        "weight_decay": 0.1,
        "nesterov": True,
        "split_qkv": True,
        "is_qkv_fn": lambda param: param.is_qkv,
        "qkv_split_shapes": QKV_SPLIT,
        "pg_collection": SimpleNamespace(tp=tensor, expt_tp=tensor, gtp_remat=None),
        "tp_mode": "duplicated" if num_tensor_ranks > 1 else "blockwise",
        **(settings or {}),
    }
    shards = {param: part for param, _, part in params}
    muon = (sharded or FSDPZeROTensorParallelMuon)([*shards], tensor_shards=shards, **arguments)
    muon.muon_step = build_muon_step([muon], ExchangeSettings(**(exchange or {})))
    muon.step, muon.engine = muon.muon_step.step, muon.muon_step.engine
    reference = (whole or TensorParallelMuon)([each for _, each, _ in params], **arguments)
    return Optimizers(muon, reference, params, tensor.rank())


def _sharded_matrix(
    index: int, cols: int, rows: Sequence[int], mesh: Any, partition_dim: int
) -> tuple[Any, Any, Any]:
    """Make this rank's rows of a matrix as Megatron-FSDP does, the whole matrix, and the part."""
    from megatron_muon.rows.parameters import PlannedParameter, as_dtensor

    value = whole_matrix(
        (sum(rows), cols), index, mesh.get_local_rank("tensor") * (partition_dim >= 0)
    )
    stops = list(itertools.accumulate(rows))
    ranges = list(itertools.pairwise([0, *stops]))
    local = value[slice(*ranges[mesh.get_local_rank("shard")])].clone()
    shape, names, placements = list(value.shape), ["replica", "shard"], [Replicate(), Shard(0)]
    view = as_dtensor(local, mesh["replica", "shard"], placements, value.shape)
    if partition_dim >= 0:
        shape[partition_dim] *= mesh["tensor"].size()
        names, placements = [*names, "tensor"], [*placements, Shard(partition_dim)]
    param = torch.nn.Parameter(_dtensor(local, mesh[tuple(names)], placements, shape))
    reference = torch.nn.Parameter(value.clone())
    param.partition_dim = reference.partition_dim = partition_dim
    # What is read of Megatron-FSDP beside its rows.
    param.orig_param = torch.empty(value.shape, device="meta")
    buffers = SimpleNamespace(
        dist_index=SimpleNamespace(tp_dim="tensor", get_submesh=lambda names: mesh[names]),
        param_to_param_group={param.orig_param: 0},
        parameter_groups=[SimpleNamespace(is_expert_param=False)],
    )
    param._megatron_fsdp_model = SimpleNamespace(param_and_grad_buffer=buffers)
    # The rows that all ranks of this tensor-parallel rank hold.
    boxes = {
        rank: (held, (0, cols))
        for replica in mesh.mesh[:, :, mesh.get_local_rank("tensor")].tolist()
        for rank, held in zip(replica, ranges, strict=True)
    }
    return (
        param,
        reference,
        PlannedParameter(f"layer.{index}.weight", param, view, known_boxes=boxes),
    )


def each_of(function: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> list[Any]:
    """Start the group of all ranks, and return what a function returns for each case."""
    init_group()
    return [function(*case) for case in cases]


def step_both(optimizers: Optimizers, comm_dtype: str, num_steps: int = 3) -> None:
    """Step both, the reference with the norm of this ``comm_dtype``."""
    norm: Any = nullcontext()
    if comm_dtype == "bf16":
        norm = mock.patch("torch.nn.functional.normalize", float64_normalize)
    for step in range(num_steps):
        optimizers.set_gradients(step)
        optimizers.sharded.step()
        with norm:
            optimizers.whole.step()


def differences_by_block(
    optimizers: Optimizers, comm_dtype: str, method: str, **of: Any
) -> list[str]:
    """Step beside emerging-optimizers with each block as a parameter; list what differs."""
    parts = optimizers.joined_parts()
    whole = WholeMuon(parts, comm_dtype, method, **of)
    for step in range(3):
        optimizers.set_gradients(step)
        optimizers.sharded.step()
        whole.step([optimizers.joined(i, 1000 * step + i) for i, _ in enumerate(parts)])
    return differences(parts, optimizers.sharded, whole.wholes())


@contextmanager
def split_always(num_parts: int) -> Iterator[None]:
    """Split every matrix that may be split over this many owners, whether it pays or not."""

    def choose(matrices: Sequence[Any], *_: Any) -> list[int]:
        return [min(num_parts, len(each.ranks)) for each in matrices]

    with mock.patch("megatron_muon.plan.owners._choose_parts", choose):
        yield
