# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The plan of an exchange, and a report of it: ``python -m megatron_muon.plan``.

Integers only: no tensors, no torch, no communication::

    pieces          which rectangle travels from whom to whom
    exchange_plan   buckets, stacks and messages of every rank
"""

from megatron_muon.plan.exchange_plan import ExchangePlan, RankBucket, RankPlan, Slot
from megatron_muon.plan.routes import Part, Piece

__all__ = ["ExchangePlan", "Part", "Piece", "RankBucket", "RankPlan", "Slot"]
