# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Models that Megatron-FSDP has sharded, and whole matrices beside them.

Which rows a rank holds is found in their values, not by the layout that is tested.

Version 2 is that of the standalone megatron-fsdp where it is installed, else of megatron-core; both
generations: releases, and Megatron-LM main, which has ``fully_shard_context``.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as tensor
from torch.distributed.device_mesh import init_device_mesh

from helpers.device import kind
from helpers.fsdp2_models import Part, Sharded, drawn

# Placements of weights, gradients and the optimizer's weights, a letter for each axis of the mesh.
LAYOUTS = {
    "zero3": ("s", "s", "s"),
    "hsdp": ("rs", "ps", "rs"),
    # Of main alone.
    "zero2": ("r", "s", "s"),
    "zero1": ("r", "p", "s"),
    "hfsdp": ("rs", "ps", "ss"),
}
RELEASED = ("zero3", "hsdp")


def module_of(name: str) -> Any:
    is_alone = importlib.util.find_spec("megatron_fsdp") is not None
    package = "megatron_fsdp" if is_alone else "megatron.core.distributed.fsdp.src.megatron_fsdp"
    return importlib.import_module(f"{package}.{name}")


def is_main() -> bool:
    """Return whether this is the generation of Megatron-LM main."""
    return hasattr(module_of("experimental"), "fully_shard_context")


def has_grad_dtype() -> bool:
    """Return whether a gradient may have another dtype than its parameter: not in torch 2.9."""
    return hasattr(torch.Tensor, "grad_dtype")


def layouts() -> list[str]:
    """Return the names of the layouts that the generation has."""
    return list(LAYOUTS) if is_main() else list(RELEASED)


def placements_of(letters: str) -> list[Any]:
    """Return the placements that the generation's ``fully_shard`` takes."""
    if is_main():
        found = {"r": tensor.Replicate(), "s": tensor.Shard(0), "p": tensor.Partial("avg")}
    else:
        own = module_of("experimental.placement")
        found = {"r": own.Replicate(), "s": own.Flat(), "p": own.Partial(dist.ReduceOp.AVG)}
    return [found[letter] for letter in letters]


