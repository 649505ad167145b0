# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks of the command line, the settings read from it, and what Megatron's own checks see."""

import argparse
import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_muon.mcore.flags import EXCHANGE_FLAGS, add_flags
from megatron_muon.mcore.unsupported import (
    BUILT_OPTIMIZERS,
    FSDP_UNSUPPORTED,
    raise_where_refused,
    unsupported_settings,
)
from megatron_muon.plan.layout import Splits
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.user_errors import SettingsError, in_flags

logger = logging.getLogger(__name__)

# Names under which Megatron builds a Muon without Megatron-FSDP.
MUON_OPTIMIZERS = ("muon", "dist_muon", "adaptive_muon")


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot work under Megatron-FSDP with Muon or QK-clip, and invalid splits.

    With pipeline stages ``--no-align-grad-reduce`` is set: otherwise Megatron runs the last
    microbatch of all stages but the first under ``no_sync()``, and then starts the reduction by a
    call that Megatron-FSDP ignores. Gradients stay unreduced under no_shard, optim and HSDP.

    Args:
        args: The parsed command line, before Megatron validates it.

    Raises:
        SettingsError: With all settings that cannot work.
    """
    if args.use_megatron_fsdp and args.optimizer not in ("adam", "sgd"):
        # All problems are reported at once: a queued job should not fail a second time.
        refusals = unsupported_settings(vars(args))
        try:
            exchange_settings(args).wire_for(args.muon_fp32_matmul_prec == "medium")
        except ValueError as error:
            refusals.append(in_flags(str(error)))
        refusals += _split_refusals(args)
        raise_where_refused(args.optimizer, refusals)
    elif args.use_megatron_fsdp:
        raise_where_refused(args.optimizer, unsupported_settings(vars(args), FSDP_UNSUPPORTED))
    elif args.optimizer in MUON_OPTIMIZERS:
        refusals = _split_refusals(args)
        if refusals:
            raise SettingsError("\n  ".join([f"--optimizer {args.optimizer}:", *refusals]))
    if args.use_megatron_fsdp and args.pipeline_model_parallel_size > 1:
        logger.info("--no-align-grad-reduce is set: Megatron-FSDP cannot align stages")
        args.align_grad_reduce = False


def _split_refusals(args: argparse.Namespace) -> list[str]:
    """List the flags for splits that cannot work, as sentences."""
    refusals = []
    try:
        splits = requested_splits(args, args)
    except ValueError as error:
        return [str(error)]
    if args.optimizer == "lion" and (splits != Splits(qkv=splits.qkv) or skips_router(args)):
        return [
            "--muon-split-glu, --muon-split-mla, --muon-split-qkv-per-head and "
            "--moe-router-skip-muon: expected --optimizer muon or adaptive_muon, got lion, which "
            "orthogonalizes nothing. Leave them out."
        ]
    is_upstream_joined = not args.use_megatron_fsdp and args.muon_tp_mode != "blockwise"
    if splits.per_head and args.tensor_model_parallel_size > 1 and is_upstream_joined:
        refusals.append(
            "--muon-split-qkv-per-head: expected --muon-tp-mode blockwise where upstream's Muon "
            f"orthogonalizes, got {args.muon_tp_mode}, which joins one head of each "
            "tensor-parallel rank to a matrix. Use --use-megatron-fsdp, or blockwise."
        )
    is_layer_wise = args.optimizer == "dist_muon" or getattr(
        args, "use_layer_wise_distributed_optimizer", False
    )
    if is_layer_wise and skips_router(args):
        refusals.append(
            "--moe-router-skip-muon: expected another optimizer than the layer-wise one, which "
            "chooses buffers by its own rule. Leave the flag out."
        )
    return refusals


def check_yaml(config: Any, path: str) -> None:
    """Refuse Muon with Megatron-FSDP from a YAML configuration.

    Megatron reads the file instead of the command line, whose flags it drops, and validates it
    without :func:`check`.

    Args:
        config: What the file says.
        path: The file.

    Raises:
        SettingsError: The file or the command line asks for it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--optimizer", default=getattr(config, "optimizer", "adam"))
    parser.add_argument(
        "--use-megatron-fsdp",
        action="store_true",
        default=bool(getattr(config, "use_megatron_fsdp", False)),
    )
    # Both may ask for it: Megatron drops the command line, but the user meant it.
    asked, _ = parser.parse_known_args(sys.argv[1:])
    if asked.use_megatron_fsdp and asked.optimizer not in ("adam", "sgd"):
        raise SettingsError(
            f"--yaml-cfg: expected command-line flags for --optimizer {asked.optimizer} "
            f"--use-megatron-fsdp, got {path}, for which Megatron drops them. "
            "Pass the settings as flags."
        )


