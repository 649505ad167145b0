# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Command-line arguments: flags of ours, and what Megatron's validation may not see."""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

from megatron_muon.mcore.muon import EXCHANGES
from megatron_muon.mcore.support import raise_where_unsupported


def add_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``add_megatron_arguments`` to add the ``--muon-fsdp-*`` flags."""

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        group = parser.add_argument_group(title="muon under Megatron-FSDP")
        group.add_argument(
            "--muon-fsdp-exchange",
            choices=EXCHANGES,
            default=EXCHANGES[0],
            help="How whole matrices are assembled for Newton-Schulz. all_gather: every rank of "
            "the shard group receives every matrix and orthogonalizes it.",
        )
        return parser

    return add_megatron_arguments


def validate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``validate_args`` to accept Muon with Megatron-FSDP and to refuse what cannot work.

    The original asserts that Megatron-FSDP takes only adam and sgd, so it sees ``adam``. Its other
    checks of Megatron-FSDP stay in force.
    """

    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, defaults: dict[str, Any] = {}) -> Any:  # noqa: B006
        if not args.use_megatron_fsdp or args.optimizer in ("adam", "sgd"):
            return original(args, defaults)
        raise_where_unsupported(vars(args))
        requested = args.optimizer
        args.optimizer = "adam"
        try:
            return original(args, defaults)
        finally:
            args.optimizer = requested

    return validate_args


def refuse_yaml(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``load_yaml`` to refuse Muon with Megatron-FSDP from a YAML configuration.

    Megatron reads the file in place of the command line, whose flags it drops, and validates it
    apart from :func:`validate`.
    """

    @functools.wraps(original)
    def load_yaml(yaml_path: str) -> Any:
        config = original(yaml_path)
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--optimizer", default=getattr(config, "optimizer", "adam"))
        parser.add_argument(
            "--use-megatron-fsdp",
            action="store_true",
            default=bool(getattr(config, "use_megatron_fsdp", False)),
        )
        asked, _ = parser.parse_known_args(sys.argv[1:])
        if asked.use_megatron_fsdp and asked.optimizer not in ("adam", "sgd"):
            raise ValueError(
                f"--yaml-cfg: expected command-line flags for --optimizer {asked.optimizer} "
                f"--use-megatron-fsdp, got {yaml_path}, in whose place Megatron drops them. "
                "Pass the settings as flags."
            )
        return config

    return load_yaml


def requested_exchange() -> str:
    """Read ``--muon-fsdp-exchange``, or its default in scripts without megatron.training."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    args = global_vars._GLOBAL_ARGS if global_vars is not None else None
    return getattr(args, "muon_fsdp_exchange", EXCHANGES[0])
