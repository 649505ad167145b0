# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Count states and messages of every registered optimizer of matrices under FSDP2.

    torchrun --nproc-per-node 2 benchmarks/registered_optimizers.py

Every optimizer steps the same matrices twice. "State" is a formula in the shape ``(m, n)`` of a
matrix that fits the elements of all matrices exactly. "Bytes" are what all ranks send to others in
the second step, over the elements that the owners do not hold, which is half of them here. The
last row is Muon of this package.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from measure import CollectiveCounter, of_all_ranks, start_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SHAPES = (8, 8), (8, 24), (40, 8), (16, 24), (32, 16), (48, 40), (56, 8), (24, 64)
# Arguments without which a class cannot be built, or refuses these weights.
OPTIONS: dict[str, dict[str, Any]] = {"adaptive_muon": {"momentum": 0.95}}
TERMS = "m^2", "n^2", "m n", "m", "n", ""


def _parameters() -> list[torch.nn.Parameter]:
    """Draw weights as Sinkhorn's mapper leaves them, and shard them."""
    from emerging_optimizers.utils.sinkhorn_mapper import SinkhornMapper

    torch.manual_seed(0)
    module = torch.nn.Module()
    for number, shape in enumerate(SHAPES):
        weight = SinkhornMapper()(torch.rand(shape))
        module.register_parameter(f"matrix{number}", torch.nn.Parameter(weight))
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return list(module.parameters())


def _state_elements(optimizer: torch.optim.Optimizer, param: Any) -> int:
    """Count the elements of the tensors of a state on this rank, numbers of steps apart."""
    locals_ = [getattr(x, "_local_tensor", x) for x in optimizer.state[param].values()]
    return sum(x.numel() for x in locals_ if torch.is_tensor(x) and x.ndim)


def formula(counts: Sequence[int]) -> str:
    """Return the numbers of elements by shape as a polynomial of the shape."""
    rows = [[m * m, n * n, m * n, m, n, 1] for m, n in SHAPES]
    exact = torch.tensor(rows, dtype=torch.float64)
    found = torch.linalg.lstsq(exact, torch.tensor(counts, dtype=torch.float64)[:, None])
    terms = found.solution[:, 0].round().long()
    if (exact.long() @ terms).tolist() != list(counts):
        return "no polynomial: " + ", ".join(map(str, counts))
    pairs = zip(terms.tolist(), TERMS, strict=True)
    return " + ".join(f"{k if k > 1 else ''} {term}".strip() for k, term in pairs if k) or "none"


def count(name: str | None) -> tuple[str, float]:
    """Return the state of an optimizer, and the bytes that an element costs in a step."""
    from megatron_muon.fsdp2 import Muon

    params = _parameters()
    options: Any = {"optimizer_class": name, "optimizer_options": OPTIONS.get(name or "")}
    optimizer = Muon(params, 0.01, **(options if name else {}))
    counter = CollectiveCounter()
    for context in (torch.no_grad(), counter):
        for param in params:
            param.grad = torch.randn_like(param)
        with context:
            optimizer.step()
    totals = of_all_ranks(
        ([_state_elements(optimizer, param) for param in params], counter.num_bytes["alltoallbase"])
    )
    states = [sum(numbers) for numbers in zip(*(counts for counts, _ in totals), strict=True)]
    num_moved = sum(m * n for m, n in SHAPES) * (1 - 1 / dist.get_world_size())
    return formula(states), sum(num_bytes for _, num_bytes in totals) / num_moved


def main() -> int:
    """Print the table."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    start_ranks()
    from emerging_optimizers import registry

    from megatron_muon.fsdp2.settings import registered_class

    registered_class("soap")  # imports all of them
    lines = ["| class | state, elements | bytes an element |", "| --- | --- | ---: |"]
    for name in (*sorted(registry.get_optimizer_name_list()), None):
        try:
            state, num_bytes = count(name)
            lines.append(f"| {name or 'Muon'} | {state} | {num_bytes:g} |")
        except (RuntimeError, TypeError, ValueError) as error:
            lines.append(f"| {name} | {str(error).partition('\n')[0]} | - |")
    if dist.get_rank() == 0:
        print(*lines, sep="\n")
    dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
