# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Command-line flags of this package."""

import argparse
import dataclasses
from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any, NoReturn, get_args

from megatron_muon.newton_schulz import BackendChoice
from megatron_muon.plan.settings import ExchangeSettings, WireChoice
from megatron_muon.user_errors import SettingsError

# Flags of the exchange, --muon-fsdp-<name>: the defaults are those of ExchangeSettings.
EXCHANGE_FLAGS: Mapping[str, Mapping[str, Any]] = {
    "wire": {
        "choices": get_args(WireChoice),
        "help": "Dtype of rows on their way to owners. bf16: rows normalized by the float64 norm "
        "of their matrix; fp32: fp32 rows, for the very bits of upstream's Muon; auto: bf16 with "
        "--muon-fp32-matmul-prec medium, otherwise fp32.",
    },
    "staging_bytes": {
        "type": int,
        "help": "Maximum memory of messages and stacks on a rank while a step runs, bytes. "
        "Default: 5.5 GB, or the least that works if that is more.",
    },
    "max_parts": {
        "type": int,
        "help": "Maximum number of ranks per matrix, a power of two. A matrix is split only "
        "if it alone exceeds the fair share of a rank. 1 turns splitting off: results have the "
        "same bits on any number of ranks.",
    },
    "cost_model": {
        "help": "Rates of the machine for choosing owners, as name=value,...: tflops, "
        "half_rate_side, gbps, gbps_between_nodes, ranks_per_node, kernel_us and others of "
        "megatron_muon.plan.cost.CostModel. Default: those of the GPU's compute capability.",
    },
    "newton_schulz": {
        "choices": get_args(BackendChoice),
        "help": "How Newton-Schulz is computed. standard (default): upstream's steps, and bits. "
        "symmetric: Triton kernels compute half of each symmetric product. gram: iterates on the "
        "Gram matrix and multiplies the matrix at the end, which costs less for long matrices. "
        "gram_symmetric: the same with quack's kernels. transformer_engine: split matrices by "
        "cuSOLVERMp. auto: for each shape the cheapest of standard, gram and gram_symmetric by the "
        "cost model.",
    },
    "log_plan": {
        "action": "store_true",
        "help": "Log who orthogonalizes what, and what it costs.",
    },
}
# Proposed for Megatron-LM, or fields of OptimizerConfig: added where its parser does not know them.
_OTHER_FLAGS: Mapping[str, Mapping[str, Any]] = {
    "--muon-fsdp-offload-momentum": {
        "action": "store_true",
        "help": "Keep momentum in pinned CPU memory between steps.",
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
    parser.error = partial(_refuse, parser._option_string_actions)  # type: ignore[method-assign]
    # Megatron owns --muon-*; a name of their own keeps these flags out of the way of later ones.
    group = parser.add_argument_group(title="muon under Megatron-FSDP")
    defaults = dataclasses.asdict(ExchangeSettings())
    # None where it was not given: --muon-use-syrk may then choose.
    defaults["newton_schulz"] = None
    for name, settings in EXCHANGE_FLAGS.items():
        flag = "--muon-fsdp-" + name.replace("_", "-")
        group.add_argument(flag, default=defaults[name], **settings)
    for flag, settings in _OTHER_FLAGS.items():
        if flag not in parser._option_string_actions:
            group.add_argument(flag, **settings)
    return parser
