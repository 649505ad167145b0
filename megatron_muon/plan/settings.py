# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings of the exchange: the user's, and the resulting numbers of a plan.

Errors call a field of a user ``exchange.NAME``; ``megatron_muon.user_errors`` knows its flag.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from megatron_muon.newton_schulz import BackendChoice
from megatron_muon.plan.cost import CostModel

CommDtype = Literal["auto", "bf16", "fp32"]
# The names of torch's dtypes: runtime/ looks them up there, and this package needs no torch.
type DTypeName = Literal["bfloat16", "float32"]

DTYPE_BYTES: dict[DTypeName, int] = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class CommDtypes:
    """Dtypes of rows on their way to their owner, and of results on their way back.

    Args:
        gather_dtype: Dtype of the rows. ``bfloat16`` rows are first divided by the float64 norm of
            their block: rounding them before that would change the norm, and so the result.
        scatter_dtype: Dtype of the results. Results of Newton-Schulz in bf16 are bf16-valued, so
            ``bfloat16`` loses nothing with any gather dtype. ``float32`` if their owner changes
            them.
        num_inputs: Tensors of a matrix that travel to its owner. Results replace the first.
    """

    gather_dtype: DTypeName
    scatter_dtype: DTypeName
    num_inputs: int = 1

    @property
    def normalizes(self) -> bool:
        """Whether rows are divided by the norm of their block before they travel."""
        return self.gather_dtype == "bfloat16"

    @property
    def gather_bytes(self) -> int:
        """Bytes per element in the gather."""
        return DTYPE_BYTES[self.gather_dtype]

    @property
    def scatter_bytes(self) -> int:
        """Bytes per element in the scatter."""
        return DTYPE_BYTES[self.scatter_dtype]

    @property
    def stack_dtype(self) -> DTypeName:
        """Dtype of stacks of rows and results: the wider of both."""
        return "float32" if "float32" in (self.gather_dtype, self.scatter_dtype) else "bfloat16"

    @property
    def of_buffers(self) -> tuple[DTypeName, ...]:
        """Dtypes of the buffers of a bucket; see ``BucketSizes``."""
        gather, scatter = self.gather_dtype, self.scatter_dtype
        return gather, gather, self.stack_dtype, scatter, scatter


