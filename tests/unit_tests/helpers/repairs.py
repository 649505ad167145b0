# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs that show a defect of upstream's gradients, with its repair and without it."""

import functools
from typing import NamedTuple

from helpers.ranks import launch
from helpers.toy_gpt import EP, HFSDP, fsdp_toy_gpt, toy_gpt

# Adam, so that only upstream's own optimizer is under test; parity of Muon is in test_parity.py.
_ADAM = ("--optimizer", "adam", "--lr", "1e-3", "--train-iters", "3", "--lr-warmup-iters", "0")
# Several microbatches: three on four ranks, six on two.
_BATCH = ("--global-batch-size", "12")
# No scaling of gradients, and a copy of them in another dtype for the reduction.
_PER_TOKEN = (*EP, "--bf16", "--calculate-per-token-loss")
_BF16_REDUCTION = (
    *("--megatron-fsdp-main-grads-dtype", "fp32"),
    *("--megatron-fsdp-grad-comm-dtype", "bf16"),
)


class Repair(NamedTuple):
    """A defect, and a run that shows it.

    Args:
        name: Name of the defect.
        attribute: What the patch replaces.
        world_size: Number of ranks.
        flags: Flags of the run, under DDP too.
        fsdp_flags: Further flags under Megatron-FSDP.
        rel: Relative tolerance of the gradient norm.
    """

    name: str
    attribute: str
    world_size: int
    flags: tuple[str, ...]
    fsdp_flags: tuple[str, ...]
    rel: float

    def norms_under_ddp(self) -> list[float]:
        """Return the gradient norm of each iteration under DDP."""
        return _grad_norms(self.world_size, toy_gpt(*_ADAM, *_BATCH, *self.flags))

    def norms(self, *, is_repaired: bool = True) -> list[float]:
        """Return the gradient norm of each iteration under Megatron-FSDP."""
        flags = fsdp_toy_gpt("optim_grads_params", *_ADAM, *_BATCH, *self.flags, *self.fsdp_flags)
        return _grad_norms(self.world_size, flags, None if is_repaired else self.attribute)


def without(name: str) -> None:
    """Leave out one patch, by the end of its symbol, before the launcher enables them."""
    from megatron_muon.mcore import patches

    lists = patches.PATCHES, patches.V2_PATCHES
    patches.PATCHES, patches.V2_PATCHES = (
        tuple(p for p in each if not p.symbol.replace(":", ".").endswith(f".{name}"))
        for each in lists
    )
    num_kept = len(patches.PATCHES) + len(patches.V2_PATCHES)
    assert num_kept == sum(map(len, lists)) - 1


def _grad_norms(world_size: int, flags: list[str], missing: str | None = None) -> list[float]:
    before = functools.partial(without, missing) if missing else None
    run = launch(world_size, flags, before=before).check()
    return [record["grad_norm"] for record in run.history]


REPAIRS = (
    Repair("scaling_factor", "_create_hfsdp_helper_buffer", 4, (), HFSDP, 1e-5),
    Repair("instances", "_get_megatron_optimizer_based_on_param_groups", 4, (), HFSDP, 1e-5),
    Repair("group_of_one_rank", "DataParallelBuffer.__init__", 2, EP, (), 1e-5),
    Repair("added_to_itself", "DataParallelBuffer.__init__", 2, _PER_TOKEN, _BF16_REDUCTION, 1e-2),
)
