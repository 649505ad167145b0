# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs of Megatron-FSDP v2 through Megatron's flags, which releases so far do not have."""

import importlib.util
from pathlib import Path

import pytest

from helpers.toy_gpt import ZERO, fsdp_toy_gpt

V2 = ("--megatron-fsdp-version", "2")


def _has_flags() -> bool:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).with_name("optimizer").joinpath("fully_sharded_optimizer.py").exists()


needs_flags = pytest.mark.skipif(
    not _has_flags(),
    reason="needs a Megatron-LM checkout: check_compat.py --megatron DIR --steps v2_flags",
)


def v2_toy_gpt(*flags: str) -> list[str]:
    """Return the flags of the toy GPT under v2."""
    return fsdp_toy_gpt(ZERO[3], *V2, *flags)
