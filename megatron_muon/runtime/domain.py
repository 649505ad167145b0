# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which ranks of the job exchange matrices."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Domain:
    """The ranks that exchange matrices with this one.

    Args:
        ranks: Ranks of the job, ascending.
        group: Their process group; None where this rank is alone.
        ranks_per_node: Ranks that the launcher started per node; None if it did not say so on every
            rank.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    ranks_per_node: int | None


def num_ranks_on_node() -> int:
    """Return how many ranks the launcher started on this node; 0 where it did not say."""
    # torchrun sets it, and counts the ranks of a node in a row.
    on_node = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(on_node) if on_node.isdecimal() else 0


def ranks_per_node(sizes: Sequence[int]) -> int | None:
    """Return one number for all nodes; None where the launcher did not say on all of them.

    If nodes have different numbers of ranks, it is their greatest common divisor: ranks that then
    count as on one node are, and some that are do not.
    """
    return math.gcd(*sizes) if min(sizes) > 0 else None
