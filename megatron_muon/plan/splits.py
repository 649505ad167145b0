# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which blocks fused matrices have: what is orthogonalized separately."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Splits:
    """Which fused matrices have several blocks.

    Args:
        qkv: Query, key and value of attention (not ``--muon-no-split-qkv``).
        glu: Gate and up of a gated feed-forward layer, experts included (``--muon-split-glu``).
        mla: Multi-latent attention: of each query the part without and with position, of each key
            and value the key and the value (``--muon-split-mla``).
        per_head: Each head of what ``qkv`` and ``mla`` split is a block of its own, and never
            joined over tensor-parallel ranks (``--muon-split-qkv-per-head``).

    Raises:
        ValueError: A block for each head, but query, key and value in one.
    """

    qkv: bool = True
    glu: bool = False
    mla: bool = False
    per_head: bool = False

    def __post_init__(self) -> None:
        """Check that what is split by head is split."""
        if self.per_head and not self.qkv:
            raise ValueError(
                "--muon-split-qkv-per-head: expected query, key and value apart, got "
                "--muon-no-split-qkv. Leave out one of the two."
            )


def halves(num_rows: int) -> tuple[int, int]:
    """Return the rows of gate and up, which follow one another."""
    return num_rows // 2, num_rows // 2


def all_heads(split_shapes: Sequence[int], num_rows: int, head_rows: int = 0) -> tuple[int, ...]:
    """Return the rows of each head of a matrix, as one group of blocks.

    Args:
        split_shapes: Rows of one group that go to each block, such as query, key and value.
        num_rows: Rows of the matrix: a whole number of groups.
        head_rows: Rows of a head, which divide those of each block; 0 where each block is a head.
    """
    heads = [head_rows or rows for rows in split_shapes for _ in range(rows // (head_rows or rows))]
    return tuple(heads) * (num_rows // sum(split_shapes))
