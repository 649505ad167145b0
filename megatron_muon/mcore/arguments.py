# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Command-line arguments: flags of ours, and what Megatron's validation may not see."""

import argparse
import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, get_args

from megatron_muon.mcore.unsupported import (
    BUILT_OPTIMIZERS,
    raise_where_refused,
    unsupported_qk_clip,
    unsupported_settings,
)
from megatron_muon.newton_schulz.registry import BackendChoice
from megatron_muon.plan.flags import in_flags
from megatron_muon.plan.settings import ExchangeMode, ExchangeSettings, WireChoice
from megatron_muon.plan.splits import Splits
from megatron_muon.user_errors import SettingsError

logger = logging.getLogger(__name__)

# Names under which Megatron builds a Muon without Megatron-FSDP.
MUON_OPTIMIZERS = ("muon", "dist_muon", "adaptive_muon")


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this package."""
    # Megatron owns --muon-*; a name of its own keeps these flags out of the way of later ones.
    group = parser.add_argument_group(title="muon under Megatron-FSDP")
    defaults = ExchangeSettings()
    group.add_argument(
        "--muon-fsdp-exchange",
        choices=get_args(ExchangeMode),
        default=defaults.mode,
        help="How whole matrices are assembled for Newton-Schulz. owner: each is sent to one "
        "rank, orthogonalized there once, and sent back. all_gather: every rank of the shard "
        "group receives every matrix and orthogonalizes it.",
    )
    group.add_argument(
        "--muon-fsdp-wire",
        choices=get_args(WireChoice),
        default=defaults.wire,
        help="Dtype of rows on their way to owners. bf16: rows normalized by the float64 norm of "
        "their matrix; fp32: fp32 rows, for the very bits of upstream's Muon; auto: bf16 with "
        "--muon-fp32-matmul-prec medium, otherwise fp32.",
    )
    group.add_argument(
        "--muon-fsdp-staging-bytes",
        type=int,
        default=defaults.staging_bytes,
        help="Maximum memory of messages and stacks on a rank while a step runs, bytes. Default: 5 "
        "GB, or the least that works if that is more.",
    )
    group.add_argument(
        "--muon-fsdp-max-parts",
        type=int,
        default=defaults.max_parts,
        help="Maximum number of ranks per matrix, a power of two; it has an effect only if there "
        "are more ranks than matrices. 1 turns splitting off: results have the same bits on any "
        "number of ranks.",
    )
    group.add_argument(
        "--muon-fsdp-cost-model",
        default=defaults.cost_model,
        help="Rates of the machine for choosing owners, as name=value,...: tflops, "
        "half_rate_side, gbps, gbps_between_nodes, ranks_per_node, kernel_us and others of "
        "megatron_muon.plan.cost.CostModel. Default: those of the GPU's compute capability.",
    )
    _add_newton_schulz_flags(group)
    group.add_argument(
        "--muon-fsdp-log-plan",
        action="store_true",
        help="Log who orthogonalizes what, and what it costs.",
    )
    group.add_argument(
        "--muon-fsdp-no-checksums",
        action="store_true",
        help="Do not compare a checkpoint with its checksums before it is loaded, for which "
        "the ranks together read it once more.",
    )
    _add_split_flags(parser)
    _add_adaptive_flags(parser)
    return parser


def _add_newton_schulz_flags(group: argparse._ArgumentGroup) -> None:
    """Add flags that say how matrices are orthogonalized."""
    group.add_argument(
        "--muon-fsdp-newton-schulz",
        choices=get_args(BackendChoice),
        # None where it was not given: --muon-use-syrk may then choose.
        help="How Newton-Schulz is computed. standard (default): upstream's steps, and bits. "
        "symmetric: Triton kernels compute half of each symmetric product. gram: iterates on the "
        "Gram matrix and multiplies the matrix at the end, which costs less for long matrices. "
        "gram_symmetric: the same with quack's kernels. transformer_engine: split matrices by "
        "cuSOLVERMp. auto: for each shape the cheapest by the cost model.",
    )


def _add_split_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags that are proposed for Megatron-LM, where its parser does not know them.

    By default nothing more is split than Megatron does.
    """
    group = parser.add_argument_group(title="what Muon orthogonalizes apart")
    for flag, text in (
        (
            "--muon-split-glu",
            "Orthogonalize gate and up of gated feed-forward layers and experts apart.",
        ),
        (
            "--muon-split-mla",
            "Multi-latent attention: orthogonalize the parts of queries with and without position "
            "apart, and keys and values.",
        ),
        (
            "--muon-split-qkv-per-head",
            "Orthogonalize each head of query, key and value apart.",
        ),
        (
            "--moe-router-skip-muon",
            "Step routers with --muon-scalar-optimizer.",
        ),
    ):
        if flag not in parser._option_string_actions:
            group.add_argument(flag, action="store_true", help=text)


