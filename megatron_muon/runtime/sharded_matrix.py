# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What the optimizer knows of one parameter: which rows every rank holds."""

from dataclasses import dataclass

import torch.distributed as dist

from megatron_muon.plan.layout import RowLayout


@dataclass(frozen=True)
class ShardedMatrix:
    """One DTensor parameter, as its ranks hold it.

    Args:
        fqn: Fully qualified name, for errors.
        layout: Row shards of the tensor-parallel-local matrix.
        shard_group: Group that the rows are sharded over; None where every rank holds all rows.
        replica_group: Ranks that hold the same rows as this one; None where there are none.
        holder_group: All ranks that hold rows, replicas included; None where the model has no such
            group. Its communicator is then used for the exchange, and no new one is made.
    """

    fqn: str
    layout: RowLayout
    shard_group: dist.ProcessGroup | None
    replica_group: dist.ProcessGroup | None = None
    holder_group: dist.ProcessGroup | None = None

    @property
    def local_range(self) -> tuple[int, int]:
        """Rows ``[start, stop)`` that this rank holds."""
        rank = dist.get_rank(self.shard_group) if self.shard_group is not None else 0
        return self.layout.shards[rank]

    @property
    def local_shape(self) -> tuple[int, int]:
        """Shape of this rank's shard."""
        start, stop = self.local_range
        return (stop - start, self.layout.num_cols)
