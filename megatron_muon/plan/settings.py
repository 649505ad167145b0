# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How matrices are exchanged: one frozen object from the ``--muon-fsdp-*`` flags."""

from dataclasses import dataclass

from megatron_muon.plan.cost import CostModel, WireBytes

EXCHANGES = ("owner", "all_gather")
WIRES = ("auto", "bf16", "fp32")


@dataclass(frozen=True)
class ExchangeSettings:
    """Say who orthogonalizes what, and what travels.

    Args:
        exchange: ``owner``: each matrix is orthogonalized once, on one rank; ``all_gather``: every
            rank of the shard group receives every matrix and orthogonalizes it.
        wire: ``bf16``: normalized bf16 rows; ``fp32``: fp32 rows, Newton-Schulz is then the stock
            function on the very bits of the whole matrix, also where upstream would spread it over
            tensor-parallel ranks with other rounding (``--muon-tp-mode distributed``); ``auto``:
            bf16 where Newton-Schulz runs in bf16 (matmul precision medium), fp32 else.
        bucket_elements: Elements of a bucket that a rank owns, at most; bounds staging memory.
        max_parts: Ranks that one matrix may be cut over once ranks outnumber matrices, a power of
            two; 1 keeps each whole, and results the same bits on any number of ranks.
        cost: Rates of the machine, as ``name=value,...`` for
            :meth:`~megatron_muon.plan.cost.CostModel.parse`.
        log_plan: Whether rank 0 logs a report of the plan.

    Raises:
        ValueError: An unknown exchange or wire, a size that cannot work, or a cost model that does
            not parse.
    """

    exchange: str = "owner"
    wire: str = "auto"
    bucket_elements: int = 2**27
    max_parts: int = 8
    cost: str = ""
    log_plan: bool = False

    def __post_init__(self) -> None:
        """Check the choices, and that the cost model parses."""
        for flag, value, choices in (
            ("exchange", self.exchange, EXCHANGES),
            ("wire", self.wire, WIRES),
        ):
            if value not in choices:
                raise ValueError(
                    f"{flag}: expected one of {choices}, got {value!r}. "
                    f"Set --muon-fsdp-{flag} accordingly."
                )
        if self.bucket_elements < 1:
            raise ValueError(
                f"bucket size: expected a positive number of elements, got {self.bucket_elements}. "
                "Set --muon-fsdp-bucket-size accordingly."
            )
        if self.max_parts < 1 or self.max_parts & (self.max_parts - 1):
            raise ValueError(
                f"max parts: expected a power of two, got {self.max_parts}. "
                "Set --muon-fsdp-max-parts accordingly."
            )
        if "num_ns_steps" in self.cost:
            raise ValueError(
                f"cost model: expected rates of the machine, got {self.cost!r}. "
                "Set --muon-num-ns-steps for the number of steps."
            )
        CostModel.parse(self.cost)

    def wire_for(self, is_bf16: bool) -> str:
        """Return the wire for Newton-Schulz in bf16 or in fp32.

        Raises:
            ValueError: bf16 was asked for, and Newton-Schulz runs in fp32.
        """
        if self.wire == "bf16" and not is_bf16:
            raise ValueError(
                "wire: expected fp32 for Newton-Schulz in fp32, got bf16, which would round its "
                "input. Set --muon-fsdp-wire fp32, or --muon-fp32-matmul-prec medium."
            )
        if self.wire == "auto":
            return "bf16" if is_bf16 else "fp32"
        return self.wire


def wire_bytes(wire: str, is_bf16: bool) -> WireBytes:
    """Return the bytes of an element on a wire; bf16-valued results go back as bf16 on either."""
    back = 2 if is_bf16 else 4
    return WireBytes(2, back, 8) if wire == "bf16" else WireBytes(4, back, 0)
