# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Experts and dense matrices in one schedule: two domains of experts, one of all ranks."""

from contextlib import nullcontext
from typing import Any

import pytest
from helpers.device import device, kind
from helpers.layouts import rows_cut_at
from helpers.ranks import run_ranks
from helpers.sharded_muon import init_group, whole_matrix

pytestmark = pytest.mark.ranks

COLS = 12


def _owned(
    name: str, rows: list[int], group: Any, seed: int, replicas: Any = None
) -> tuple[Any, Any]:
    """Make a parameter of this rank, and draw the whole matrix that its momentum is rows of."""
    import torch

    from megatron_muon.runtime.owned_parameters import OwnedParameter
    from megatron_muon.runtime.sharded_matrix import ShardedMatrix

    matrix = ShardedMatrix(name, rows_cut_at(sum(rows), COLS, rows), group, replicas)
    param = torch.empty(matrix.local_shape, device=device())
    return OwnedParameter(param, matrix, None, None, None), whole_matrix(
        (sum(rows), COLS), seed, block=0
    )


def _two_kinds(
    num_experts: list[int], num_dense: int, num_buckets: int, has_replicas: bool
) -> dict[str, Any]:
    """Orthogonalize with late, with early and with real messages; compare with whole matrices."""
    import torch
    import torch.distributed as dist
    from emerging_optimizers.orthogonalized_optimizers import muon_utils
    from helpers.collective_timing import collectives_run
    from torch.distributed.device_mesh import init_device_mesh

    from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
    from megatron_muon.plan.settings import ExchangeSettings
    from megatron_muon.runtime.owned_parameters import lay_out
    from megatron_muon.runtime.owner_compute import OwnerCompute

    init_group()
    rank = dist.get_rank()
    mesh = init_device_mesh(kind(), (2, 2), mesh_dim_names=("outer", "inner"))
    outer, inner = mesh["outer"].get_group(), mesh["inner"].get_group()
    if has_replicas:
        # Ranks 0 and 2 hold the same, and 1 and 3: whole experts, and halves of dense matrices.
        domain = rank % 2
        experts = [
            _owned(f"expert.{i}", [32], None, 100 * domain + i, outer)
            for i in range(num_experts[domain])
        ]
        dense = [
            _owned(f"dense.{i}", [7 + i, 16 - i], inner, 1000 + i, outer) for i in range(num_dense)
        ]
    else:
        domain = rank // 2
        experts = [
            _owned(f"expert.{i}", [13 + i, 19 - i], inner, 100 * domain + i)
            for i in range(num_experts[domain])
        ]
        dense = [
            _owned(f"dense.{i}", [7 + i, 0, 16 - i, 9], dist.group.WORLD, 1000 + i)
            for i in range(num_dense)
        ]
    torch.set_float32_matmul_precision("highest")
    compute = OwnerCompute(
        [lay_out([owned for owned, _ in kind], device()) for kind in (experts, dense)],
        NewtonSchulzSettings(5, "quintic", False, lambda rows, cols: (1.0,)),
        ExchangeSettings(num_buckets=num_buckets),
        device=device(),
    )
    wrong = []
    # On a GPU only as ever: the helper's messages know no streams.
    late = ("at_wait", "at_launch") if kind() == "cpu" else ("as ever",)
    for when in (*late, "as ever", late[0]):
        momentum = {
            owned.param: whole[slice(*owned.matrix.local_range)].clone()
            for owned, whole in (*experts, *dense)
        }
        with nullcontext() if when == "as ever" else collectives_run(when) as timing:
            done = [p for params in compute.orthogonalize(momentum, momentum) for p in params]
        wrong += timing.breaches if timing else []
        held = [owned for owned, _ in (*experts, *dense) if owned.param.numel()]
        if sorted(map(id, done)) != sorted(id(owned.param) for owned in held):
            wrong.append(f"{when}: {len(done)} results of {len(held)}")
        for owned, whole in (*experts, *dense):
            expected = muon_utils.newton_schulz(whole, 5, "quintic")
            rows = slice(*owned.matrix.local_range)
            if not torch.equal(momentum[owned.param], expected[rows]):
                wrong.append(f"{when}: {owned.matrix.fqn}")
    return {
        "wrong": wrong,
        "buckets": [len(plan.buckets) for plan in compute.plans],
        "loads_ns": [plan.assignment.load_ns[rank] for plan in compute.plans],
        "rounds": [
            [action.plan, action.number]
            for action in compute._engine._schedule.actions
            if action.kind == "orthogonalize"
        ],
    }


@pytest.mark.parametrize("has_replicas", [False, True], ids=["one_copy", "replicas"])
@pytest.mark.parametrize("num_buckets", [16, 1], ids=["many_buckets", "one_bucket"])
def test_ranks_with_other_experts_share_the_schedule_of_dense_matrices(num_buckets, has_replicas):
    """Their buckets are more or fewer, and come in another order between those of all ranks.

    A rank that waited for another in a circle would wait for ever. Replicas pass results of both
    kinds on in one group.
    """
    run = run_ranks(4, _two_kinds, [3, 14], 6, num_buckets, has_replicas, timeout_s=120.0)
    found = run.check().results
    assert [each["wrong"] for each in found] == [[]] * 4
    assert found[0]["buckets"][1] == found[3]["buckets"][1]
    # Dense matrices are planned on top of the experts.
    for each in found:
        experts_ns, all_ns = each["loads_ns"]
        assert 0 < experts_ns <= all_ns
    if num_buckets == 16:
        assert found[0]["buckets"][0] != found[3]["buckets"][0]
        assert found[0]["rounds"] != found[3]["rounds"]
        for each in found:
            kinds = [plan for plan, _ in each["rounds"]]
            assert kinds != sorted(kinds), "one kind after the other"