def _net(wholes: Sequence[Any], has_bias: bool) -> Any:
    class Net(torch.nn.Module):
        """Layers side by side, each on the first columns of the input."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList()
            for whole in wholes:
                rows, cols = whole.shape[:2]
                if whole.ndim == 4:
                    layer: Any = torch.nn.Conv2d(cols, rows, 3, bias=has_bias)
                else:
                    layer = torch.nn.Linear(cols, rows, bias=has_bias)
                layer.weight.data = whole.clone()
                if has_bias:
                    layer.bias.data = whole.flatten(1).sum(1)
                self.layers.append(layer)
            self.to(wholes[0].dtype)

        def forward(self, x: Any, num_used: int | None = None) -> Any:
            losses = []
            for layer, whole in list(zip(self.layers, wholes, strict=True))[:num_used]:
                given = x[:, : whole[0].numel()].view(len(x), *whole.shape[1:])
                losses.append(layer(given).square().mean())
            return sum(losses)

    return Net()


class ShardedNet:
    """A model, and the values that it had before it was sharded."""

    def __init__(
        self,
        layout: str,
        shapes: Sequence[Sequence[int]],
        *,
        seed: int = 0,
        units: bool = False,
        has_bias: bool = True,
        dtype: str = "float32",
        policy: Any = None,
    ) -> None:
        own = module_of("experimental")
        self._dtype = getattr(torch, dtype)
        letters, world = LAYOUTS[layout], dist.get_world_size()
        self.mesh = init_device_mesh(kind(), (world,) if len(letters[0]) == 1 else (2, world // 2))
        wholes = [drawn(shape, seed + i).to(self._dtype) for i, shape in enumerate(shapes)]
        self.model = _net(wholes, has_bias)
        named = self.model.named_parameters()
        self.wholes = {name: param.detach().float() for name, param in named}
        placements = own.Placements(list(range(self.mesh.ndim)), *map(placements_of, letters))
        mixed = module_of("mixed_precision").MixedPrecisionPolicy(**(policy or {}))
        context: Any = contextlib.nullcontext(self.model)
        with own.fully_shard_context() if is_main() else context as self.context:
            for module in [*(self.model.layers if units else []), self.model]:
                own.fully_shard(
                    module, mesh=self.mesh, placements=placements, mixed_precision_policy=mixed
                )
        self.named = dict(self.model.named_parameters())
        self.matrices = {name: param for name, param in self.named.items() if param.ndim > 1}
        self.vectors = {name: param for name, param in self.named.items() if param.ndim == 1}
        self._rows = {
            name: _held_rows(param, self.wholes[name]) for name, param in self.named.items()
        }
        self.parameters = [
            Part(
                param,
                self.wholes[name],
                {"flatten": True} if i else {"split_sizes": 2},
                index=(self._rows[name],),
            )
            for i, (name, param) in enumerate(self.matrices.items())
        ]

    def backward(self, step: int, num_microbatches: int = 1, num_used: int | None = None) -> None:
        """Compute gradients of inputs that each rank draws for itself."""
        for i in range(num_microbatches):
            x = drawn((4, 18), 1000 * step + 100 * i + dist.get_rank()).to(self._dtype)
            is_last = i == num_microbatches - 1
            with module_of("experimental").microbatch(self.context, is_last=is_last):
                self.model(x, num_used).backward()

    def own(self, name: str, whole: Any) -> Any:
        return whole[self._rows[name]]

    def whole(self, name: str, like: Any) -> Any:
        """Assemble the shards of a tensor like a parameter, in float32."""
        mine = (self._rows[name].start, like.to_local().float())
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        whole = torch.full_like(self.wholes[name], float("nan"))
        for first, rows in parts:
            whole[first : first + len(rows)] = rows
        assert not whole.isnan().any()
        return whole

    def set_grads(self, step: int) -> dict[str, Any]:
        """Set gradients that do not depend on the ranks, and return the whole ones."""
        wholes = {}
        for i, (name, param) in enumerate(self.named.items()):
            wholes[name] = drawn(param.shape, 5000 + 100 * step + i)
            param.grad = torch.zeros_like(param)
            param.grad.to_local().copy_(self.own(name, wholes[name]))
        return wholes


# Of version 1. Three matrices in one buffer, and one in each: rows divide then, but for the last.
UNEVEN, EVEN = ("Sequential", [[10, 8], [16, 10], [8, 16]]), ("Linear", [[16, 8], [8, 16], [32, 8]])
# Axes of the mesh: ranks of the outer one, of the inner one, and of tensor parallelism, with the
# dimension that it cuts.
MESHES: dict[str, tuple[tuple[int, int, int], int | None]] = {
    "one_axis": ((1, 4, 1), None),
    "one_axis_of_two": ((1, 2, 1), None),
    "hfsdp": ((2, 2, 1), None),
    "tensor_rows": ((1, 2, 2), 0),
    "tensor_columns": ((1, 2, 2), 1),
    "hfsdp_tensor_rows": ((2, 2, 2), 0),
    "hfsdp_tensor_columns": ((2, 2, 2), 1),
}


class Version1:
    """A model that version 1 has sharded."""

    def __init__(
        self,
        layout: str,
        unit: str,
        shapes: Sequence[Sequence[int]],
        seed: int = 0,
        *,
        copies: Sequence[int] = (),
        strategy: str = "optim_grads_params",
    ) -> None:
        mesh_shape, cut_dim = MESHES[layout]
        self.mesh = init_device_mesh(kind(), mesh_shape, mesh_dim_names=("outer", "fsdp", "tp"))
        tp_size, tp_rank = self.mesh.size(2), self.mesh.get_local_rank("tp")
        wholes = [drawn(shape, seed + i) for i, shape in enumerate(shapes)]
        # What tensor parallelism leaves of the columns.
        all_cols = [slice(None)] * len(shapes)
        layers = []
        for i, whole in enumerate(wholes):
            tensor_dim = None if i in copies else cut_dim
            part = whole if tensor_dim is None else whole.chunk(tp_size, dim=tensor_dim)[tp_rank]
            if tensor_dim == 1:
                width = whole.shape[1] // tp_size
                all_cols[i] = slice(tp_rank * width, (tp_rank + 1) * width)
            layers.append(torch.nn.Linear(*reversed(part.shape), bias=False))
            layers[-1].weight.data.copy_(part)
            if tensor_dim is not None:
                layers[-1].weight.tensor_model_parallel = True
                layers[-1].weight.partition_dim = tensor_dim
                layers[-1].weight.partition_stride = 1
        module = torch.nn.Sequential(*layers).to(wholes[0].device)
        self.model = self._shard(module, unit, strategy)
        self.parameters: list[Part] = []
        for i, (param, whole, cols) in enumerate(
            zip(self.model.parameters(), wholes, all_cols, strict=True)
        ):
            rows = _held_rows(param, whole[:, cols])
            keys = {} if i else {"split_sizes": 2}
            self.parameters.append(
                Part(param, whole, keys, index=(rows, cols), has_empty_grads=False)
            )

    def _shard(self, module: Any, unit: str, strategy: str) -> Any:
        package = "megatron.core.distributed.fsdp.src.megatron_fsdp"
        policy = importlib.import_module(f"{package}.mixed_precision").MixedPrecisionPolicy
        outer: dict[str, Any] = {}
        if self.mesh.size(0) > 1:
            hybrid = self.mesh["outer", "fsdp"]._flatten("hybrid").get_group()
            outer = {
                "dp_outer_dim": "outer",
                "hybrid_fsdp_group": hybrid,
                "outer_dp_sharding_strategy": 0 if strategy == "no_shard" else 1,
            }
        return importlib.import_module(package).fully_shard_model(
            module,
            device_mesh=self.mesh,
            dp_shard_dim="fsdp",
            tp_dim="tp",
            fsdp_unit_modules=[getattr(torch.nn, unit)],
            zero_dp_strategy=strategy,
            mixed_precision_policy=policy(main_params_dtype=torch.float32),
            **outer,
        )

    def rows_and_starts(self) -> list[list[int]]:
        """Return how many rows of each matrix this rank holds, their first, and torch's first."""
        facts = []
        for each in self.parameters:
            rows = each.index[0]
            chunks = each.param.__create_chunk_list__()
            is_empty = rows.start == rows.stop
            start = rows.start if is_empty else chunks[0].offsets[0]
            facts.append([rows.stop - rows.start, rows.start, start])
        return facts


def _held_rows(param: Any, whole: Any) -> slice:
    """Find the rows that a rank holds by their values."""
    local = param.to_local()
    if not len(local):
        return slice(0, 0)
    starts = range(len(whole) - len(local) + 1)
    first = next(i for i in starts if torch.equal(whole[i : i + len(local)], local))
    return slice(first, first + len(local))


def version_1(layout: str, is_even: bool, **options: Any) -> list[Sharded]:
    """Shard the even or the uneven matrices; raise if rows are not what the test is about."""
    sharded = Version1(layout, *(EVEN if is_even else UNEVEN), **options)
    if options:
        return [*sharded.parameters]
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, sharded.rows_and_starts())
    num_rows = [[rows for rows, _, _ in each] for each in by_rank]
    assert is_even == all(len(set(of_matrix)) == 1 for of_matrix in zip(*num_rows, strict=True))
    # Torch reads placements of two axes in another order. With rows that divide, halves of the
    # first matrix were once made of others' rows, without an error.
    is_torchs = all(first == start for each in by_rank for _, first, start in each)
    assert is_torchs == (is_even and layout in ("one_axis", "tensor_columns"))
    return [*sharded.parameters]
