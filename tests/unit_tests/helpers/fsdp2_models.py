# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Matrices in every layout that FSDP2 makes, and plain ones, beside the whole ones on every rank.

Parameters are sharded by ``fully_shard`` and ``distribute_tensor``. What a rank should hold is cut
out of the whole matrix by torch's own list of chunks, which checkpoints are written by.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.subclasses import WrapperSubclass

from helpers.device import device, kind


@dataclass
class Sharded:
    """A parameter, and the whole one."""

    param: Any
    whole: Any
    keys: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    has_empty_grads: bool = True  # whether an empty part gets a gradient

    def own(self, whole: Any) -> Any:
        for chunk in self.param.__create_chunk_list__():
            ranges = zip(chunk.offsets, chunk.sizes, strict=True)
            cut = whole[tuple(slice(start, start + size) for start, size in ranges)]
            return cut.reshape(self.param._local_tensor.shape)
        return whole.new_empty(self.param._local_tensor.shape)

    def set_grad(self, whole: Any) -> None:
        """Set this rank's part of a whole gradient, as a tensor like the parameter."""
        grad = torch.zeros_like(self.param)
        part = getattr(grad, "_local_tensor", grad)
        part.copy_(self.own(whole))
        self.param.grad = grad if part.numel() or self.has_empty_grads else None

    def draw_grad(self, seed: int) -> None:
        self.set_grad(drawn(self.whole.shape, seed))


@dataclass
class Part(Sharded):
    """A parameter that torch has no list of chunks of: the part of the whole one at ``index``."""

    index: tuple[slice, ...] = ()

    def own(self, whole: Any) -> Any:
        return whole[self.index]


def draw_grads(parameters: Iterable[Any], seed: int) -> None:
    """Give each parameter, a DTensor or not, its part of a gradient that is drawn."""
    for number, param in enumerate(parameters):
        grad = drawn(param.shape, 1000 * seed + number).to(param.dtype)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = grad


