# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What a step costs: seconds of Newton-Schulz by shape, seconds of traffic by link.

Only ratios decide who owns what, so the rates need not be exact.
"""

import dataclasses
import functools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_muon.newton_schulz.backend import Work
from megatron_muon.newton_schulz.registry import BACKENDS, candidates
from megatron_muon.plan.cost_table import CostTable

# A plan has no coefficients: those of a run are emerging-optimizers', which import torch. These are
# the segments of its default set, as newton_schulz.restarts computes them; a test compares.
_QUINTIC_SEGMENTS = {1: (1,), 2: (2,), 3: (2, 1), 4: (2, 2), 5: (2, 3), 6: (2, 2, 2), 7: (2, 3, 2)}
# At 32, launches cost a 32nd of what single calls would.
_MAX_STACK_SIZE = 32
# 268 MB of bf16: a larger stack would take memory, and launches are few already.
_MAX_STACK_NUMEL = 2**27
# Bytes a nanosecond that a kernel reads and writes which only adds matrices.
# Source: 3,350 GB/s of HBM3, NVIDIA H100 Tensor Core GPU datasheet.
_MEMORY_GBPS = 3350.0
# Side of the tile of a matrix product that one multiprocessor works on at a time.
_TILE = 128


@dataclass(frozen=True)
class CostModel:
    """Estimate seconds from rates of the machine; only their ratios decide who owns what.

    Args:
        tflops: Matrix-multiply rate of one rank in Newton-Schulz, TFLOP/s.
        gbps: Bandwidth of one rank to ranks of its node, GB/s each way.
        gbps_between_nodes: Bandwidth of one rank to other nodes, GB/s each way.
        ranks_per_node: Consecutive ranks that share a node.
        kernel_us: Minimum time of a kernel, launch included, microseconds.
        all_reduce_us: Latency of an all-reduce or all-gather inside a node, microseconds; doubled
            between nodes.
        num_ns_steps: Newton-Schulz steps.
        stack_tiles: Tiles of 128 x 128 that fill a rank's multiprocessors. Matrices of one shape
            are stacked until their Gram matrices have about so many; 1 stacks nothing.
        measured: Times by shape, which ``tflops`` and ``kernel_us`` then do not decide; None for
            none.
        backends: Names of the ways to compute Newton-Schulz that matrices choose from, each the
            fastest. ``standard`` is there for shapes that the others do not take.
        segments: Steps between restarts of the Gram form, for ``num_ns_steps``; None for those of
            quintic coefficients.

    Raises:
        ValueError: A rate is not positive, or segments are of another number of steps.
    """

    # A GPU of the H100 class. 989 TFLOP/s dense bf16 is its peak; about half is what products of
    # 4096 to 8192 reach in practice. 450 GB/s each way is NVLink 4 (18 links of 25 GB/s).
    # Source: NVIDIA H100 Tensor Core GPU datasheet. The 500 is an assumption, not a measurement.
    tflops: float = 500.0
    gbps: float = 450.0
    # One 400 Gb/s InfiniBand or Ethernet port a GPU is 50 GB/s; 45 allows for protocol overhead.
    gbps_between_nodes: float = 45.0
    ranks_per_node: int = 8
    # Launch of a small kernel, and latency of a small NVLink all-reduce. Not measured here.
    kernel_us: float = 5.0
    all_reduce_us: float = 20.0
    num_ns_steps: int = 5
    # Four waves of two tiles on each of 132 multiprocessors (H100, H200), as a power of two: 32
    # matrices of side 512, 16 of 1024, 8 of 1536, 4 of 2048, 2 of 3072. An estimate, not measured.
    stack_tiles: int = 1024
    measured: CostTable | None = None
    backends: tuple[str, ...] = ("standard",)
    segments: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check that every rate is positive, and that segments are of as many steps."""
        if self.segments is not None and sum(self.segments) != self.num_ns_steps:
            raise ValueError(
                f"cost model: expected segments of {self.num_ns_steps} steps, got {self.segments}. "
                "Take them from restarts.segments_of."
            )
        for name in _rates():
            value = getattr(self, name)
            # A latency may be 0, to leave it out of an estimate. A rate of 0 would divide by it.
            allowed = value >= 0 if name.endswith("_us") else value > 0
            if not allowed:
                raise ValueError(
                    f"cost model: expected a positive {name}, got {value}. Pass the rates of "
                    "your machine, such as tflops=500,gbps=450."
                )

    @classmethod
    def parse(cls, text: str, base: "CostModel | None" = None) -> "CostModel":
        """Read ``name=value,name=value``; what is not named stays as in ``base``.

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
                    f"cost model: expected name=value with a name of {sorted(types)}, measure, "
                    f"measure:PATH or file:PATH, got {entry!r}. Example: "
                    "tflops=500,gbps=450,gbps_between_nodes=45."
                ) from None
        return dataclasses.replace(base or cls(), **changes)  # type: ignore[arg-type]

    def stack_size(self, num_rows: int, num_cols: int) -> int:
        """Return how many matrices of a shape fill a rank: a power of two, the largest stack."""
        num_tiles = math.ceil(min(num_rows, num_cols) / _TILE) ** 2
        # The nearest power of two: a bit too few or too many makes little difference.
        size = 2 ** round(math.log2(self.stack_tiles / num_tiles)) if self.stack_tiles > 1 else 1
        size = max(1, min(_MAX_STACK_SIZE, int(size)))
        while size > 1 and size * num_rows * num_cols > _MAX_STACK_NUMEL:
            size //= 2
        return size

    def work(
        self, num_rows: int, num_cols: int, num_parts: int = 1, backend: str = "standard"
    ) -> Work:
        """Count what a backend does for one part of a matrix."""
        n, m = min(num_rows, num_cols), max(num_rows, num_cols)
        steps = self.num_ns_steps
        segments = self.segments or _QUINTIC_SEGMENTS.get(
            steps, (2,) * (steps // 2) + (1,) * (steps % 2)
        )
        return BACKENDS[backend].work(n, m, segments, num_parts)

    def backend_of(self, num_rows: int, num_cols: int, num_parts: int = 1) -> str:
        """Return the fastest of :attr:`backends` for a shape and a number of owners.

        It does not depend on where the owners are: all of them, and all stacks of the shape, have
        the same.
        """
        n, m = min(num_rows, num_cols), max(num_rows, num_cols)
        return min(
            candidates(self.backends, n, m, num_parts),
            key=lambda name: self._seconds(num_rows, num_cols, num_parts, name, is_near=True),
        )

    def newton_schulz_seconds(
        self, num_rows: int, num_cols: int, num_parts: int = 1, *, is_near: bool = True
    ) -> float:
        """Estimate the time a matrix takes on each of its owners, with the fastest backend.

        Args:
            num_rows: Rows.
            num_cols: Columns.
            num_parts: Owners that hold equal parts of the longer side. They all-reduce the Gram
                matrix of the shorter side in 2 bytes an element.
            is_near: Whether the owners share a node.

        Raises:
            ValueError: Measured times do not have the shape.
        """
        key = num_rows, num_cols, num_parts, is_near
        if key not in self._known_seconds:
            backend = self.backend_of(num_rows, num_cols, num_parts)
            self._known_seconds[key] = self._seconds(
                num_rows, num_cols, num_parts, backend, is_near=is_near
            )
        return self._known_seconds[key]

    @cached_property
    def _known_seconds(self) -> dict[tuple[int, int, int, bool], float]:
        """Return what was estimated before: models have few shapes, and thousands of matrices."""
        return {}

    def edge_seconds(self, num_rows: int, num_cols: int, num_parts: int = 1) -> float:
        """Estimate the first product of Newton-Schulz, or the last one: both are as long.

        They are X X^T, and an n x n matrix with X. 0 where the backend takes no portions.
        """
        backend = self.backend_of(num_rows, num_cols, num_parts)
        if not BACKENDS[backend].takes_portions:
            return 0.0
        n, m = min(num_rows, num_cols), max(num_rows, num_cols)
        share = 2 * n * n * m / num_parts / self.work(num_rows, num_cols, num_parts, backend).flops
        return share * self._product_seconds(num_rows, num_cols, num_parts, backend)

    def portion_seconds(self, num_rows: int, num_cols: int, num_parts: int = 1) -> float:
        """Estimate what a portion adds to the first product: it is added to an n x n sum.

        0 where the backend takes no portions.
        """
        backend = self.backend_of(num_rows, num_cols, num_parts)
        if not BACKENDS[backend].takes_portions:
            return 0.0
        # The product is written and read in 2 bytes an element, the sum read and written in 4.
        return 12 * min(num_rows, num_cols) ** 2 / (_MEMORY_GBPS * 1e9)

    def _seconds(
        self, num_rows: int, num_cols: int, num_parts: int, backend: str, *, is_near: bool
    ) -> float:
        work = self.work(num_rows, num_cols, num_parts, backend)
        seconds = self._product_seconds(num_rows, num_cols, num_parts, backend)
        if num_parts > 1:
            n = min(num_rows, num_cols)
            gbps = self.gbps if is_near else self.gbps_between_nodes
            latency = self.all_reduce_us * 1e-6 * (1 if is_near else 2)
            # Of an n x n matrix in 2 bytes an element, but for the share that stays.
            gather_s = n * n * 2 * (num_parts - 1) / num_parts / (gbps * 1e9)
            # A ring all-reduce sends each byte twice.
            seconds += work.num_all_reduces * (latency + 2 * gather_s)
        return seconds

    def _product_seconds(self, num_rows: int, num_cols: int, num_parts: int, backend: str) -> float:
        """Estimate what an owner takes without communication."""
        work = self.work(num_rows, num_cols, num_parts, backend)
        if self.measured is not None:
            # Parts run at the rate of the whole: they have its Gram matrix, of n x n tiles.
            timed_as = BACKENDS[backend].timed_as or backend
            seconds = self.measured.seconds(num_rows, num_cols, self.num_ns_steps, timed_as)
            seconds *= work.flops / self.work(num_rows, num_cols, 1, timed_as).flops
        else:
            seconds = work.flops / (self.tflops * 1e12)
            # All matrices of a stack share its launches.
            launches = work.num_products * self.kernel_us * 1e-6
            is_batched = BACKENDS[backend].is_batched
            seconds += launches / (self.stack_size(num_rows, num_cols) if is_batched else 1)
        return seconds

    def share_a_node(self, ranks: Sequence[int]) -> bool:
        """Return whether all ranks, ascending, are on one node."""
        return self.node(ranks[0]) == self.node(ranks[-1])

    def node(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.ranks_per_node

    def nodes_alike(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return what is equal for lists of ranks that share nodes alike.

        For each rank, the position of the first one on its node.
        """
        first_of_node: dict[int, int] = {}
        return tuple(
            first_of_node.setdefault(self.node(rank), position)
            for position, rank in enumerate(ranks)
        )

    @property
    def untimed(self) -> "CostModel":
        """The same without kernels that each rank chooses by timing, as Triton's autotuner does."""
        names = tuple(dict.fromkeys(BACKENDS[name].reference or name for name in self.backends))
        return self if names == self.backends else dataclasses.replace(self, backends=names)

    def latency_seconds(self, ranks: Sequence[int]) -> float:
        """Estimate a collective of some ranks, ascending, that carries nothing."""
        return self.all_reduce_us * 1e-6 * (1 if self.share_a_node(ranks) else 2)

    def all_gather_seconds(self, ranks: Sequence[int], num_bytes: int) -> float:
        """Estimate an all-gather after which each of some ranks has so many bytes.

        Every byte enters each node once, over the links of all ranks there.
        Source: "bus bandwidth" of doc/PERFORMANCE.md of NVIDIA/nccl-tests.
        """
        gbps = self.gbps
        if not self.share_a_node(ranks):
            fewest = _fewest_on_a_node(tuple(ranks), self.ranks_per_node)
            gbps = min(gbps, fewest * self.gbps_between_nodes)
        return num_bytes * (len(ranks) - 1) / len(ranks) / (gbps * 1e9)

    def seconds_per_byte(self, rank: int, peer: int) -> float:
        """Return the seconds that one byte takes between two ranks."""
        is_near = self.node(rank) == self.node(peer)
        return 1e-9 / (self.gbps if is_near else self.gbps_between_nodes)


