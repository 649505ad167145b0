# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What a plan means: estimated times, bytes and memory of every rank.

It imports no torch, and no plan depends on it.

Files, each importing only those above it::

    rank_report  what plans mean for each rank, in numbers
    table        the table that users read
    preview/     plans of jobs that do not run
    command      ``python -m megatron_muon.plan``
"""
