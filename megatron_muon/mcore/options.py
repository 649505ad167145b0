# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings of Muon that Megatron's OptimizerConfig has no fields for."""

from dataclasses import dataclass, fields
from typing import Any, Self

import torch

from megatron_muon.mcore.unsupported import ELEMENTWISE_OPTIMIZERS, MUON_OPTIMIZERS
from megatron_muon.newton_schulz import BackendChoice
from megatron_muon.plan.layout import Splits
from megatron_muon.plan.settings import EXCHANGE_FLAGS, CommDtype, ExchangeSettings

MOMENTUM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(kw_only=True)
class MuonOptions:
    """Settings of Muon, with the names of the flags and plain values, which YAML files can hold.

    The optimizer reads them from its configuration, in every trainer: flags of Megatron-LM are
    copied there, and ``megatron_muon.bridge.MuonOptimizerConfig`` has them as fields.

    Args:
        muon_fsdp_comm_dtype: See ``ExchangeSettings``, as for the next five.
        muon_fsdp_staging_bytes: Bytes.
        muon_fsdp_max_owners: Ranks per matrix.
        muon_fsdp_cost_model: Rates of the machine.
        muon_fsdp_newton_schulz: ``standard`` or ``gram``.
        muon_fsdp_log_plan: Whether the first rank of a plan logs a line about it.
        muon_fsdp_log_metrics: Whether metrics go to TensorBoard and W&B.
        muon_momentum_dtype: ``fp32`` or ``bf16``.
        muon_split_qkv: See ``Splits``, as for the next three.
        muon_split_glu: Gate and up.
        muon_split_mla: Multi-latent attention.
        muon_split_qkv_per_head: Every head.
        moe_router_skip_muon: Whether the scalar optimizer steps routers.
        use_checkpoint_opt_param_scheduler: Whether a loaded checkpoint has the schedule.
    """

    muon_fsdp_comm_dtype: CommDtype = "auto"
    muon_fsdp_staging_bytes: int | None = None
    muon_fsdp_max_owners: int = ExchangeSettings.max_owners
    muon_fsdp_cost_model: str = ""
    muon_fsdp_newton_schulz: BackendChoice = "standard"
    muon_fsdp_log_plan: bool = False
    muon_fsdp_log_metrics: bool = False
    muon_momentum_dtype: str = "fp32"
    muon_split_qkv: bool = True
    muon_split_glu: bool = False
    muon_split_mla: bool = False
    muon_split_qkv_per_head: bool = False
    moe_router_skip_muon: bool = False
    use_checkpoint_opt_param_scheduler: bool = False

    # Read with optimizers of whole matrices too, or flags of Muon that upstream ignores with them.
    _OF_ALL = frozenset(
        "muon_fsdp_staging_bytes muon_fsdp_cost_model muon_fsdp_log_plan muon_split_qkv "
        "moe_router_skip_muon use_checkpoint_opt_param_scheduler".split()
    )

    def unread_by(self, optimizer: str) -> list[str]:
        """List options that an optimizer of whole matrices does not read, a sentence each."""
        if optimizer in (*MUON_OPTIMIZERS, *ELEMENTWISE_OPTIMIZERS):
            return []
        return [
            f"--{field.name.replace('_', '-')}: {optimizer} does not read it; leave it out."
            for field in fields(MuonOptions)
            if field.name not in self._OF_ALL and getattr(self, field.name) != field.default
        ]

    @classmethod
    def of(cls, source: Any) -> Self:
        """Read the options from the attributes of an object; absent ones have their defaults."""
        names = [field.name for field in fields(MuonOptions) if hasattr(source, field.name)]
        return cls(**{name: getattr(source, name) for name in names})

    @property
    def exchange(self) -> ExchangeSettings:
        """Settings of the exchange.

        Raises:
            ValueError: See ``ExchangeSettings``.
        """
        return ExchangeSettings(
            **{name: getattr(self, f"muon_fsdp_{name}") for name in EXCHANGE_FLAGS}
        )

    @property
    def splits(self) -> Splits:
        """Fused parameters whose blocks are orthogonalized separately.

        Raises:
            ValueError: Options that contradict each other.
        """
        return Splits(
            self.muon_split_qkv,
            self.muon_split_glu,
            self.muon_split_mla,
            self.muon_split_qkv_per_head,
        )

    @property
    def momentum_dtype(self) -> torch.dtype:
        """Dtype of momentum.

        Raises:
            ValueError: Another name than ``fp32`` and ``bf16``.
        """
        if self.muon_momentum_dtype not in MOMENTUM_DTYPES:
            raise ValueError(
                f"muon_momentum_dtype (--exp-avg-dtype): expected fp32 or bf16, got "
                f"{self.muon_momentum_dtype}. Choose one of them."
            )
        return MOMENTUM_DTYPES[self.muon_momentum_dtype]


def carry_flags(original: Any, args: Any) -> Any:
    """Wrap ``get_megatron_optimizer_config`` to copy the flags that its fields do not cover."""
    config, config_overrides = original(args)
    vars(config).update(vars(MuonOptions.of(args)))
    return config, config_overrides
