# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon in Megatron-Bridge: a configuration of its optimizer.

::

    from megatron_muon.bridge import MuonOptimizerConfig

    cfg.optimizer = MuonOptimizerConfig(optimizer="muon", lr=1e-3, muon_fsdp_comm_dtype="fp32")

Importing this module enables the patches; import it before the model is built. docs/bridge.md has
an example.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

from megatron.bridge.training.config import OptimizerConfig
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.core.optimizer import get_megatron_optimizer

from megatron_muon.mcore.enable import enable
from megatron_muon.mcore.options import MuonOptions

enable()
# Bridge's YAML files name classes, of allowed packages alone.
register_allowed_target_prefix("megatron_muon.")


@dataclass
class MuonOptimizerConfig(MuonOptions, OptimizerConfig):
    """``OptimizerConfig`` of Megatron-Bridge with the settings of ``MuonOptions`` as fields.

    Bridge writes them to ``run_config.yaml``, and reads them from YAML files and overrides.

    Args:
        optimizer: ``muon``, ``adaptive_muon``, another name that emerging-optimizers registers,
            such as ``soap``, or ``adam``.
    """

    optimizer: str = "muon"

    @classmethod
    def from_config(cls, config: OptimizerConfig, **options: Any) -> Self:  # noqa: ANN401
        """Return a configuration with the fields of a recipe's, and options of Muon."""
        values = {field.name: getattr(config, field.name) for field in fields(config)}
        return cls(**{**values, **options})

    def provide(
        self,
        model_chunks: Any,  # noqa: ANN401 - Bridge's signature
        config_overrides: Any = None,  # noqa: ANN401
        use_gloo_process_groups: bool = False,
        pg_collection: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Build the optimizer; Bridge calls this in place of its own choice by name."""
        return get_megatron_optimizer(
            self, model_chunks, config_overrides, use_gloo_process_groups, pg_collection
        )