def local(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, and any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def save_state(folder: str, model: Any, optimizers: Any, options: Any = None) -> None:
    state = get_state_dict(model, optimizers, options=options)
    dcp.save(dict(zip("mo", state, strict=True)), checkpoint_id=folder)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint; an object is a tensor of no elements."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return {key: tensors.get(key, torch.empty(0)) for key in metadata}


def load_state(folder: str, model: Any, optimizers: Any, options: Any = None) -> None:
    state = dict(zip("mo", get_state_dict(model, optimizers, options=options), strict=True))
    dcp.load(state, checkpoint_id=folder)
    loaded = {"model_state_dict": state["m"], "optim_state_dict": state["o"]}
    set_state_dict(model, optimizers, **loaded, options=options)


def drawn(shape: Sequence[int], seed: int) -> Any:
    """Draw a tensor, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator).to(device())


def shard(
    shape: Sequence[int],
    seed: int,
    mesh: Any,
    *,
    dim: int = 0,
    before: Any = None,
    before_dim: int | None = None,
    policy: OffloadPolicy | None = None,
    **keys: Any,
) -> Sharded:
    """Make a parameter that ``fully_shard`` has sharded, behind another mesh if there is one."""
    whole = drawn(shape, seed)
    value = whole.clone()
    if before is not None:
        placement = Replicate() if before_dim is None else Shard(before_dim)
        value = distribute_tensor(value, before, [placement])
    module = nn.Module()
    module.weight = nn.Parameter(value)
    fully_shard(
        module,
        mesh=mesh,
        shard_placement_fn=lambda param: Shard(dim),
        offload_policy=policy or OffloadPolicy(),
    )
    return Sharded(module.weight, whole, keys)


type Layout = Callable[[], list[Sharded]]


def _mesh(shape: Sequence[int], names: str) -> Any:
    return init_device_mesh(kind(), tuple(shape), mesh_dim_names=tuple(names.split()))


def _one_axis(*shapes: Sequence[int], **options: Any) -> list[Sharded]:
    mesh = _mesh([dist.get_world_size()], "shard")
    return [shard(shape, seed, mesh, **options) for seed, shape in enumerate(shapes)]


def _tensor_parallel_alone() -> list[Sharded]:
    mesh = _mesh([dist.get_world_size()], "tensor")
    wholes = [drawn((12, 24), seed) for seed in range(3)]
    return [
        Sharded(nn.Parameter(distribute_tensor(whole.clone(), mesh, [placement])), whole)
        for whole, placement in zip(wholes, (Shard(0), Shard(1), Replicate()), strict=True)
    ]


def wrapped(wrap: Callable[[Any], Any] = WrapperSubclass) -> list[Sharded]:
    """Weights of a class that keeps its elements in another tensor."""
    (each,) = _one_axis((7, 6))
    like = each.param.detach()
    rows = wrap(like.to_local().clone())
    shape = {"shape": like.shape, "stride": like.stride()}
    dtensor = DTensor.from_local(rows, like.device_mesh, like.placements, run_check=False, **shape)
    return [Sharded(nn.Parameter(dtensor), each.whole)]


def bfloat16() -> list[Sharded]:
    """Weights in bfloat16, of which the optimizer keeps float32 copies."""
    return [
        Sharded(nn.Parameter(each.param.detach().bfloat16()), each.whole.bfloat16().float())
        for each in _one_axis((10, 6), (3, 8))
    ]


def settings_of_groups() -> list[Sharded]:
    """Weights of groups with a learning rate, momentum, weight decay and splits of their own."""
    return [
        *_one_axis((4, 6), lr=1.0, momentum=0.5),
        *_one_axis((6, 3), lr=0.1, weight_decay=0.5, split_sizes=(2, 2, 2)),
    ]


def cpu_memory() -> list[Sharded]:
    """Weights that FSDP2 keeps in CPU memory."""
    return _one_axis((9, 6), (5, 9), policy=CPUOffloadPolicy(pin_memory=False))


_TRANSPOSED = {"transposed": True}
_ONE_AXIS: dict[str, Layout] = {
    # Rows that do not divide, and shards of one row and of none.
    "uneven": lambda: _one_axis((10, 12), (5, 10), (2, 5), (32, 2), (12, 32)),
    # ``shard_placement_fn`` that cuts columns.
    "columns": lambda: _one_axis((9, 24), (36, 12), dim=1),
    # Batches of 8, 6, 2 and 1 matrices, whole ones on each rank; some ranks have none.
    "experts": lambda: _one_axis((8, 6, 4), (6, 5, 7), (2, 8, 8), (1, 4, 9)),
    # Batches whose matrices are cut.
    "expert_rows": lambda: _one_axis((3, 12, 5), dim=1),
    "expert_columns": lambda: _one_axis((3, 5, 12), dim=2),
    # Experts one below the other: whole ones, halves, and what divides neither way.
    "fused": lambda: [
        *_one_axis((8 * 3, 4), split_sizes=8),
        *_one_axis((2 * 6, 5), split_sizes=2),
        *_one_axis((3 * 5, 6), split_sizes=3),
    ],
    # Repeating groups, one after the other, and equal blocks; rows that do not end with them.
    "query_key_value": lambda: [
        *_one_axis((16, 6), (24, 5), split_sizes=(4, 2, 2)),
        *_one_axis((21, 9), split_sizes=(8, 5, 8)),
        *_one_axis((18, 9), split_sizes=(6,)),
    ],
    # Stored as (inputs, outputs), beside one of the same shape that is not.
    "transposed": lambda: [*_one_axis((12, 5), **_TRANSPOSED), *_one_axis((12, 5), (5, 12))],
    # Gate and up of experts: rows or columns, halves or interleaved, cut in each dimension.
    "fused_experts": lambda: [
        *_one_axis((6, 8, 5), (3, 14, 5), split_sizes=2),
        *_one_axis((3, 12, 5), split_sizes=(5, 7), dim=1),
        *_one_axis((3, 6, 12), split_sizes=(1, 1), dim=2),
        *_one_axis((6, 5, 8), (3, 5, 14), split_sizes=2, **_TRANSPOSED),
        *_one_axis((3, 12, 8), split_sizes=(1, 1), dim=1, **_TRANSPOSED),
        *_one_axis((3, 5, 18), split_sizes=(1, 1), dim=2, **_TRANSPOSED),
    ],
    # GPT-2's query, key and value, other columns, and interleaved rows and columns.
    "fused_columns": lambda: [
        *_one_axis((7, 24), split_sizes=3, **_TRANSPOSED),
        *_one_axis((8, 10), split_sizes=(5, 2, 3), **_TRANSPOSED),
        *_one_axis((8, 18), split_sizes=(4, 7, 7), dim=1, **_TRANSPOSED),
        *_one_axis((6, 12), split_sizes=(1, 1, 1, 1), dim=1, **_TRANSPOSED),
        *_one_axis((14, 12), split_sizes=(1, 1)),
    ],
    # DTensors that no ``fully_shard`` has seen.
    "tensor_parallel_alone": _tensor_parallel_alone,
}


def hybrid() -> list[Sharded]:
    """Two replicas of two shards, some of them empty."""
    mesh = _mesh([2, 2], "replica shard")
    return [shard(shape, i, mesh) for i, shape in enumerate([(9, 12), (1, 7), (32, 8)])]


def tensor_parallel() -> list[Sharded]:
    """Columnwise, rowwise, replicated; uneven blocks; both axes on one dimension."""
    mesh = _mesh([2, 2], "shard tensor")
    shards, tensor = mesh["shard"], mesh["tensor"]
    return [
        shard((12, 6), 0, shards, before=tensor, before_dim=0),
        shard((21, 6), 1, shards, before=tensor, before_dim=0),
        shard((8, 12), 2, shards, before=tensor, before_dim=1),
        shard((5, 8), 3, shards, before=tensor),
        shard((8, 12), 4, shards, dim=1, before=tensor, before_dim=1),
        # Tensor parallelism leaves a rank nothing, and its shard has no columns or rows either.
        shard((1, 12), 5, shards, dim=1, before=tensor, before_dim=0),
        shard((12, 1), 6, shards, before=tensor, before_dim=1),
    ]


def hybrid_tensor_parallel() -> list[Sharded]:
    """Three axes, one of a single rank."""
    mesh = _mesh([2, 1, 2], "replica shard tensor")
    both = mesh["replica", "shard"]
    return [
        shard((12, 6), 0, both, before=mesh["tensor"], before_dim=0),
        shard((7, 8), 1, both, before=mesh["tensor"], before_dim=1),
        shard((4, 8), 2, both, before=mesh["tensor"]),
    ]


def expert_parallel() -> list[Sharded]:
    """Torchtitan's mesh: experts over one axis, then whole ones, or rows, over the other."""
    mesh = _mesh([2, 2], "efsdp ep")
    efsdp, ep = mesh["efsdp"], mesh["ep"]
    return [
        shard((8, 6, 4), 0, efsdp, before=ep, before_dim=0),
        shard((6, 4, 7), 1, efsdp, before=ep, before_dim=0),
        shard((4, 6, 5), 2, efsdp, dim=1, before=ep, before_dim=0),
        # More ranks than experts.
        shard((2, 6, 5), 3, efsdp, before=ep, before_dim=0),
        shard((4 * 6, 5), 4, efsdp, before=ep, before_dim=0, split_sizes=4),
        shard((2 * 5, 5), 5, efsdp, before=ep, before_dim=0, split_sizes=2),
    ]


def expert_slices() -> list[Sharded]:
    """VeOmni's: each rank of ``ep`` has other experts, under the same name."""
    mesh = _mesh([2, 2], "ep efsdp")
    first = 100 * mesh.get_local_rank("ep")
    return [shard((3, 6, 4), first, mesh["efsdp"]), shard((8, 6), first + 1, mesh["efsdp"])]


def several_meshes() -> list[Sharded]:
    """Hybrid, one axis, experts and fused weights in one optimizer."""
    plain, fused = _one_axis((10, 12), (2, 5)), _one_axis((8 * 3, 4), split_sizes=8)
    return [*hybrid(), *plain, *expert_parallel()[2:5], *fused]


def stages() -> list[Sharded]:
    """Pipeline stages: other parameters, another number of kinds, and a stage without any."""
    mesh = _mesh([2, dist.get_world_size() // 2], "stage shard")
    if mesh.get_local_rank("stage") == 1:
        return []
    shards = mesh["shard"]
    return [shard((9, 5), 0, shards), shard((4, 6, 5), 1, shards), shard((7, 5), 2, shards)]


# Shape of the whole matrix, dimension that is cut, and rows or columns of each block.
_BLOCKS: list[tuple[tuple[int, int], int | None, list[int]]] = [
    ((12, 8), 0, [6, 6]), ((8, 12), 1, [6, 6]), ((11, 8), 0, [8, 3]), ((8, 9), 1, [1, 8]),
    ((5, 7), 0, [5, 0]), ((6, 10), None, []),
]  # fmt: skip


def _plain(num_replicas: int, num_blocks: int) -> list[Sharded]:
    mesh = _mesh([num_replicas, num_blocks], "data tensor")
    block = mesh.get_local_rank("tensor")
    arguments = {
        "process_group": mesh.get_group("data") if num_replicas > 1 else None,
        "tensor_group": mesh.get_group("tensor") if num_blocks > 1 else None,
    }
    parameters: list[Sharded] = []
    for seed, (shape, dim, sizes) in enumerate(_BLOCKS):
        whole, index = drawn(shape, seed), ()
        if num_blocks > 1 and dim is not None:
            start = sum(sizes[:block])
            index = (slice(None),) * dim + (slice(start, start + sizes[block]),)
        param = nn.Parameter(whole[index].clone())
        if index:
            param.partition_dim = dim
        parameters.append(Part(param, whole, arguments=arguments, index=index))
    return parameters


# Layouts of FSDP2 by number of ranks. Four have what needs two axes.
FSDP2: dict[int, dict[str, Layout]] = {
    2: {**_ONE_AXIS, "stages": stages},
    3: _ONE_AXIS,
    4: {
        layout.__name__: layout
        for layout in (hybrid, tensor_parallel, hybrid_tensor_parallel, expert_parallel,
                       expert_slices, several_meshes, stages)
    },
}  # fmt: skip
_KERNELS = [(8, 3, 2, 2), (5, 4, 3), (6, 2, 2, 2, 2), (1, 6, 1, 2), (9, 7)]
# Plain tensors of DDP and Transformer Engine; classes, dtypes, settings and memory; convolutions,
# one with fewer channels than ranks.
OTHERS: dict[int, dict[str, Layout]] = {
    2: {
        "plain_replicas": lambda: _plain(2, 1),
        "plain_blocks": lambda: _plain(1, 2),
        **{
            layout.__name__: layout
            for layout in (wrapped, bfloat16, settings_of_groups, cpu_memory)
        },
    },
    3: {"convolutions": lambda: _one_axis(*_KERNELS, flatten=True)},
    4: {"plain_replicas_of_blocks": lambda: _plain(2, 2)},
}


def mixed_model() -> Any:
    """Return an unsharded model of an embedding, a convolution, layers, a norm and a head."""
    torch.manual_seed(3)
    layers = OrderedDict(
        embed=nn.Embedding(16, 8),
        conv=nn.Conv2d(3, 8, 2),
        up=nn.Linear(8, 12),
        gate=nn.Linear(8, 4, bias=False),
        down=nn.Linear(12, 8, bias=False),
        norm=nn.LayerNorm(8),
        head=nn.Linear(8, 16, bias=False),
    )
    return nn.Sequential(layers).to(device())


def small_model(dtype: torch.dtype = torch.float32, *, is_sharded: bool = False) -> Any:
    """Return a model of two matrices of Muon's, and an embedding and vectors of AdamW's."""
    torch.manual_seed(0)
    layers = OrderedDict(
        embed=nn.Embedding(6, 4), up=nn.Linear(4, 6), norm=nn.LayerNorm(6), down=nn.Linear(6, 4)
    )
    model = nn.Sequential(layers).to(device(), dtype)
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh(kind(), (dist.get_world_size(),)))
    return model


def step(model: Any, optimizer: Any, seed: int) -> None:
    draw_grads(model.parameters(), seed)
    optimizer.step()


def copies(model: Any, optimizer: Any) -> list[Any]:
    params = list(model.parameters())
    states = [each for param in params for each in optimizer.state.get(param, {}).values()]
    return [local(each).detach().clone() for each in (*params, *states)]


def equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def error_of(function: Callable[..., Any], *args: Any) -> str:
    """Return the text of an error that ranks agree on, or ``no error``."""
    try:
        function(*args)
    except RuntimeError as error:
        return str(error)
    return "no error"
