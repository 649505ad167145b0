# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Experts and dense matrices in one schedule: two domains of experts, one of all ranks."""

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from helpers.collective_timing import collectives_run
from helpers.device import device, kind
from helpers.layouts import rows_cut_at
from helpers.layouts import whole_matrix as joined
from helpers.ranks import run_ranks
from helpers.sharded_muon import each_of, whole_matrix
from helpers.stacks import settings

from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.agreement import Domain, new_groups
from megatron_muon.runtime.engine_builder import PlanInput, build_engine

pytestmark = pytest.mark.ranks

COLS = 12


class _Kind:
    """Matrices of some ranks, which hold the rows of one shard or those of others too."""

    def __init__(self, name: str, seed: int, holders: list[Any], rows: list[list[int]]) -> None:
        self.shard = next(i for i, ranks in enumerate(holders) if dist.get_rank() in ranks)
        self.holders = holders
        self.names = [f"{name}.{i}" for i in range(len(rows))]
        cut = [rows_cut_at(sum(each), COLS, each) for each in rows]
        self.matrices = [
            joined(name, layout, [holders]) for name, layout in zip(self.names, cut, strict=True)
        ]
        self.own = [slice(*layout.shards[self.shard]) for layout in cut]
        self.wholes = [
            whole_matrix((sum(each), COLS), seed + i, block=0) for i, each in enumerate(rows)
        ]
        self.params = [torch.empty(rows[self.shard], COLS, device=device()) for rows in rows]

    def plan_input(self) -> Any:
        """Make the process groups, and return what is planned."""
        ranks = tuple(sorted(itertools.chain(*self.holders)))
        replicas = self.holders[self.shard]
        groups = new_groups({each for each in (ranks, replicas) if len(each) > 1})
        handles = {i: p for i, p in enumerate(self.params) if p.numel()}
        domain = Domain(ranks, groups.get(ranks), None)
        return PlanInput(domain, self.matrices, handles, groups.get(replicas))


def _two_kinds(
    num_experts: list[int], num_dense: int, num_buckets: int, has_replicas: bool
) -> dict[str, Any]:
    """Orthogonalize with late, with early and with real messages; compare with whole matrices."""
    rank = dist.get_rank()
    if has_replicas:
        # Ranks 0 and 2 hold the same, and 1 and 3: whole experts, and halves of dense matrices.
        domain, of_experts, of_dense = rank % 2, [(rank % 2, rank % 2 + 2)], [(0, 2), (1, 3)]
        rows = [[32] for _ in range(num_experts[domain])]
        dense_rows = [[7 + i, 16 - i] for i in range(num_dense)]
    else:
        domain = rank // 2
        of_experts = [(2 * domain,), (2 * domain + 1,)]
        of_dense = [(each,) for each in range(4)]
        rows = [[13 + i, 19 - i] for i in range(num_experts[domain])]
        dense_rows = [[7 + i, 0, 16 - i, 9] for i in range(num_dense)]
    kinds = [
        _Kind("expert", 100 * domain, of_experts, rows),
        _Kind("dense", 1000, of_dense, dense_rows),
    ]
    everything = [
        each for k in kinds for each in zip(k.names, k.params, k.wholes, k.own, strict=True)
    ]
    torch.set_float32_matmul_precision("highest")
    compute = build_engine(
        [each.plan_input() for each in kinds],
        settings(is_bf16=False),
        ExchangeSettings(num_buckets=num_buckets),
        device=device(),
    )
    wrong = []
    # On a GPU only as ever: the helper's messages know no streams.
    late = ("at_wait", "at_launch") if kind() == "cpu" else ("as ever",)
    for when in (*late, "as ever", late[0]):
        momentum = {param: whole[own].clone() for _, param, whole, own in everything}
        with nullcontext() if when == "as ever" else collectives_run(when) as timing:
            done = [p for params in compute.orthogonalize(momentum, momentum) for p in params]
        wrong += timing.breaches if timing else []
        held = [param for _, param, _, _ in everything if param.numel()]
        if sorted(map(id, done)) != sorted(map(id, held)):
            wrong.append(f"{when}: {len(done)} results of {len(held)}")
        for name, param, whole, own in everything:
            expected = muon_utils.newton_schulz(whole, 5, "quintic")
            if not torch.equal(momentum[param], expected[own]):
                wrong.append(f"{when}: {name}")
    return {
        "wrong": wrong,
        "buckets": [len(plan.buckets) for plan in compute.plans],
        "rounds": [
            [action.plan, action.number]
            for action in compute._actions
            if action.kind == "orthogonalize"
        ],
    }


def test_ranks_with_other_experts_share_the_dense_schedule():
    """Ranks with different experts share the schedule of dense matrices without a hang."""
    cases = [([3, 14], 6, *each) for each in itertools.product((16, 1), (False, True))]
    by_rank = run_ranks(4, each_of, _two_kinds, cases).check().results
    for (*_, num_buckets, has_replicas), found in zip(
        cases, zip(*by_rank, strict=True), strict=True
    ):
        assert [each["wrong"] for each in found] == [[]] * 4, (num_buckets, has_replicas)
        assert found[0]["buckets"][1] == found[3]["buckets"][1]
        if num_buckets == 16:
            assert found[0]["buckets"][0] != found[3]["buckets"][0]
            assert found[0]["rounds"] != found[3]["rounds"]
            for each in found:
                kinds = [plan for plan, _ in each["rounds"]]
                assert kinds != sorted(kinds), "one kind after the other"
