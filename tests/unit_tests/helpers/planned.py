# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Choose what the planner would choose by memory and time: tests have few and small matrices."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from megatron_muon.plan.assignment import Assignment, assignments


def assign(*given: Any, **options: Any) -> Assignment:
    """Return the best owners by the estimate; arguments are those of ``assignments``."""
    return assignments(*given, **options)[0]


@contextmanager
def planned_in(
    num_buckets: int | None = None,
    depth: tuple[int, int] | None = None,
    num_scatters: int | None = None,
    num_portions: int | None = None,
) -> Iterator[None]:
    """Let plans have so many buckets, so many of them under way, and so many scatters of each.

    There are no more buckets than a rank has matrices. With ``num_portions`` plans that may portion
    buckets do, in so many portions. None leaves the choice to the planner.
    """
    from megatron_muon.plan import buckets, dealing
    from megatron_muon.plan.schedule import Depth

    changes = {
        "_NUM_BUCKETS": None if num_buckets is None else (num_buckets,),
        "_DEPTHS": None if depth is None else (Depth(*depth),),
        "_NUM_SCATTERS": None if num_scatters is None else (num_scatters,),
        "_NUM_PORTIONS": None if num_portions is None else (num_portions,),
        "_WORTH_PORTIONS": None if num_portions is None else math.inf,
    }
    with ExitStack() as stack:
        for name, value in changes.items():
            if value is not None:
                module = dealing if hasattr(dealing, name) else buckets
                stack.enter_context(mock.patch.object(module, name, value))
        yield
