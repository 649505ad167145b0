# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs without one repair of upstream's code."""


def without(name: str) -> None:
    """Leave out one patch, by the end of its symbol, before the launcher enables them."""
    from megatron_muon.mcore import patches

    lists = patches.PATCHES, patches.V2_PATCHES
    patches.PATCHES, patches.V2_PATCHES = (
        tuple(p for p in each if not p.symbol.replace(":", ".").endswith(f".{name}"))
        for each in lists
    )
    num_kept = len(patches.PATCHES) + len(patches.V2_PATCHES)
    assert num_kept == sum(map(len, lists)) - 1
