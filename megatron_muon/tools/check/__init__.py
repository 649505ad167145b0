# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Check a machine before a run and measure its rates: ``python -m megatron_muon.check``.

Files, each importing only those above it::

    verdicts  one check on all ranks together, and the table of their verdicts
    results   versions; steps compared with whole matrices
    rates     of Newton-Schulz and of all-to-all
    command   starts ranks, and prints
"""