def add_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``add_megatron_arguments`` to add the flags of this package."""

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add Megatron's flags, then ours."""
        return add_flags(original(parser))

    return add_megatron_arguments


def validate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``validate_args`` to accept Muon with Megatron-FSDP and to refuse what cannot work.

    The original asserts that Megatron-FSDP runs with adam or sgd, so it sees ``adam``. Its other
    checks of Megatron-FSDP stay in force.
    """

    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, defaults: dict[str, Any] = {}) -> Any:  # noqa: B006
        """Refuse what cannot work, then validate as for Adam."""
        check(args)
        asked = args.optimizer
        if asked not in BUILT_OPTIMIZERS or not args.use_megatron_fsdp:
            return original(args, defaults)
        logger.info(
            "--optimizer %s: Megatron's own checks, and the arguments that it prints, see adam",
            asked,
        )
        args.optimizer = "adam"
        if asked in MUON_OPTIMIZERS:
            # Megatron's configuration asserts float32 without its precision-aware Adam.
            args.muon_momentum_dtype, args.exp_avg_dtype = args.exp_avg_dtype, "fp32"
        try:
            return original(args, defaults)
        finally:
            args.optimizer = asked

    return validate_args


def refuse_yaml(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``load_yaml``; see :func:`check_yaml`."""

    @functools.wraps(original)
    def load_yaml(yaml_path: str) -> Any:
        """Load the file, then refuse Muon with Megatron-FSDP."""
        config = original(yaml_path)
        check_yaml(config, yaml_path)
        return config

    return load_yaml


def takes_schedule_of_checkpoint() -> bool:
    """Return whether ``--use-checkpoint-opt_param-scheduler`` was given."""
    return bool(getattr(_global_args(), "use_checkpoint_opt_param_scheduler", False))


def _global_args() -> Any:
    """Return the parsed command line, None in scripts without megatron.training."""
    # Not imported: a script on megatron-core alone must not load megatron.training. Not read by
    # get_args(): it asserts if nothing was parsed.
    global_vars = sys.modules.get("megatron.training.global_vars")
    return global_vars._GLOBAL_ARGS if global_vars is not None else None


def requested_exchange() -> ExchangeSettings:
    """Read the ``--muon-fsdp-*`` flags, or their defaults in scripts without megatron.training."""
    args = _global_args()
    return exchange_settings(args) if hasattr(args, "muon_fsdp_wire") else ExchangeSettings()


def requested_splits(config: Any, args: Any = None) -> Splits:
    """Read from flags and optimizer configuration which blocks of a parameter are split.

    Args:
        config: Optimizer configuration; its ``muon_split_qkv`` is read.
        args: The parsed command line; None for the global one, if there is any.

    Raises:
        ValueError: Flags that contradict each other.
    """
    args = args or _global_args()
    return Splits(
        qkv=config.muon_split_qkv,
        glu=bool(getattr(args, "muon_split_glu", False)),
        mla=bool(getattr(args, "muon_split_mla", False)),
        per_head=bool(getattr(args, "muon_split_qkv_per_head", False)),
    )


def skips_router(args: Any = None) -> bool:
    """Return whether ``--moe-router-skip-muon`` was given."""
    return bool(getattr(args or _global_args(), "moe_router_skip_muon", False))


def requested_momentum_dtype() -> torch.dtype:
    """Read ``--exp-avg-dtype`` for the momentum of Muon; float32 without ``megatron.training``."""
    name = getattr(_global_args(), "muon_momentum_dtype", "fp32")
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def exchange_settings(args: Any) -> ExchangeSettings:
    """Read the ``--muon-fsdp-*`` flags of the parsed command line."""
    given = {name: getattr(args, f"muon_fsdp_{name}") for name in EXCHANGE_FLAGS}
    if given["newton_schulz"] is None:
        # A flag of later releases of Megatron-LM, which stands for the same kernels.
        use_syrk = getattr(args, "muon_use_syrk", False)
        given["newton_schulz"] = "symmetric" if use_syrk else "standard"
    return ExchangeSettings(**given)