def _add_adaptive_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags for fields of ``OptimizerConfig`` that Megatron's parser has no flags for."""
    group = parser.add_argument_group(title="adaptive Muon")
    for flag, settings in (
        (
            "--adaptive-muon-moment2-method",
            {
                "choices": ("adamuon", "normuon", "namo"),
                "default": "adamuon",
                "help": "Second moment of --optimizer adaptive_muon: of each element (adamuon), of "
                "each row or column (normuon), or of the norm of the gradient (namo).",
            },
        ),
        (
            "--adaptive-muon-beta2",
            {"type": float, "default": 0.95, "help": "Decay rate of the second moment."},
        ),
        (
            "--adaptive-muon-eps",
            {"type": float, "default": 1e-8, "help": "Keeps the divisor from zero."},
        ),
    ):
        if flag not in parser._option_string_actions:
            group.add_argument(flag, **settings)


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot work under Megatron-FSDP with Muon or QK-clip; anything else passes.

    Args:
        args: The parsed command line, before Megatron validates it.

    Raises:
        SettingsError: With all that was asked for and cannot work.
    """
    if args.use_megatron_fsdp and args.optimizer not in ("adam", "sgd"):
        # All that is wrong is said at once: a queued job should not fail a second time.
        refusals = unsupported_settings(vars(args))
        try:
            _exchange_settings(args).wire_for(args.muon_fp32_matmul_prec == "medium")
        except ValueError as error:
            refusals.append(in_flags(str(error)))
        refusals += _split_refusals(args)
        raise_where_refused(args.optimizer, refusals)
    elif args.use_megatron_fsdp:
        raise_where_refused(args.optimizer, unsupported_qk_clip(vars(args)))
    elif args.optimizer in MUON_OPTIMIZERS:
        refusals = _split_refusals(args)
        if refusals:
            raise SettingsError("\n  ".join([f"--optimizer {args.optimizer}:", *refusals]))


def _split_refusals(args: argparse.Namespace) -> list[str]:
    """List what of the flags for splits cannot work, a sentence each."""
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
    if splits.per_head and args.tensor_model_parallel_size > 1:
        is_upstream = not args.use_megatron_fsdp or args.muon_fsdp_exchange == "all_gather"
        if is_upstream and args.muon_tp_mode != "blockwise":
            refusals.append(
                "--muon-split-qkv-per-head: expected --muon-tp-mode blockwise where upstream's "
                f"Muon orthogonalizes, got {args.muon_tp_mode}, which joins one head of each "
                "tensor-parallel rank to a matrix. Use --use-megatron-fsdp with "
                "--muon-fsdp-exchange owner, or blockwise."
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

    Megatron reads the file in place of the command line, whose flags it drops, and validates it
    apart from :func:`check`.

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
            f"--use-megatron-fsdp, got {path}, in whose place Megatron drops them. "
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

    The original asserts that Megatron-FSDP takes only adam and sgd, so it sees ``adam``. Its other
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
    # Not imported: a script on megatron-core alone must not load megatron.training. And not by
    # get_args(), which asserts where nothing was parsed.
    global_vars = sys.modules.get("megatron.training.global_vars")
    return global_vars._GLOBAL_ARGS if global_vars is not None else None


def requested_exchange() -> ExchangeSettings:
    """Read the ``--muon-fsdp-*`` flags, or their defaults in scripts without megatron.training."""
    args = _global_args()
    return _exchange_settings(args) if hasattr(args, "muon_fsdp_exchange") else ExchangeSettings()


def requested_splits(config: Any, args: Any = None) -> Splits:
    """Read what is split from the flags, and from the configuration of the optimizer.

    Args:
        config: Optimizer configuration, of which ``muon_split_qkv`` is read.
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


def _newton_schulz(args: Any) -> BackendChoice:
    choice: BackendChoice | None = args.muon_fsdp_newton_schulz
    if choice is not None:
        return choice
    # A flag of later releases of Megatron-LM, which stands for the same kernels.
    return "symmetric" if getattr(args, "muon_use_syrk", False) else "standard"


def _exchange_settings(args: Any) -> ExchangeSettings:
    return ExchangeSettings(
        mode=args.muon_fsdp_exchange,
        wire=args.muon_fsdp_wire,
        staging_bytes=args.muon_fsdp_staging_bytes,
        max_parts=args.muon_fsdp_max_parts,
        cost_model=args.muon_fsdp_cost_model,
        newton_schulz=_newton_schulz(args),
        log_plan=args.muon_fsdp_log_plan,
    )
