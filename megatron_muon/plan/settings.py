# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How matrices are exchanged: one frozen object.

Its errors call a field ``exchange.NAME``; :mod:`megatron_muon.plan.flags` knows its flag.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from megatron_muon.newton_schulz.registry import BACKENDS, BackendChoice
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.cost_table import CostSource
from megatron_muon.plan.wire import Wire

ExchangeMode = Literal["owner", "all_gather"]
WireChoice = Literal["auto", "bf16", "fp32"]

# With 6 GB the predicted step of no plan of docs/performance.md that fits is shorter by 1 %, with
# 2.1 GB that of DeepSeek-V3 on 64 ranks is longer by 2 %. When a step runs, activations are gone.
_WANTED_STAGING_BYTES = 4 * 10**9


@dataclass(frozen=True)
class ExchangeSettings:
    """Who orthogonalizes what, and what travels.

    Args:
        mode: ``owner``: each matrix is orthogonalized once, on one rank; once in each of
            ``instance_groups``. ``all_gather``: every rank of the shard group receives every matrix
            and orthogonalizes it.
        wire: ``bf16``: rows travel normalized, in bf16. ``fp32``: rows travel in fp32, and
            Newton-Schulz is the stock function on the very bits of the whole matrix, also where
            upstream would spread it over tensor-parallel ranks with other rounding
            (``--muon-tp-mode distributed``). ``auto``: bf16 where Newton-Schulz runs in bf16
            (matmul precision medium), otherwise fp32.
        staging_bytes: Most bytes of messages and stacks on a rank, while a step runs; experts and
            dense matrices have an equal share each. None: 4 GB, or little more than the least that
            works.
        max_parts: Most owners of one matrix once ranks outnumber matrices, a power of two. 1 keeps
            each matrix whole, and results the same bits on any number of ranks.
        instance_groups: Groups of instances (replicas of all shards, as those of HSDP) that each
            orthogonalize every matrix. 1: all instances share the work. None: as many as the cost
            model finds fastest; more where links between instances are slow.
        cost_model: Rates of the machine, as ``name=value,...`` for
            :meth:`~megatron_muon.plan.cost.CostModel.parse`. ``measure`` among them times each
            shape at construction, ``measure:PATH`` writes the times to a file too, and
            ``file:PATH`` reads them.
        newton_schulz: How Newton-Schulz is computed. ``standard``: upstream's steps, and bits.
            ``symmetric``, ``gram``: a cheaper way, see :mod:`megatron_muon.newton_schulz`.
            ``auto``: for each shape the one that the cost model finds cheapest, of those that this
            machine can run.
        overlap_within_matrices: Whether a matrix may be orthogonalized while its rows arrive, and
            its results leave, portion by portion. The planner does so where it shortens the
            predicted step. Sums over portions round differently, so results have other bits than
            without it. It takes the bf16 wire.
        log_plan: Whether rank 0 logs a report of the plan.

    Raises:
        ValueError: An unknown mode, wire or way to compute Newton-Schulz, one that ``all_gather``
            does not have, a size or a number that cannot work, or a cost model that does not
            parse.
    """

    mode: ExchangeMode = "owner"
    wire: WireChoice = "auto"
    staging_bytes: int | None = None
    # Each part repeats the cubic term of its matrix, and parts all-reduce inside a node of 8.
    max_parts: int = 8
    instance_groups: int | None = None
    cost_model: str = ""
    newton_schulz: BackendChoice = "standard"
    overlap_within_matrices: bool = False
    log_plan: bool = False

    def __post_init__(self) -> None:
        """Check the choices, and that the cost model parses."""
        for field, value, choices in (
            ("mode", self.mode, get_args(ExchangeMode)),
            ("wire", self.wire, get_args(WireChoice)),
            ("newton_schulz", self.newton_schulz, get_args(BackendChoice)),
        ):
            if value not in choices:
                raise ValueError(
                    f"exchange.{field}: expected one of {choices}, got {value!r}. Choose one."
                )
        if self.newton_schulz != "standard" and self.mode == "all_gather":
            raise ValueError(
                "exchange.newton_schulz: expected standard with exchange.mode all_gather, which "
                f"runs upstream's own function, got {self.newton_schulz}. Use exchange.mode owner."
            )
        if self.overlap_within_matrices and self.mode == "all_gather":
            raise ValueError(
                "exchange.overlap_within_matrices: expected exchange.mode owner, got all_gather, "
                "where every rank gets whole matrices. Use exchange.mode owner, or leave it out."
            )
        if self.staging_bytes is not None and self.staging_bytes < 1:
            raise ValueError(
                "exchange.staging_bytes: expected a positive number of bytes, got "
                f"{self.staging_bytes}. Leave it out for 4 GB."
            )
        if self.instance_groups is not None and self.instance_groups < 1:
            raise ValueError(
                "exchange.instance_groups: expected a positive number of groups, got "
                f"{self.instance_groups}. Leave it out, or use 1 for one group of all instances."
            )
        if self.instance_groups is not None and self.mode == "all_gather":
            raise ValueError(
                "exchange.instance_groups: expected exchange.mode owner, got all_gather, where "
                "every rank orthogonalizes every matrix. Use exchange.mode owner, or leave it out."
            )
        if self.instance_groups not in (None, 1) and self.names_a_kernel:
            raise ValueError(
                "exchange.instance_groups: expected 1 with exchange.newton_schulz "
                f"{self.newton_schulz}, got {self.instance_groups}. Groups run torch's products "
                "alone: kernels that ranks choose by timing could make instances differ. Leave it "
                "out, or use exchange.newton_schulz standard, gram or auto."
            )
        # A power of two: parts are doubled until a matrix is short enough.
        if self.max_parts < 1 or self.max_parts & (self.max_parts - 1):
            raise ValueError(
                f"exchange.max_parts: expected a power of two, got {self.max_parts}. Use 1 to keep "
                "each matrix whole."
            )
        # The optimizer knows its number of steps; a second value here could only disagree.
        if "num_ns_steps" in self.cost_source.rates:
            raise ValueError(
                f"exchange.cost_model: expected rates of the machine, got {self.cost_model!r}. Set "
                "num_ns_steps for the number of steps."
            )
        CostModel.parse(self.cost_source.rates)

    @property
    def names_a_kernel(self) -> bool:
        """Whether :attr:`newton_schulz` is the name of kernels that are not torch's."""
        named = BACKENDS.get(self.newton_schulz)
        return named is not None and named.reference is not None

    @property
    def wanted_staging_bytes(self) -> int:
        """Staging memory that a plan stays within if it can."""
        return _WANTED_STAGING_BYTES if self.staging_bytes is None else self.staging_bytes

    @property
    def cost_source(self) -> CostSource:
        """Where costs come from."""
        return CostSource.parse(self.cost_model)

    def wire_for(self, is_bf16: bool) -> Wire:
        """Return the wire for Newton-Schulz in bf16 or in fp32.

        Raises:
            ValueError: bf16 was asked for, and Newton-Schulz runs in fp32. Or overlap
                within matrices was asked for, and rows travel in fp32.
        """
        if self.wire == "bf16" and not is_bf16:
            raise ValueError(
                "exchange.wire: expected fp32 for Newton-Schulz in fp32, got bf16, which would "
                "round its input. Use exchange.wire fp32, or fp32_matmul_prec medium."
            )
        wire: WireChoice = self.wire
        if wire == "auto":
            wire = "bf16" if is_bf16 else "fp32"
        if self.overlap_within_matrices and wire == "fp32":
            raise ValueError(
                "exchange.overlap_within_matrices: expected exchange.wire bf16, got fp32, on which "
                "upstream's own function takes the whole matrix. Use exchange.wire bf16, or leave "
                "it out."
            )
        return Wire.of(wire, is_bf16=is_bf16)
