# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Matrices in every layout that FSDP2 makes, and plain ones, beside the whole ones on every rank.

Parameters are sharded by ``fully_shard`` and ``distribute_tensor``. What a rank should hold is cut
out of the whole matrix by torch's own list of chunks, which checkpoints are written by.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from helpers.device import device, kind


@dataclass
class Sharded:
    """A parameter, and the whole one.

    Args:
        param: DTensor parameter.
        whole: All of it, equal on all ranks that share it.
        keys: Keys of its parameter group.
        arguments: Arguments of its optimizer.
    """

    param: Any
    whole: Any
    keys: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    def own(self, whole: Any) -> Any:
        """Cut this rank's part out of a tensor that is shaped like the whole one."""
        for chunk in self.param.__create_chunk_list__():
            ranges = zip(chunk.offsets, chunk.sizes, strict=True)
            cut = whole[tuple(slice(start, start + size) for start, size in ranges)]
            return cut.reshape(self.param._local_tensor.shape)
        return whole.new_empty(self.param._local_tensor.shape)

    def like_param(self, local: Any) -> Any:
        """Wrap a local tensor as the parameter is."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local,
            self.param.device_mesh,
            self.param.placements,
            run_check=False,
            shape=self.param.shape,
            stride=self.param.stride(),
        )

    def set_grad(self, whole: Any) -> None:
        """Set this rank's part of a whole gradient."""
        self.param.grad = self.like_param(self.own(whole).clone())

    def draw_grad(self, seed: int) -> None:
        """Give the parameter its part of a gradient that is drawn."""
        self.set_grad(drawn(self.whole.shape, seed))


@dataclass
class Part(Sharded):
    """A parameter that torch has no list of chunks of: a part of the whole one.

    Args:
        index: Of this rank's part in the whole parameter.
        has_empty_grads: Whether an empty part gets a gradient.
    """

    index: tuple[slice, ...] = ()
    has_empty_grads: bool = True

    def own(self, whole: Any) -> Any:
        """Cut this rank's part out of a tensor that is shaped like the whole one."""
        return whole[self.index]

    def set_grad(self, whole: Any) -> None:
        """Set this rank's part of a whole gradient, as a tensor like the parameter."""
        import torch

        grad = torch.zeros_like(self.param)
        local = getattr(grad, "_local_tensor", grad)
        local.copy_(self.own(whole))
        self.param.grad = grad if local.numel() or self.has_empty_grads else None


def draw_grads(parameters: Iterable[Any], seed: int) -> None:
    """Give each parameter, a DTensor or not, its part of a gradient that is drawn."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for number, param in enumerate(parameters):
        grad = drawn(param.shape, 1000 * seed + number)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = grad


def local(tensor: Any) -> Any:
    """Return the local tensor of a DTensor, and any other as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def orthogonal(stack: Any) -> Any:
    """Return what Newton-Schulz approximates."""
    import torch

    u, _, v = torch.linalg.svd(stack, full_matrices=False)
    return u @ v


def save_state(folder: str, model: Any, optimizers: Any, options: Any = None) -> None:
    """Save a model with its optimizers by ``torch.distributed.checkpoint``."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    state = get_state_dict(model, optimizers, options=options)
    dcp.save(dict(zip("mo", state, strict=True)), checkpoint_id=folder)


def load_state(folder: str, model: Any, optimizers: Any, options: Any = None) -> None:
    """Load what :func:`save_state` has saved."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, state = get_state_dict(model, optimizers, options=options)
    loaded = {"m": weights, "o": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizers,
        model_state_dict=loaded["m"],
        optim_state_dict=loaded["o"],
        options=options,
    )


def drawn(shape: Sequence[int], seed: int) -> Any:
    """Draw a tensor, the same for the same seed."""
    import torch

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
    **keys: Any,
) -> Sharded:
    """Make a parameter that ``fully_shard`` has sharded.

    Args:
        shape: Of the whole parameter.
        seed: Of its values.
        mesh: Over which it is sharded: one axis, or replicas and shards.
        dim: Dimension that is cut.
        before: Mesh over which it is a DTensor before; None for none.
        before_dim: Dimension that this one cuts; None where it replicates.
        **keys: Of its parameter group.
    """
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole = drawn(shape, seed)
    value = whole.clone()
    if before is not None:
        placement = Replicate() if before_dim is None else Shard(before_dim)
        value = distribute_tensor(value, before, [placement])
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(value)
    fully_shard(module, mesh=mesh, shard_placement_fn=lambda param: Shard(dim))
    return Sharded(module.weight, whole, keys)


