# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Whether HSDP reduced the gradients of a step over the outer ranks."""

import functools
from collections import Counter
from typing import Any

from megatron_muon.mcore.fsdp_model import FSDPModel


class OuterReductions:
    """Check that HSDP reduces every gradient bucket over the outer ranks once per step.

    Megatron-FSDP does it only in the backward pass of a microbatch that ``config.no_sync_func``
    marks as the last one. If none is marked, replicas drift; if two are, gradients are summed
    twice. Upstream notices neither.

    Args:
        chunk: A model chunk with HSDP. Its reductions are counted from now on.
    """

    def __init__(self, chunk: FSDPModel) -> None:
        self._buffers = chunk.param_and_grad_buffer
        self._counts: Counter[int] = Counter()
        pipeline = chunk.module.grad_reduce_pipeline
        reduce_buckets = pipeline._bucket_group_gradient_reduce

        @functools.wraps(reduce_buckets)
        def counted(bucket_group: list[int], *args: Any, **kwargs: Any) -> Any:
            """Count the buckets that are reduced over the outer ranks, and reduce them."""
            if kwargs.get("outer_fsdp_group_grad_reduce"):
                self._counts.update(bucket_group)
            return reduce_buckets(bucket_group, *args, **kwargs)

        pipeline._bucket_group_gradient_reduce = counted

    def clear(self) -> None:
        """Reset the counts, as when Megatron runs the microbatches of a step again."""
        self._counts.clear()

    def problems(self) -> list[str]:
        """List what went wrong since the gradients were zeroed, and reset the counts."""
        counts = {
            self._counts[index]
            for index, group in enumerate(self._buffers.parameter_groups)
            if group.main_grad_buffer is not None
        }
        self.clear()
        # There is no count if the model has no gradients on this rank.
        if counts <= {1}:
            return []
        return [
            "HSDP: expected each gradient bucket reduced once over the outer ranks, got "
            f"{sorted(counts)} times. Set ddp_config.overlap_grad_reduce, and run all microbatches "
            "but the last under the model's no_sync() (config.no_sync_func)"
        ]
