# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs without one repair of upstream's code."""


def without(name: str) -> None:
    """Leave out one patch, by the end of its symbol, before the launcher enables them."""
    from megatron_muon.mcore import patches

    kept = tuple(
        patch
        for patch in patches.PATCHES
        if not patch.symbol.replace(":", ".").endswith(f".{name}")
    )
    assert len(kept) == len(patches.PATCHES) - 1
    patches.PATCHES = kept
