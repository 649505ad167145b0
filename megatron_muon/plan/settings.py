# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How matrices are exchanged: one frozen object.

Its errors call a field ``exchange.NAME``; :mod:`megatron_muon.user_errors` knows its flag.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_muon.newton_schulz import BackendChoice
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.wire import Wire

WireChoice = Literal["auto", "bf16", "fp32"]

# Every plan of docs/performance.md needs less. When a step runs, activations are gone.
_WANTED_STAGING_BYTES = 11 * 10**9 // 2


@dataclass(frozen=True)
class ExchangeSettings:
    """How matrices are assigned to ranks, sent and orthogonalized.

    Args:
        wire: ``bf16``: rows are sent normalized, in bf16. ``fp32``: rows are sent in fp32, and
            Newton-Schulz is the stock function on the very bits of the whole matrix, also where
            upstream would spread it over tensor-parallel ranks with other rounding
            (``--muon-tp-mode distributed``). ``auto``: bf16 where Newton-Schulz runs in bf16
            (matmul precision medium), otherwise fp32.
        staging_bytes: Maximum memory of messages, stacks and results on a rank while a step runs;
            the workspace of Newton-Schulz is not in it. None: 5.5 GB, or the least that works if
            that is more.
        max_parts: Maximum number of owners per matrix, a power of two. A matrix is split
            only if it alone exceeds the fair share of a rank. 1 keeps every matrix whole, and
            results the same bits on any number of ranks.
        cost_model: Rates of the machine, as ``name=value,...`` for
            :meth:`~megatron_muon.plan.cost.CostModel.parse`.
        newton_schulz: How Newton-Schulz is computed. ``standard``: upstream's steps, and bits.
            ``symmetric``, ``gram``: a cheaper way, see :mod:`megatron_muon.newton_schulz`.
            ``auto``: for every shape the one of ``standard``, ``gram`` and ``gram_symmetric`` that
            the cost model finds cheapest, of those that this machine can run.
        num_buckets: Number of buckets of a plan, if memory allows it; None for the rule of
            :mod:`megatron_muon.plan.buckets`. For measuring other numbers; it has no flag.
        depth: Gathers in flight beside the bucket in work, likewise.
        log_plan: Whether rank 0 logs a report of the plan.

    Raises:
        ValueError: An unknown wire or way to compute Newton-Schulz, a size or a number that cannot
            work, or a cost model that does not parse.
    """

    wire: WireChoice = "auto"
    staging_bytes: int | None = None
    # Every part repeats the cubic term of its matrix, and parts all-reduce inside a node of 8.
    max_parts: int = 8
    cost_model: str = ""
    newton_schulz: BackendChoice = "standard"
    num_buckets: int | None = None
    depth: int | None = None
    log_plan: bool = False

    def __post_init__(self) -> None:
        """Check the choices, and that the cost model parses."""
        for field, value, choices in (
            ("wire", self.wire, get_args(WireChoice)),
            ("newton_schulz", self.newton_schulz, get_args(BackendChoice)),
        ):
            if value not in choices:
                raise ValueError(
                    f"exchange.{field}: expected one of {choices}, got {value!r}. Choose one."
                )
        if self.staging_bytes is not None and self.staging_bytes < 1:
            raise ValueError(
                "exchange.staging_bytes: expected a positive number of bytes, got "
                f"{self.staging_bytes}. Leave it out for 5.5 GB."
            )
        for field, number in (("num_buckets", self.num_buckets), ("depth", self.depth)):
            if number is not None and number < 1:
                raise ValueError(
                    f"exchange.{field}: expected a positive number, got {number}. Leave it out."
                )
        # A power of two: parts are doubled until a matrix is short enough.
        if self.max_parts < 1 or self.max_parts & (self.max_parts - 1):
            raise ValueError(
                f"exchange.max_parts: expected a power of two, got {self.max_parts}. Use 1 to keep "
                "each matrix whole."
            )
        # The optimizer knows its number of steps; a second value here could only disagree.
        if "num_ns_steps" in self.cost_model:
            raise ValueError(
                f"exchange.cost_model: expected rates of the machine, got {self.cost_model!r}. Set "
                "num_ns_steps for the number of steps."
            )
        CostModel.parse(self.cost_model)

    @property
    def wanted_staging_bytes(self) -> int:
        """Staging memory that a rank stays within if it can."""
        return _WANTED_STAGING_BYTES if self.staging_bytes is None else self.staging_bytes

    def wire_for(self, is_bf16: bool) -> Wire:
        """Return the wire for Newton-Schulz in bf16 or in fp32.

        Raises:
            ValueError: bf16 was asked for, and Newton-Schulz runs in fp32.
        """
        if self.wire == "bf16" and not is_bf16:
            raise ValueError(
                "exchange.wire: expected fp32 for Newton-Schulz in fp32, got bf16, which would "
                "round its input. Use exchange.wire fp32, or fp32_matmul_prec medium."
            )
        wire: WireChoice = self.wire
        if wire == "auto":
            wire = "bf16" if is_bf16 else "fp32"
        return Wire.of(wire, is_bf16=is_bf16)
