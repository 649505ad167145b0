# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of this package, their checks, and the settings read from them."""

import argparse
import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

import torch

from megatron_muon.mcore.unsupported import (
    BUILT_OPTIMIZERS,
    FSDP_UNSUPPORTED,
    raise_where_refused,
    unsupported_settings,
)
from megatron_muon.plan.layout import Splits
from megatron_muon.plan.settings import EXCHANGE_FLAGS, ExchangeSettings
from megatron_muon.user_errors import SettingsError, in_flags

logger = logging.getLogger(__name__)

# Names under which Megatron builds a Muon without Megatron-FSDP.
MUON_OPTIMIZERS = ("muon", "dist_muon", "adaptive_muon")
# Proposed for Megatron-LM, or fields of OptimizerConfig: added where its parser does not know them.
_OTHER_FLAGS: Mapping[str, Mapping[str, Any]] = {
    "--muon-fsdp-offload-momentum": {
        "action": "store_true",
        "help": "Keep momentum in pinned CPU memory between steps.",
    },
    "--muon-fsdp-log-metrics": {
        "action": "store_true",
        "help": "Write norms of gradients and momentum, the RMS of updates and the orthogonality "
        "error of a matrix to TensorBoard and W&B.",
    },
    "--muon-split-glu": {
        "action": "store_true",
        "help": "Orthogonalize gate and up of gated feed-forward layers and experts separately.",
    },
    "--muon-split-mla": {
        "action": "store_true",
        "help": "Multi-latent attention: orthogonalize the parts of queries with and without "
        "position separately, and keys and values.",
    },
    "--muon-split-qkv-per-head": {
        "action": "store_true",
        "help": "Orthogonalize every head of query, key and value separately.",
    },
    "--moe-router-skip-muon": {
        "action": "store_true",
        "help": "Step routers with --muon-scalar-optimizer.",
    },
    "--adaptive-muon-moment2-method": {
        "choices": ("adamuon", "normuon", "namo"),
        "default": "adamuon",
        "help": "Second moment of --optimizer adaptive_muon: of every element (adamuon), of every "
        "row or column (normuon), or of the norm of the gradient (namo).",
    },
    "--adaptive-muon-beta2": {
        "type": float,
        "default": 0.95,
        "help": "Decay rate of the second moment.",
    },
    "--adaptive-muon-eps": {
        "type": float,
        "default": 1e-8,
        "help": "Keeps the divisor from zero.",
    },
}


def _refuse(known: Mapping[str, Any], text: str) -> NoReturn:
    """Raise an error of argparse, with the flags that look like unknown ones."""
    unknown = text.partition("unrecognized arguments: ")[2].split()
    near = ", ".join(flag for word in unknown for flag in get_close_matches(word, known, 1))
    if "'match_adamw'" in text:
        near = "--muon-scale-mode spectral --muon-extra-scale-factor 0.2"
    raise SettingsError(f"{text}. Did you mean {near}?" if near else text)


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this package, and let errors be one line: Megatron has 1,600 of usage."""
    parser.error = functools.partial(_refuse, parser._option_string_actions)  # type: ignore[method-assign]
    # Megatron owns --muon-*; a name of their own keeps these flags out of the way of later ones.
    group = parser.add_argument_group(title="muon under Megatron-FSDP")
    defaults = dataclasses.asdict(ExchangeSettings())
    # None if the flag is absent: --muon-use-syrk may then choose.
    defaults["newton_schulz"] = None
    for name, settings in EXCHANGE_FLAGS.items():
        flag = "--muon-fsdp-" + name.replace("_", "-")
        group.add_argument(flag, default=defaults[name], **settings)
    for flag, settings in _OTHER_FLAGS.items():
        if flag not in parser._option_string_actions:
            group.add_argument(flag, **settings)
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse settings that cannot work under Megatron-FSDP with Muon or QK-clip, or with splits.

    Args:
        args: The parsed command line, before Megatron validates it.

    Raises:
        SettingsError: With all settings that cannot work.
    """
    is_ours = args.use_megatron_fsdp and args.optimizer in MUON_OPTIMIZERS
    if getattr(args, "muon_fsdp_log_metrics", False) and not is_ours:
        raise SettingsError(
            "--muon-fsdp-log-metrics: expected --use-megatron-fsdp with --optimizer muon or "
            f"adaptive_muon, got --optimizer {args.optimizer}. Leave the flag out."
        )
    if args.use_megatron_fsdp and args.optimizer not in ("adam", "sgd"):
        # All problems are reported at once: a queued job should not fail a second time.
        refusals = unsupported_settings(vars(args))
        try:
            exchange_settings(args).comm_dtypes(args.muon_fp32_matmul_prec == "medium")
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


