# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Estimated costs of a step in integer nanoseconds: Newton-Schulz, links, kernels, the host.

Only ratios decide the owners, so the rates need not be exact. Every result is an integer: sums
do not depend on their order, and ranks of one job agree on them.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.newton_schulz.backend import FlopCount
from megatron_muon.newton_schulz.gram import segments_of

# At 32, launches cost a 32nd of single calls.
_MAX_STACK_SIZE = 32
# 268 MB of bf16: a larger stack would need memory, and launches are few already.
_MAX_STACK_NUMEL = 2**27
# Side of the tile of a matrix product that one multiprocessor works on at a time.
_TILE = 128


@dataclass(frozen=True)
class CostModel:
    """Rates of the machine, and the costs that follow from them.

    Args:
        tflops: Rate of a rank's Newton-Schulz on infinitely large matrices, TFLOP/s.
        half_rate_side: Shorter side with half of that rate: the rate of a side n is
            ``tflops * n / (n + half_rate_side)``.
        gbps: Bandwidth of one rank to ranks of its node, GB/s per direction.
        gbps_between_nodes: Bandwidth of one rank to other nodes, GB/s per direction.
        ranks_per_node: Consecutive ranks that share a node.
        kernel_us: Minimum time of a kernel, launch included, microseconds.
        all_reduce_us: Latency of a collective inside a node, microseconds; doubled between nodes.
        collective_us: Host time of one collective of the exchange, microseconds.
        num_ns_steps: Newton-Schulz steps.
        stack_tiles: Tiles of 128 x 128 that fill a rank's multiprocessors. Matrices of one shape
            are stacked until their Gram matrices have about this many; 1 stacks nothing.
        backend: Name of the backend of Newton-Schulz.
        coefficient_type: Coefficients of the steps; they decide the restarts of the Gram form.

    Raises:
        ValueError: A rate is not positive.
    """

    # Measured on an H200, whose arithmetic is an H100's, by python -m megatron_muon.check: 379,
    # 557, 672 and 698 TFLOP/s at sides 512, 1024, 2048 and 4096, in stacks of stack_tiles. NVLink
    # 4: 450 GB/s per direction (18 links of 25 GB/s). Source: NVIDIA H100 datasheet.
    tflops: float = 850.0
    half_rate_side: float = 620.0
    gbps: float = 450.0
    # One 400 Gb/s InfiniBand or Ethernet port a GPU is 50 GB/s; 45 allows for protocol overhead.
    gbps_between_nodes: float = 45.0
    ranks_per_node: int = 8
    # Launch of a small kernel, and latency of a small NVLink all-reduce. Estimates. A lone matrix
    # of side 512 took the H200's host 29 us a product; stacks share that, long products hide it.
    kernel_us: float = 5.0
    all_reduce_us: float = 20.0
    # An estimate: the host walks lists of all ranks.
    collective_us: float = 150.0
    num_ns_steps: int = 5
    # Four waves of two tiles on each of 132 multiprocessors (H100, H200), as a power of two: 32
    # matrices of side 512, 16 of 1024, 8 of 1536, 4 of 2048, 2 of 3072. On the H200 larger stacks
    # of 1536 and 2048 gained 10 % at most, and stacks of 4096 nothing (docs/gpus.md).
    stack_tiles: int = 1024
    backend: str = "standard"
    coefficient_type: str = "quintic"

    def __post_init__(self) -> None:
        """Check that every rate is positive."""
        for name in _rates():
            value = getattr(self, name)
            # Costs may be 0, to leave them out of an estimate. A rate of 0 would divide by it.
            is_allowed = value >= 0 if name in _MAY_BE_ZERO else value > 0
            if not is_allowed or not math.isfinite(value):
                raise ValueError(
                    f"cost model: expected a positive, finite {name}, got {value}. Pass rates of "
                    "your machine, such as tflops=900,gbps=450."
                )

    @classmethod
    def parse(cls, text: str, base: "CostModel | None" = None) -> "CostModel":
        """Read ``name=value,name=value``; other rates stay as in ``base``.

        Raises:
            ValueError: Unknown rate, or a value that is not a number.
        """
        types = _rates()
        changes: dict[str, float] = {}
        for entry in filter(None, text.split(",")):
            name, _, value = entry.partition("=")
            try:
                changes[name] = types[name](value)
            except (KeyError, ValueError):
                raise ValueError(
                    f"cost model: expected name=value with a name of {sorted(types)}, got "
                    f"{entry!r}. Example: tflops=900,gbps=450,gbps_between_nodes=45."
                ) from None
        return dataclasses.replace(base or cls(), **changes)  # type: ignore[arg-type]

    def stack_size(self, num_rows: int, num_cols: int) -> int:
        """Return the most matrices of a shape in one stack: a power of two, if memory allows it."""
        num_tiles = (-(-min(num_rows, num_cols) // _TILE)) ** 2
        nearest = 2 ** round(math.log2(max(1.0, self.stack_tiles / num_tiles)))
        return max(1, min(nearest, _MAX_STACK_SIZE, _MAX_STACK_NUMEL // (num_rows * num_cols)))

    def work(self, num_rows: int, num_cols: int, num_parts: int = 1) -> FlopCount:
        """Count the work of the backend on one part of a matrix."""
        n, m = sorted((num_rows, num_cols))
        segments = segments_of(self.coefficient_type, self.num_ns_steps)
        return BACKENDS[self.backend].work(n, m, segments, num_parts)

    # Models have few shapes, and thousands of matrices.
    @functools.lru_cache(maxsize=4096)  # noqa: B019 - cost models are few, and hashable
    def newton_schulz_ns(
        self, num_rows: int, num_cols: int, num_parts: int = 1, *, on_node: bool = True
    ) -> int:
        """Estimate the time of a matrix on an owner.

        Launches are shared by a full stack. Owners of ``num_parts`` equal parts of the longer side,
        on one node or not, all-reduce the Gram matrix of the shorter side in 2 bytes an element.
        """
        products, launches, all_reduces = self.costs_ns(
            num_rows, num_cols, num_parts, on_node=on_node
        )
        return products + launches // self.stack_size(num_rows, num_cols) + all_reduces

    def costs_ns(
        self, num_rows: int, num_cols: int, num_parts: int, *, on_node: bool
    ) -> tuple[int, int, int]:
        """Estimate products, launches and all-reduces of one part of a matrix."""
        work = self.work(num_rows, num_cols, num_parts)
        # Parts run at the rate of the whole: their Gram matrix has as many tiles.
        n = min(num_rows, num_cols)
        flops_per_ns = self.tflops * 1e3 * n / (n + self.half_rate_side)
        gbps = self.gbps if on_node else self.gbps_between_nodes
        latency_ns = self.all_reduce_us * 1e3 * (1 if on_node else 2)
        # An n x n matrix in 2 bytes an element, without the share of this rank.
        gather_ns = 2 * n**2 * (num_parts - 1) / num_parts / gbps
        # A ring all-reduce sends every byte twice.
        all_reduces_ns = work.num_all_reduces * (latency_ns + 2 * gather_ns)
        return (
            round(work.flops / flops_per_ns),
            round(work.num_products * self.kernel_us * 1e3),
            round(all_reduces_ns) if num_parts > 1 else 0,
        )

    def node(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.ranks_per_node

    def is_on_one_node(self, ranks: Sequence[int]) -> bool:
        """Return whether all ranks, ascending, are on one node."""
        return self.node(ranks[0]) == self.node(ranks[-1])

    def collective_ns(self, ranks: Sequence[int]) -> int:
        """Estimate a collective of some ranks, ascending, that carries nothing."""
        latency_us = self.all_reduce_us * (1 if self.is_on_one_node(ranks) else 2)
        return round(1e3 * (latency_us + self.collective_us))


_MAY_BE_ZERO = ("kernel_us", "all_reduce_us", "collective_us", "half_rate_side")


def _rates() -> dict[str, type[int] | type[float]]:
    """Return the types of the rates, by name."""
    # From the fields: a new rate needs no new code. The others are settings of the optimizer.
    return {
        field.name: int if isinstance(field.default, int) else float
        for field in dataclasses.fields(CostModel)
        if field.name not in ("num_ns_steps", "backend", "coefficient_type")
    }


# Rates by compute capability. A100 and B200 have CostModel's rates, scaled by the dense bf16 peak
# of the datasheets (989 TFLOP/s of the H100); this project has not measured them.
_BY_CAPABILITY = {
    8: CostModel(tflops=270.0, gbps=300.0, gbps_between_nodes=22.5),  # A100
    9: CostModel(),  # H100, H200
    10: CostModel(tflops=1930.0, gbps=900.0),  # B200
}


def gpu_rates(capability: int) -> CostModel:
    """Return the rates of the nearest known major compute capability."""
    nearest = min(_BY_CAPABILITY, key=lambda known: (abs(known - capability), known))
    return _BY_CAPABILITY[nearest]