type Case = Callable[[], list[Sharded]]


def _mesh(shape: Sequence[int], names: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(kind(), tuple(shape), mesh_dim_names=tuple(names.split()))


def _one_axis(*shapes: Sequence[int], **options: Any) -> list[Sharded]:
    import torch.distributed as dist

    mesh = _mesh([dist.get_world_size()], "shard")
    return [shard(shape, seed, mesh, **options) for seed, shape in enumerate(shapes)]


def uneven() -> list[Sharded]:
    """Rows that do not divide, and shards of one row and of none."""
    return _one_axis((10, 12), (5, 10), (2, 5), (32, 2), (12, 32))


def columns() -> list[Sharded]:
    """``shard_placement_fn`` that cuts columns."""
    return _one_axis((9, 24), (36, 12), dim=1)


def experts() -> list[Sharded]:
    """Batches of 8, 6, 2 and 1 matrices, whole ones on each rank; some ranks have none."""
    return _one_axis((8, 6, 4), (6, 5, 7), (2, 8, 8), (1, 4, 9))


def expert_rows() -> list[Sharded]:
    """A batch whose matrices are cut, all alike."""
    return _one_axis((3, 12, 5), dim=1)


def expert_columns() -> list[Sharded]:
    """A batch whose columns are cut."""
    return _one_axis((3, 5, 12), dim=2)


def fused() -> list[Sharded]:
    """Experts one below the other: whole ones, halves, and what divides neither way."""
    return [
        *_one_axis((8 * 3, 4), split_sizes=8),
        *_one_axis((2 * 6, 5), split_sizes=2),
        *_one_axis((3 * 5, 6), split_sizes=3),
    ]


def query_key_value() -> list[Sharded]:
    """Repeating groups, one after the other, and equal blocks; rows that do not end with them."""
    return [
        *_one_axis((16, 6), (24, 5), split_sizes=(4, 2, 2)),
        *_one_axis((21, 9), split_sizes=(8, 5, 8)),
        *_one_axis((18, 9), split_sizes=(6,)),
    ]


def transposed() -> list[Sharded]:
    """Stored as (inputs, outputs), beside one of the same shape that is not."""
    return [*_one_axis((12, 5), transposed=True), *_one_axis((12, 5), (5, 12))]


def fused_experts() -> list[Sharded]:
    """Gate and up of experts: rows or columns, halves or interleaved, cut in each dimension."""
    stored = {"transposed": True}
    return [
        *_one_axis((6, 8, 5), (3, 14, 5), split_sizes=2),
        *_one_axis((3, 12, 5), split_sizes=(5, 7), dim=1),
        *_one_axis((3, 6, 12), split_sizes=(1, 1), dim=2),
        *_one_axis((6, 5, 8), (3, 5, 14), split_sizes=2, **stored),
        *_one_axis((3, 12, 8), split_sizes=(1, 1), dim=1, **stored),
        *_one_axis((3, 5, 18), split_sizes=(1, 1), dim=2, **stored),
    ]


def fused_columns() -> list[Sharded]:
    """GPT-2's query, key and value, other columns, and interleaved rows and columns."""
    stored = {"transposed": True}
    return [
        *_one_axis((7, 24), split_sizes=3, **stored),
        *_one_axis((8, 10), split_sizes=(5, 2, 3), **stored),
        *_one_axis((8, 18), split_sizes=(4, 7, 7), dim=1, **stored),
        *_one_axis((6, 12), split_sizes=(1, 1, 1, 1), dim=1, **stored),
        *_one_axis((14, 12), split_sizes=(1, 1)),
    ]


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


def tensor_parallel_alone() -> list[Sharded]:
    """DTensors that no ``fully_shard`` has seen."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = _mesh([dist.get_world_size()], "tensor")
    found = []
    for seed, placement in enumerate([Shard(0), Shard(1), Replicate()]):
        whole = drawn((12, 24), seed)
        param = torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, [placement]))
        found.append(Sharded(param, whole))
    return found


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
    fused_weights = _one_axis((8 * 3, 4), split_sizes=8)
    return [*hybrid(), *_one_axis((10, 12), (2, 5)), *expert_parallel()[2:5], *fused_weights]


def stages() -> list[Sharded]:
    """Pipeline stages: other parameters, another number of kinds, and a stage without any."""
    import torch.distributed as dist

    mesh = _mesh([2, dist.get_world_size() // 2], "stage shard")
    if mesh.get_local_rank("stage") == 1:
        return []
    shards = mesh["shard"]
    return [shard((9, 5), 0, shards), shard((4, 6, 5), 1, shards), shard((7, 5), 2, shards)]


def convolutions() -> list[Sharded]:
    """Kernels as matrices of output channels; one channel is less than ranks."""
    return _one_axis((8, 3, 2, 2), (5, 4, 3), (6, 2, 2, 2, 2), (1, 6, 1, 2), (9, 7), flatten=True)


# Shape of the whole matrix, dimension that is cut (None for none), rows or columns of each block.
_BLOCKS: list[tuple[tuple[int, int], int | None, list[int]]] = [
    ((12, 8), 0, [6, 6]),
    ((8, 12), 1, [6, 6]),
    ((11, 8), 0, [8, 3]),
    ((8, 9), 1, [1, 8]),
    ((5, 7), 0, [5, 0]),
    ((6, 10), None, []),
]


def _plain(num_replicas: int, num_blocks: int) -> list[Sharded]:
    import torch
    import torch.distributed as dist

    row, block = divmod(dist.get_rank(), num_blocks)
    rows = [list(range(i * num_blocks, (i + 1) * num_blocks)) for i in range(num_replicas)]
    tensor_groups = [dist.new_group(ranks) for ranks in rows]
    data_groups = [dist.new_group(list(column)) for column in zip(*rows, strict=True)]
    arguments = {
        "process_group": data_groups[block] if num_replicas > 1 else None,
        "tensor_group": tensor_groups[row] if num_blocks > 1 else None,
    }
    parameters: list[Sharded] = []
    for seed, (shape, dim, sizes) in enumerate(_BLOCKS):
        whole, index = drawn(shape, seed), ()
        if num_blocks > 1 and dim is not None:
            start = sum(sizes[:block])
            index = (slice(None),) * dim + (slice(start, start + sizes[block]),)
        param = torch.nn.Parameter(whole[index].clone())
        if index:
            param.partition_dim = dim
        parameters.append(Part(param, whole, {}, arguments, index))
    return parameters


def plain_replicas() -> list[Sharded]:
    """Two copies of plain tensors, as DDP has them."""
    return _plain(2, 1)


def plain_blocks() -> list[Sharded]:
    """Blocks of Transformer Engine: even, uneven and empty."""
    return _plain(1, 2)


def plain_replicas_of_blocks() -> list[Sharded]:
    """Both, on four ranks."""
    return _plain(2, 2)


# By number of ranks. Four have what needs two axes.
ONE_AXIS: Sequence[Case] = (
    uneven,
    columns,
    experts,
    expert_rows,
    expert_columns,
    fused,
    query_key_value,
    transposed,
    fused_experts,
    fused_columns,
    tensor_parallel_alone,
)
CASES: Mapping[int, Sequence[Case]] = {
    2: (*ONE_AXIS, stages),
    3: ONE_AXIS,
    4: (
        hybrid,
        tensor_parallel,
        hybrid_tensor_parallel,
        expert_parallel,
        expert_slices,
        several_meshes,
        stages,
    ),
}


def mixed_model() -> Any:
    """Return an unsharded model of an embedding, a convolution, layers, a norm and a head."""
    import torch

    class Model(torch.nn.Module):
        """Modules that fully_shard takes: it refuses containers, and asks for a forward pass."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(16, 8)
            self.conv = torch.nn.Conv2d(3, 8, 2)
            self.up = torch.nn.Linear(8, 12)
            self.gate = torch.nn.Linear(8, 4, bias=False)
            self.down = torch.nn.Linear(12, 8, bias=False)
            self.norm = torch.nn.LayerNorm(8)
            self.head = torch.nn.Linear(8, 16, bias=False)

        def __getitem__(self, name: str) -> Any:
            return self.get_submodule(name)

        def forward(self, x: Any) -> Any:
            return self.head(self.embed(x))

    torch.manual_seed(3)
    return Model().to(device())
