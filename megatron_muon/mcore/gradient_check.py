# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Check on all ranks that gradients are complete and finite, before anything is updated."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_muon.runtime.agreement import raise_where_any_rank_fails
from megatron_muon.runtime.finite import find_not_finite


def raise_where_gradients_fail(
    fqns: Mapping[Any, str], problems: Sequence[str], device: torch.device
) -> None:
    """Check on all ranks together that all gradients exist and are finite.

    Args:
        fqns: Names of the DTensor parameters.
        problems: Those of this rank that are known, missing gradients among them, as sentences.
        device: Device of the reduction of a flag.

    Raises:
        RuntimeError: On all ranks, naming rank and parameter, if a non-empty shard on any of them
            has no gradient, or one that is not finite.

    Communication: one all-reduce of a single int32 over all ranks of the job, read on the host.
    """
    grads = [
        (fqn, param.grad._local_tensor)
        for param, fqn in fqns.items()
        if param.grad is not None and param.grad._local_tensor.numel() > 0
    ]
    not_finite = find_not_finite(grads, device)
    raise_where_any_rank_fails(
        list(problems),
        None,
        device,
        "Every trainable parameter needs a finite, reduced gradient before step(): call "
        "finish_grad_sync() after the backward pass, and look for NaN or Inf in the loss. Nothing "
        "was updated.",
        suspects=not_finite.number,
        explain=not_finite.explain,
    )