def adapt_arguments(args: argparse.Namespace) -> None:
    """Set ``--no-align-grad-reduce`` with pipeline stages under Megatron-FSDP.

    Without it Megatron runs the last microbatch of all stages but the first under ``no_sync()``,
    and then starts the reduction by a call that Megatron-FSDP ignores. Gradients stay unreduced
    under no_shard, optim and HSDP.
    """
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


def add_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``add_megatron_arguments`` to add the flags of this package."""

    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_flags(original(parser))

    return add_megatron_arguments


def validate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``validate_args`` to accept Muon with Megatron-FSDP and to refuse other settings.

    The original asserts that Megatron-FSDP runs with adam or sgd, so it sees ``adam``. Its other
    checks of Megatron-FSDP stay in force.
    """

    def validate_args(args: argparse.Namespace, defaults: dict[str, Any] = {}) -> Any:  # noqa: B006
        check_arguments(args)
        adapt_arguments(args)
        requested = args.optimizer
        if requested not in BUILT_OPTIMIZERS or not args.use_megatron_fsdp:
            return original(args, defaults)
        logger.info(
            "--optimizer %s: Megatron's own checks, and the arguments that it prints, see adam",
            requested,
        )
        args.optimizer = "adam"
        if requested in MUON_OPTIMIZERS:
            # Megatron's configuration asserts float32 without its precision-aware Adam. Scripts may
            # validate twice.
            args.muon_momentum_dtype = getattr(args, "muon_momentum_dtype", args.exp_avg_dtype)
            args.exp_avg_dtype = "fp32"
        try:
            return original(args, defaults)
        finally:
            args.optimizer = requested

    return validate_args


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
    return exchange_settings(args) if hasattr(args, "muon_fsdp_comm_dtype") else ExchangeSettings()


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


def requested_momentum() -> dict[str, Any]:
    """Read dtype and device of momentum; Muon's defaults without ``megatron.training``."""
    args = _global_args()
    name = getattr(args, "muon_momentum_dtype", "fp32")
    return {
        "momentum_dtype": {"fp32": torch.float32, "bf16": torch.bfloat16}[name],
        "offload_momentum": getattr(args, "muon_fsdp_offload_momentum", False),
    }


class LoggedRun(NamedTuple):
    """An iteration of Megatron's trainer, and its writers.

    Args:
        iteration: Number of the iteration, from 1 on.
        interval: Iterations between entries of the log.
        tensorboard: Writer; None on other ranks than the last, and without a folder.
        wandb: The same for W&B.
    """

    iteration: int
    interval: int
    tensorboard: Any
    wandb: Any


def logs_metrics() -> bool:
    """Return whether ``--muon-fsdp-log-metrics`` was given."""
    return bool(getattr(_global_args(), "muon_fsdp_log_metrics", False))


def logged_run() -> LoggedRun | None:
    """Return the iteration that the trainer runs; None outside of it."""
    args, global_vars = _global_args(), sys.modules.get("megatron.training.global_vars")
    if not hasattr(args, "curr_iteration"):
        return None
    return LoggedRun(
        args.curr_iteration + 1,
        args.tensorboard_log_interval,
        global_vars.get_tensorboard_writer(),  # type: ignore[union-attr]
        global_vars.get_wandb_writer(),  # type: ignore[union-attr]
    )


def exchange_settings(args: Any) -> ExchangeSettings:
    """Read the ``--muon-fsdp-*`` flags of the parsed command line."""
    settings = {name: getattr(args, f"muon_fsdp_{name}") for name in EXCHANGE_FLAGS}
    if settings["newton_schulz"] is None:
        # A flag of later releases of Megatron-LM, which stands for the same kernels.
        use_syrk = getattr(args, "muon_use_syrk", False)
        settings["newton_schulz"] = "symmetric" if use_syrk else "standard"
    return ExchangeSettings(**settings)
