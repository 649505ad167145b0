# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What a step costs: seconds of Newton-Schulz by shape, seconds of traffic by link."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Newton-Schulz multiplies three times a step: the Gram matrix, its square, and the update.
_NUM_MATMULS = 3


@dataclass(frozen=True)
class WireBytes:
    """Bytes an element takes on its way.

    Args:
        there: To the owner.
        back: From the owner.
        norm: Of each block, in the all-reduce of squared norms.
    """

    there: int
    back: int
    norm: int


@dataclass(frozen=True)
class CostModel:
    """Estimate seconds from rates of the machine; only their ratios decide who owns what.

    Args:
        tflops: Matrix-multiply rate of one rank in Newton-Schulz, TFLOP/s.
        gbps: Bandwidth of one rank to ranks of its node, GB/s each way.
        gbps_between_nodes: Bandwidth of one rank to other nodes, GB/s each way.
        ranks_per_node: Consecutive ranks that share a node.
        kernel_us: Time below which no kernel comes, launch included, microseconds.
        all_reduce_us: Latency of an all-reduce inside a node, microseconds; twice that between.
        num_ns_steps: Newton-Schulz steps.
        stack_elements: Matrices of the same shape are stacked up to this many elements. A stack is
            padded to the full size: at most so many elements more for each shape and bucket, which
            loads do not count.

    Raises:
        ValueError: A rate is not positive.
    """

    tflops: float = 500.0
    gbps: float = 450.0
    gbps_between_nodes: float = 45.0
    ranks_per_node: int = 8
    kernel_us: float = 5.0
    all_reduce_us: float = 20.0
    num_ns_steps: int = 5
    stack_elements: int = 2**21

    def __post_init__(self) -> None:
        """Check that every rate is positive."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            allowed = value >= 0 if field.name.endswith("_us") else value > 0
            if not allowed:
                raise ValueError(
                    f"cost model: expected a positive {field.name}, got {value}. Give the rates of "
                    "your machine, such as tflops=500,gbps=450."
                )

    @classmethod
    def parse(cls, text: str, base: "CostModel | None" = None) -> "CostModel":
        """Read ``name=value,name=value``; what is not named stays as in ``base``.

        Raises:
            ValueError: A name or a value is none.
        """
        types = {
            field.name: int if isinstance(field.default, int) else float
            for field in dataclasses.fields(cls)
        }
        changes: dict[str, float] = {}
        for entry in filter(None, text.split(",")):
            name, _, value = entry.partition("=")
            try:
                changes[name] = types[name](value)
            except (KeyError, ValueError):
                raise ValueError(
                    f"cost model: expected name=value with a name of {sorted(types)}, got "
                    f"{entry!r}. Example: tflops=500,gbps=450,gbps_between_nodes=45."
                ) from None
        return dataclasses.replace(base or cls(), **changes)  # type: ignore[arg-type]

    def stack_size(self, num_rows: int, num_cols: int) -> int:
        """Return how many matrices of a shape go into one Newton-Schulz call.

        It depends on the shape alone, so that the same kernels run on any number of ranks.
        """
        return max(1, min(64, self.stack_elements // (num_rows * num_cols)))

    def newton_schulz_flops(self, num_rows: int, num_cols: int) -> int:
        """Count the floating-point operations of one matrix: 5 (4 m n^2 + 2 n^3) for 5 steps."""
        m, n = max(num_rows, num_cols), min(num_rows, num_cols)
        return self.num_ns_steps * (4 * m * n * n + 2 * n**3)

    def newton_schulz_seconds(
        self, num_rows: int, num_cols: int, num_parts: int = 1, *, is_near: bool = True
    ) -> float:
        """Estimate the time a matrix takes on each of the ranks it is cut over.

        Args:
            num_rows: Rows.
            num_cols: Columns.
            num_parts: Ranks that hold equal parts of the longer dimension, and all-reduce the Gram
                matrix of the shorter one in bf16 in each step.
            is_near: Whether these ranks share a node.
        """
        m, n = max(num_rows, num_cols), min(num_rows, num_cols)
        flops = self.num_ns_steps * (4 * m / num_parts * n * n + 2 * n**3)
        seconds = flops / (self.tflops * 1e12)
        launches = self.num_ns_steps * _NUM_MATMULS * self.kernel_us * 1e-6
        seconds += launches / self.stack_size(num_rows, num_cols)
        if num_parts > 1:
            gbps = self.gbps if is_near else self.gbps_between_nodes
            gram_bytes = 2 * n * n * 2 * (num_parts - 1) / num_parts
            latency = self.all_reduce_us * 1e-6 * (1 if is_near else 2)
            all_reduce = latency + gram_bytes / (gbps * 1e9)
            seconds += self.num_ns_steps * all_reduce
        return seconds

    def share_a_node(self, ranks: Sequence[int]) -> bool:
        """Tell whether all ranks, ascending, are on one node."""
        return self.node(ranks[0]) == self.node(ranks[-1])

    def node(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.ranks_per_node

    def seconds_per_byte(self, rank: int, peer: int) -> float:
        """Return the time of one byte between two ranks."""
        is_near = self.node(rank) == self.node(peer)
        return 1e-9 / (self.gbps if is_near else self.gbps_between_nodes)


class HeldElements:
    """Elements of one matrix by rank, and how long they take over the link of an owner.

    Args:
        held: Elements by rank; those of copies count each.
        cost: Rates of the machine.
    """

    def __init__(self, held: Mapping[int, int], cost: CostModel) -> None:
        self._held, self._cost = held, cost
        self.num_copies = sum(held.values())
        self._by_node: dict[int, int] = defaultdict(int)
        for rank, elements in held.items():
            self._by_node[cost.node(rank)] += elements

    def seconds_per_byte(self, owner: int) -> float:
        """Return the time of a byte for each element that other ranks hold."""
        in_node = self._by_node.get(self._cost.node(owner), 0)
        near = (in_node - self._held.get(owner, 0)) / self._cost.gbps
        far = (self.num_copies - in_node) / self._cost.gbps_between_nodes
        return (near + far) * 1e-9


# The machine the tests run on: one core a rank, gloo over the loopback. Matrices are not stacked:
# it gains nothing there, and for a few small shapes torch's batched product has other last bits.
CPU_RANKS = CostModel(
    tflops=0.4,
    gbps=2.0,
    gbps_between_nodes=2.0,
    kernel_us=20.0,
    all_reduce_us=500.0,
    stack_elements=1,
)
