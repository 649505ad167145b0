# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of this package, their checks, and the settings read from them."""

import argparse
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.utils import log_single_rank
from megatron.training import global_vars

from megatron_muon.mcore.fsdp_model import current_device
from megatron_muon.mcore.options import MuonOptions
from megatron_muon.mcore.patching import PATCHED
from megatron_muon.mcore.torch_fsdp2 import is_ours
from megatron_muon.mcore.unsupported import (
    ELEMENTWISE_OPTIMIZERS,
    FSDP_UNSUPPORTED,
    MUON_OPTIMIZERS,
    raise_where_refused,
)
from megatron_muon.mcore.versions import IncompatibleMegatronError, installed_versions
from megatron_muon.plan.settings import EXCHANGE_FLAGS, ExchangeSettings
from megatron_muon.runtime.agreement import raise_where_ranks_differ
from megatron_muon.step.dependencies import releases
from megatron_muon.user_errors import SettingsError, in_flags

logger = logging.getLogger(__name__)

# Proposed for Megatron-LM, or fields of OptimizerConfig: added where its parser does not know them.
_SWITCHES = {
    "--muon-fsdp-log-metrics": "Write norms of gradients and momentum and the RMS of updates to "
    "TensorBoard and W&B.",
    "--muon-split-glu": "Orthogonalize gate and up of gated feed-forward layers and experts "
    "separately.",
    "--muon-split-mla": "Multi-latent attention: orthogonalize the parts of queries with and "
    "without position separately, and keys and values.",
    "--muon-split-qkv-per-head": "Orthogonalize every head of query, key and value separately.",
    "--moe-router-skip-muon": "Step routers with --muon-scalar-optimizer.",
}
# Flags that all ranks share, by their names in a namespace.
_SHARED: set[str] = set()
_DEFAULTS = dataclasses.asdict(ExchangeSettings())
_FLAGS: Mapping[str, Mapping[str, Any]] = {
    # Megatron owns --muon-*; a name of their own keeps these flags out of the way of later ones.
    **{
        "--muon-fsdp-" + name.replace("_", "-"): {"default": _DEFAULTS[name], **settings}
        for name, settings in EXCHANGE_FLAGS.items()
    },
    **{
        flag: {"default": False, "action": "store_true", "help": text}
        for flag, text in _SWITCHES.items()
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


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this package, and shorten the usage in errors: Megatron has 1,600 lines."""
    parser.usage = "%(prog)s [FLAGS]; --help lists them"
    group = parser.add_argument_group(title="muon under Megatron-FSDP")
    for flag, settings in _FLAGS.items():
        if flag not in parser._option_string_actions:
            group.add_argument(flag, **settings)
    # Numbers, switches and choices: folders and names may differ between nodes. Scripts add flags
    # of their own later.
    _SHARED.update(
        action.dest
        for action in parser._actions
        if action.nargs == 0 or action.choices or action.type not in (None, str)
    )
    _SHARED.discard("local_rank")
    return parser


def compare_flags(original: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap ``initialize_model_parallel`` to compare releases and flags of all ranks first.

    Process groups and collectives of Megatron depend on flags: with another --log-params-norm on a
    rank all of them would wait, with another --lr train on. Scripts without flags compare releases.

    Raises:
        RuntimeError: On all ranks, naming the first difference.

    Communication: see ``differences_between_ranks()``.
    """
    flags = vars(global_vars._GLOBAL_ARGS or argparse.Namespace())
    entries = [f"{name} {version}" for name, version in installed_versions().items()]
    entries.append(f"torch.get_default_dtype() {torch.get_default_dtype()}")
    entries += [f"--{k.replace('_', '-')} {flags[k]}" for k in sorted(_SHARED & flags.keys())]
    raise_where_ranks_differ(
        [releases(), *entries],
        None,
        current_device(),
        "releases and flags",
        "Install the same releases on all nodes, and pass the same flags.",
    )
    original(*args, **kwargs)


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse settings that cannot work under Megatron-FSDP or FSDP2, or without them.

    Args:
        args: The parsed command line, before Megatron validates it.

    Raises:
        SettingsError: With all settings that cannot work.
        IncompatibleMegatronError: Version 2 of Megatron-FSDP differs from the tested ones.
    """
    if getattr(args, "megatron_fsdp_version", 1) == 2 and PATCHED.v2_problems:
        raise IncompatibleMegatronError(PATCHED.v2_problems)
    if not is_ours(args) or args.optimizer in ELEMENTWISE_OPTIMIZERS:
        for flag, settings in _FLAGS.items():
            name, default = flag[2:].replace("-", "_"), settings["default"]
            # Megatron reads fields of its configuration itself.
            if getattr(args, name, default) != default and not hasattr(OptimizerConfig, name):
                raise SettingsError(
                    f"{flag}: expected --use-megatron-fsdp with --optimizer muon or adaptive_muon, "
                    f"got --optimizer {args.optimizer}. Leave the flag out."
                )
    if not is_ours(args):
        return
    if args.optimizer in ("adam", "sgd"):
        raise_where_refused(vars(args), FSDP_UNSUPPORTED)
        return
    # All problems are reported at once: a queued job should not fail a second time.
    options = MuonOptions.of(args)
    more = options.unread_by(args.optimizer)
    is_bf16 = args.optimizer in MUON_OPTIMIZERS and args.muon_fp32_matmul_prec == "medium"
    try:
        options.exchange.comm_dtypes(is_bf16)
        _ = options.splits, options.momentum_dtype
    except ValueError as error:
        more.append(in_flags(str(error)))
    raise_where_refused(vars(args), more=more)


def adapt_arguments(args: argparse.Namespace) -> None:
    """Set flags that have another meaning under Megatron-FSDP or FSDP2.

    ``dist_muon`` is Muon with the layer-wise optimizer; Megatron-FSDP has already sharded its rows.
    With pipeline stages ``--no-align-grad-reduce`` is set: without it Megatron runs the last
    microbatch of all stages but the first under ``no_sync()``, and then starts the reduction by a
    call that Megatron-FSDP ignores. Gradients stay unreduced under no_shard, optim and HSDP.

    Upstream turns ``--async-save`` off without a worker process, and asserts a package unless the
    strategy is mcore. Saves of Megatron-FSDP need neither (async_save.py).
    """
    if not is_ours(args):
        return
    if args.optimizer == "dist_muon":
        args.optimizer = "muon"
    if args.optimizer in MUON_OPTIMIZERS:
        # Megatron's configuration asserts float32 without its precision-aware Adam. Scripts may
        # validate twice.
        args.muon_momentum_dtype = getattr(args, "muon_momentum_dtype", args.exp_avg_dtype)
        args.exp_avg_dtype = "fp32"
        if args.use_precision_aware_optimizer:
            # Transformer Engine's Adam reads gradients from another attribute. Megatron-FSDP has a
            # flag of its own for their dtype.
            args.use_precision_aware_optimizer, args.main_grads_dtype = False, "fp32"
            log_single_rank(
                logger,
                logging.INFO,
                "--use-precision-aware-optimizer: momentum is %s (--exp-avg-dtype), gradients are "
                "%s (--megatron-fsdp-main-grads-dtype), all other state is fp32",
                args.muon_momentum_dtype,
                args.megatron_fsdp_main_grads_dtype,
            )
    if args.pipeline_model_parallel_size > 1:
        args.align_grad_reduce = False
    if args.async_save:
        args.async_strategy, args.use_persistent_ckpt_worker = "mcore", True


def add_arguments(original: Any, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Wrap ``add_megatron_arguments`` to add the flags of this package."""
    return add_flags(original(parser))


def validate(original: Any, args: argparse.Namespace, *defaults: Any, **more_defaults: Any) -> Any:
    """Wrap ``validate_args`` to accept Muon with sharded models and to refuse other settings.

    The original asserts that they are trained with adam or sgd, so it sees ``adam``. Its other
    checks of them stay in force.
    """
    adapt_arguments(args)
    check_arguments(args)
    if not is_ours(args):
        return original(args, *defaults, **more_defaults)
    requested = args.optimizer
    if requested not in ("adam", "sgd"):
        text = "--optimizer %s: Megatron's own checks, and the arguments that it prints, see adam"
        logger.info(text, requested)
        args.optimizer = "adam"
    # Upstream's steps copies of the parameters, and needs another flag; Adam's is refused.
    offloads, args.optimizer_cpu_offload = args.optimizer_cpu_offload, False
    try:
        return original(args, *defaults, **more_defaults)
    finally:
        args.optimizer, args.optimizer_cpu_offload = requested, offloads
        # Upstream would start it.
        args.use_persistent_ckpt_worker = False
