# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Ways to break Muon under Megatron-FSDP on purpose; called on each rank before the launcher.

None of them touches the reference, upstream's Muon under DDP.
"""

from typing import Any

import torch


def do_nothing() -> None:
    """Neither matrices nor anything else is ever updated."""
    update_no_matrix()
    torch.optim.Adam.step = torch.optim.AdamW.step = _idle_step


def update_no_matrix() -> None:
    """Muon does nothing; embeddings, norms and the output layer are updated as they should."""
    from megatron_muon.step.muon_step import MuonStep

    MuonStep.step = _idle_step


def _idle_step(self: Any, *args: Any, **kwargs: Any) -> None:
    """Step nothing."""


def update_only_rank_0() -> None:
    """Every rank joins the exchange, and all but rank 0 leave their rows as they were."""
    from megatron_muon.step.muon_step import MuonStep

    original = MuonStep.step

    def step(self: Any) -> None:
        params = [param for muon in self.optimizers for param in muon.params]
        before = [param._local_tensor.clone() for param in params]
        original(self)
        if torch.distributed.get_rank() != 0:
            for param, rows in zip(params, before, strict=True):
                param._local_tensor.copy_(rows)

    MuonStep.step = step


def skip_newton_schulz() -> None:
    """Momentum is normalized and used as it is."""
    from megatron_muon.newton_schulz.standard import Standard

    def normalized(self: Any, stack: Any, call: Any) -> Any:
        return stack / stack.float().norm(dim=(-2, -1), keepdim=True).to(stack.dtype)

    Standard.run = normalized


def flip_rows_of_other_ranks() -> None:
    """Owners see the rows of other ranks with the other sign.

    Zeros in their place would leave most matrices nearly as they are: owners hold most of them.
    """
    from megatron_muon.runtime.plan_runner import PlanRunner

    original = PlanRunner.orthogonalize

    def flipped(self: Any, index: int) -> Any:
        if (gather := self.buckets[index].gather) is not None:
            gather.receives.neg_()
        return original(self, index)

    PlanRunner.orthogonalize = flipped