@dataclass(frozen=True)
class PlanSettings:
    """Settings of the planner, the same on all ranks of a domain.

    Args:
        cost: Rates of the machine, and sizes of stacks.
        dtypes: Dtypes of rows and results.
        max_owners: Maximum number of owners per matrix.
        num_buckets: Number of buckets, if memory allows it; None for the rule of
            ``megatron_muon.plan.buckets``.
        staging_bytes: Memory of a rank for messages and stacks of all plans, if they fit into it.
    """

    cost: CostModel = field(default_factory=CostModel)
    dtypes: CommDtypes = CommDtypes("bfloat16", "bfloat16")
    # Every part repeats the cubic term of its matrix, and parts all-reduce inside a node of 8.
    max_owners: int = 8
    num_buckets: int | None = None
    # Every plan of docs/performance.md needs less. When a step runs, activations are gone.
    staging_bytes: int = 11 * 10**9 // 2

    def for_whole_matrices(self) -> "PlanSettings":
        """Return the numbers of a plan whose owners step matrices one by one.

        Weights and gradients travel to them, and new weights come back.
        """
        cost = dataclasses.replace(self.cost, stack_tiles=1)
        dtypes = CommDtypes("float32", "float32", num_inputs=2)
        return dataclasses.replace(self, cost=cost, dtypes=dtypes, max_owners=1)

    def staging_budget(self, num_plans: int) -> "PlanSettings":
        """Return the settings of one of several plans of a rank: they share the memory equally."""
        return dataclasses.replace(self, staging_bytes=self.staging_bytes // num_plans)


# Flags of the exchange, --muon-fsdp-<name>, with the defaults of ExchangeSettings.
EXCHANGE_FLAGS: Mapping[str, Mapping[str, Any]] = {
    "comm_dtype": {
        "choices": get_args(CommDtype),
        "help": "Dtype of rows on their way to owners. bf16: rows normalized by the float64 norm "
        "of their matrix; fp32: fp32 rows, for the bits of upstream's Muon with one owner per "
        "matrix; auto: bf16 with --muon-fp32-matmul-prec medium, otherwise fp32.",
    },
    "staging_bytes": {
        "type": int,
        "help": "Maximum memory of messages and stacks on a rank while a step runs, bytes. "
        "Default: 5.5 GB, or the least that works if that is more.",
    },
    "max_owners": {
        "type": int,
        "help": "Maximum number of ranks per matrix, a power of two. A matrix is split only "
        "if it alone exceeds the fair share of a rank. 1 turns splitting off: results have the "
        "same bits on any number of ranks.",
    },
    "cost_model": {
        "help": "Rates of the machine for choosing owners, as name=value,...: tflops, "
        "half_rate_side, gbps, gbps_between_nodes, ranks_per_node, kernel_us and others of "
        "megatron_muon.plan.cost.CostModel. Default: the rates of the GPU's compute capability.",
    },
    "newton_schulz": {
        "choices": get_args(BackendChoice),
        "help": "How Newton-Schulz is computed. standard (default): upstream's steps, and bits. "
        "gram: iterates on the Gram matrix and multiplies the matrix at the end, which costs less "
        "for long matrices.",
    },
    "log_plan": {
        "action": "store_true",
        "help": "Log a line for each plan: its ranks, matrices, buckets and staging memory.",
    },
}


@dataclass(frozen=True)
class ExchangeSettings:
    """Settings of the assignment, exchange and orthogonalization of matrices.

    Args:
        comm_dtype: ``bf16``: rows are sent normalized, in bf16. ``fp32``: rows are sent in fp32,
            and Newton-Schulz of a matrix with one owner is upstream's function, also where upstream
            would spread it over tensor-parallel ranks with other rounding
            (``--muon-tp-mode distributed``). ``auto``: bf16 where Newton-Schulz runs in bf16
            (matmul precision medium), otherwise fp32.
        staging_bytes: Maximum memory of messages, stacks and results on a rank while a step runs,
            without the workspace of Newton-Schulz. None: 5.5 GB, or the least that works if that is
            more.
        max_owners: Maximum number of owners per matrix, a power of two. A matrix is split
            only if it alone exceeds the fair share of a rank. 1 keeps every matrix whole, and
            results the same bits on any number of ranks.
        cost_model: Rates of the machine, as ``name=value,...`` for ``CostModel.parse()``.
        newton_schulz: How Newton-Schulz is computed. ``standard``: upstream's steps, and bits.
            ``gram``: fewer operations for long matrices, see ``megatron_muon.newton_schulz``.
        num_buckets: Number of buckets of a plan, if memory allows it; None for the rule of
            ``megatron_muon.plan.buckets``. For measuring other numbers; it has no flag.
        log_plan: Whether the first rank of a plan logs a line about it.

    Raises:
        ValueError: An unknown dtype or way to compute Newton-Schulz, a size or a number that cannot
            work, or a cost model that does not parse.
    """

    comm_dtype: CommDtype = "auto"
    staging_bytes: int | None = None
    max_owners: int = PlanSettings.max_owners
    cost_model: str = ""
    newton_schulz: BackendChoice = "standard"
    num_buckets: int | None = None
    log_plan: bool = False

    def __post_init__(self) -> None:
        """Check the choices, and that the cost model parses."""
        for name, value, choices in (
            ("comm_dtype", self.comm_dtype, get_args(CommDtype)),
            ("newton_schulz", self.newton_schulz, get_args(BackendChoice)),
        ):
            if value not in choices:
                raise ValueError(
                    f"exchange.{name}: expected one of {choices}, got {value!r}. Choose one."
                )
        for name in ("staging_bytes", "num_buckets"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    f"exchange.{name}: expected a positive number, got {value}. Leave it out."
                )
        # A power of two: parts are doubled until a matrix is short enough.
        if self.max_owners < 1 or self.max_owners & (self.max_owners - 1):
            raise ValueError(
                f"exchange.max_owners: expected a power of two, got {self.max_owners}. Use 1 to "
                "keep each matrix whole."
            )
        CostModel.parse(self.cost_model)

    def plan_settings(self, cost: CostModel, *, is_bf16: bool) -> PlanSettings:
        """Return the numbers of a plan.

        Args:
            cost: Rates of the machine.
            is_bf16: Whether Newton-Schulz runs in bf16.

        Raises:
            ValueError: bf16 messages were asked for, and Newton-Schulz runs in fp32.
        """
        staging_bytes = self.staging_bytes or PlanSettings.staging_bytes
        dtypes = self.comm_dtypes(is_bf16)
        return PlanSettings(cost, dtypes, self.max_owners, self.num_buckets, staging_bytes)

    def comm_dtypes(self, is_bf16: bool) -> CommDtypes:
        """Return the dtypes of messages for Newton-Schulz in bf16 or in fp32.

        Raises:
            ValueError: bf16 messages were asked for, and Newton-Schulz runs in fp32.
        """
        if self.comm_dtype == "bf16" and not is_bf16:
            raise ValueError(
                "exchange.comm_dtype: expected fp32 for Newton-Schulz in fp32, got bf16, which "
                "would round its input. Use exchange.comm_dtype fp32, or fp32_matmul_prec medium."
            )
        results: DTypeName = "bfloat16" if is_bf16 else "float32"
        return CommDtypes("float32" if self.comm_dtype == "fp32" else results, results)