# Replicas are asked for in each bucket that is tried.
@functools.lru_cache(maxsize=4096)
def _fewest_on_a_node(ranks: tuple[int, ...], ranks_per_node: int) -> int:
    """Return how many of some ranks are on the node that has fewest of them."""
    return min(Counter(rank // ranks_per_node for rank in ranks).values())


def _rates() -> dict[str, type[int] | type[float]]:
    """Return name and type of each rate."""
    # The fields themselves say which there are: a new rate needs no new code.
    return {
        field.name: int if isinstance(field.default, int) else float
        for field in dataclasses.fields(CostModel)
        if field.name not in ("measured", "backends", "segments")
    }


class HeldElements:
    """Elements of one matrix by rank, and how long they take over the link of an owner.

    Args:
        held: Elements by rank; replicas count each.
        num_elements: Elements of the matrix.
        cost: Rates of the machine.
    """

    def __init__(self, held: Mapping[int, int], num_elements: int, cost: CostModel) -> None:
        self._held = held
        self._cost = cost
        with_replicas = sum(held.values())
        self.has_replicas = with_replicas != num_elements
        # One of several replicas sends, and one gets results: the nearest, here taken for an
        # average one.
        self._nearest_fraction = num_elements / with_replicas
        self._total = with_replicas
        # Summed by node once: a matrix over 2,048 ranks is asked for each of its holders.
        self._by_node: dict[int, int] = defaultdict(int)
        for rank, elements in held.items():
            self._by_node[cost.node(rank)] += elements

    def one_byte_seconds(self, owner: int) -> float:
        """Estimate the seconds to receive one byte of every element that the owner lacks."""
        in_node = self._by_node.get(self._cost.node(owner), 0)
        near = (in_node - self._held.get(owner, 0)) / self._cost.gbps
        far = (self._total - in_node) / self._cost.gbps_between_nodes
        return (near + far) * self._nearest_fraction * 1e-9


# The machine the tests run on: one core a rank, gloo over the loopback. Matrices are not stacked:
# it gains nothing there, and for a few small shapes torch's batched product has other last bits.
CPU_RANKS = CostModel(
    tflops=0.4,
    gbps=2.0,
    gbps_between_nodes=2.0,
    kernel_us=20.0,
    all_reduce_us=500.0,
    stack_tiles=1,
)
