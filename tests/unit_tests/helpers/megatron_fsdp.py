# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Models that version 2 of Megatron-FSDP has sharded, and whole matrices beside them.

Of the standalone megatron-fsdp where it is installed, else of megatron-core; both generations:
releases, and Megatron-LM main, which has ``fully_shard_context``. Which rows a rank holds is found
in their values, not by the layout that is tested.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from helpers.device import kind

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
    """Import a module of Megatron-FSDP."""
    is_alone = importlib.util.find_spec("megatron_fsdp") is not None
    package = "megatron_fsdp" if is_alone else "megatron.core.distributed.fsdp.src.megatron_fsdp"
    return importlib.import_module(f"{package}.{name}")


def is_main() -> bool:
    """Return whether this is the generation of Megatron-LM main."""
    return hasattr(module_of("experimental"), "fully_shard_context")


def has_grad_dtype() -> bool:
    """Return whether a gradient may have another dtype than its parameter: not in torch 2.9."""
    import torch

    return hasattr(torch.Tensor, "grad_dtype")


def layouts() -> list[str]:
    """Return the names of the layouts that the generation has."""
    return list(LAYOUTS) if is_main() else list(RELEASED)


def placements_of(letters: str) -> list[Any]:
    """Return the placements that the generation's ``fully_shard`` takes."""
    import torch.distributed as dist
    import torch.distributed.tensor as tensor

    if is_main():
        found = {"r": tensor.Replicate(), "s": tensor.Shard(0), "p": tensor.Partial("avg")}
    else:
        own = module_of("experimental.placement")
        found = {"r": own.Replicate(), "s": own.Flat(), "p": own.Partial(dist.ReduceOp.AVG)}
    return [found[letter] for letter in letters]


def _net(wholes: Sequence[Any], has_bias: bool) -> Any:
    import torch

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
    """A model, and the values that it had before it was sharded.

    Args:
        layout: One of ``LAYOUTS``.
        shapes: Of the weights of its layers.
        seed: Of their values.
        units: Whether each layer is sharded by itself, in front of the model.
        has_bias: Whether layers have biases.
        dtype: Of the weights that compute.
        policy: Arguments of ``MixedPrecisionPolicy``.
    """

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
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from helpers.fsdp2_models import drawn

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
        self._first_rows = {name: self._first_row(name) for name in self.named}

    def _first_row(self, name: str) -> int:
        import torch

        local, whole = self.named[name].to_local(), self.wholes[name]
        starts = range(len(whole) - len(local) + 1)
        return next(i for i in starts if torch.equal(whole[i : i + len(local)], local))

    def backward(self, step: int, num_microbatches: int = 1, num_used: int | None = None) -> None:
        """Compute gradients of inputs that each rank draws for itself."""
        import torch.distributed as dist

        from helpers.fsdp2_models import drawn

        for i in range(num_microbatches):
            x = drawn((4, 18), 1000 * step + 100 * i + dist.get_rank()).to(self._dtype)
            is_last = i == num_microbatches - 1
            with module_of("experimental").microbatch(self.context, is_last=is_last):
                self.model(x, num_used).backward()

    def own(self, name: str, whole: Any) -> Any:
        """Cut this rank's rows out of a whole matrix."""
        first = self._first_rows[name]
        return whole[first : first + len(self.named[name].to_local())]

    def whole(self, name: str, like: Any) -> Any:
        """Assemble the shards of a tensor like a parameter, in float32."""
        import torch
        import torch.distributed as dist

        mine = (self._first_rows[name], like.to_local().float())
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        whole = torch.full_like(self.wholes[name], float("nan"))
        for first, rows in parts:
            whole[first : first + len(rows)] = rows
        assert not whole.isnan().any()
        return whole

    def set_grads(self, step: int) -> dict[str, Any]:
        """Set gradients that do not depend on the ranks, and return the whole ones."""
        import torch

        from helpers.fsdp2_models import drawn

        wholes = {}
        for i, (name, param) in enumerate(self.named.items()):
            wholes[name] = drawn(param.shape, 5000 + 100 * step + i)
            param.grad = torch.zeros_like(param)
            param.grad.to_local().copy_(self.own(name, wholes[name]))
        return wholes


class Reference:
    """Emerging-optimizers' Muon; the halves of the first matrix are parameters of their own."""

    def __init__(self, wholes: Sequence[Any], **settings: Any) -> None:
        import torch
        from emerging_optimizers.orthogonalized_optimizers import Muon

        matrices = [whole.flatten(1) for whole in wholes]
        parts = [matrices[0].chunk(2), *([whole] for whole in matrices[1:])]
        self._shapes = [whole.shape for whole in wholes]
        self._parts = [[torch.nn.Parameter(part.clone()) for part in each] for each in parts]
        self._muon = Muon([part for each in self._parts for part in each], **settings)

    def step(self, grads: Sequence[Any]) -> None:
        """Step with whole gradients."""
        for parts, grad in zip(self._parts, grads, strict=True):
            for part, of_part in zip(parts, grad.flatten(1).chunk(len(parts)), strict=True):
                part.grad = of_part.clone()
        self._muon.step()

    def wholes(self) -> list[list[Any]]:
        """Return the whole value and momentum of each matrix."""
        import torch

        state = self._muon.state
        return [
            [
                torch.cat([part.detach() for part in parts]).view(shape),
                torch.cat([state[part]["momentum_buffer"] for part in parts]).view(shape),
            ]
            for shape, parts in zip(self._shapes, self._parts, strict=True)
        ]
