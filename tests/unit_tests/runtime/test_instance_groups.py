# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Groups of instances that each orthogonalize every matrix stay equal, and refuse together."""

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.sharded_muon import build_optimizers, init_group, step_both

pytestmark = pytest.mark.ranks

SLOW_LINKS = "ranks_per_node=2,gbps_between_nodes=1e-9"


def _step_with_other_sums(num_shards: int, num_replicas: int) -> dict[str, Any]:
    """Step where all instances but the first add up squares in another way."""
    import torch
    import torch.distributed as dist

    from megatron_muon.runtime.norms import SumOfSquares

    init_group()
    # Without a word, the cost model finds that links between instances of HSDP are too slow.
    num_groups = 2 if num_shards == 1 else None
    exchange = {"wire": "bf16", "instance_groups": num_groups, "cost_model": SLOW_LINKS}
    optimizers = build_optimizers(num_shards, {}, exchange, num_replicas=num_replicas)
    calls = []
    if dist.get_rank() >= 2:
        original = SumOfSquares.__call__

        def other_sums(self: SumOfSquares, tensors: Any) -> torch.Tensor:
            """Return sums that are too large by a thousandth."""
            calls.append(len(tensors))
            return original(self, tensors) * 1.001

        SumOfSquares.__call__ = other_sums
    step_both(optimizers, "bf16")
    (plan,) = optimizers.sharded.compute.plans
    return {
        "ranks": list(plan.plan_seconds.ranks),
        "num_groups": plan.num_groups,
        "different": optimizers.differences(),
        "added_up": sum(calls),
    }


@pytest.mark.parametrize(("num_shards", "num_replicas"), [(2, 2), (1, 4)], ids=["hsdp", "zero0"])
def test_all_groups_have_the_norms_of_the_first(num_shards, num_replicas):
    """Sums in another order would have other last bits, and weights of instances drift apart."""
    run = run_ranks(4, _step_with_other_sums, num_shards, num_replicas).check()
    for rank, found in enumerate(run.results):
        assert found["num_groups"] == 2
        assert found["ranks"] == ([0, 1] if rank < 2 else [2, 3])
        assert found["different"] == []
        assert found["added_up"] == 0


def _build_in_groups(num_groups: int) -> str:
    init_group()
    try:
        build_optimizers(2, {}, {"instance_groups": num_groups}, num_replicas=2)
    except RuntimeError as error:
        return str(error)
    return ""


def test_groups_that_instances_cannot_form_are_an_error_on_all_ranks():
    """At construction, by the name of the flag."""
    for message in run_ranks(4, _build_in_groups, 3).check().results:
        assert (
            "--muon-fsdp-instance-groups: expected a divisor of the 2 instances that hold the same "
            "rows, got 3" in message
        )
        assert "No optimizer was built" in message


def _logged_plan() -> list[str]:
    from megatron_muon.runtime import owner_compute

    init_group()
    lines: list[str] = []
    owner_compute.logger.info = lambda _, line: lines.append(line)  # type: ignore[method-assign]
    build_optimizers(1, {}, {"instance_groups": 2, "log_plan": True}, num_replicas=4)
    return lines


def test_the_first_rank_of_each_group_logs_its_plan():
    """Groups are domains of their own there, as those of tensor-parallel ranks are."""
    first, second, third, fourth = run_ranks(4, _logged_plan).check().results
    assert "Muon exchange plan of 2 ranks, 0 to 1:" in first
    assert "Muon exchange plan of 2 ranks, 2 to 3:" in third
    assert any(line.startswith("groups of instances: ") for line in first)
    assert second == fourth == []


def _replicas_on_two_of_four_ranks() -> list[str]:
    """Orthogonalize a matrix that two ranks hold whole, and another that two others share."""
    import torch
    import torch.distributed as dist
    from helpers.layouts import rows_cut_at

    from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
    from megatron_muon.plan.settings import ExchangeSettings
    from megatron_muon.runtime.owned_parameters import OwnedParameter, lay_out
    from megatron_muon.runtime.owner_compute import OwnerCompute
    from megatron_muon.runtime.sharded_matrix import ShardedMatrix

    init_group()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[dist.get_rank() // 2]
    if dist.get_rank() < 2:
        matrix = ShardedMatrix("replicated", rows_cut_at(8, 8, [8]), None, pair)
    else:
        matrix = ShardedMatrix("sharded", rows_cut_at(8, 8, [4, 4]), pair, None)
    param = torch.empty(matrix.local_shape)
    compute = OwnerCompute(
        [lay_out([OwnedParameter(param, matrix, None, None, None)], torch.device("cpu"))],
        NewtonSchulzSettings(5, "quintic", False, lambda rows, cols: (1.0,)),
        ExchangeSettings(instance_groups=2),
        device=torch.device("cpu"),
    )
    return [f"{plan.num_groups} on {list(plan.plan_seconds.ranks)}" for plan in compute.plans]


def test_ranks_without_replicas_join_a_job_whose_others_form_groups():
    """They would refuse the number of groups, and with them all ranks."""
    run = run_ranks(4, _replicas_on_two_of_four_ranks).check()
    assert run.results == [["2 on [0]"], ["2 on [1]"], ["1 on [2, 3]"], ["1 on [2, 3]"]]


def _groups_of_replicas(device: str) -> list[bool]:
    """Find the groups of a plan of two of four replicas, as on a CPU or as on a GPU."""
    import torch.distributed as dist

    from megatron_muon.runtime import owner_compute

    init_group()
    optimizers = build_optimizers(1, {}, {"instance_groups": 2}, num_replicas=4)
    (plan,) = optimizers.sharded.compute.plans
    kind = owner_compute.Kind(
        owner_compute.Domain(tuple(range(4)), dist.group.WORLD, None),
        plan.matrices,
        {},
        [tuple(range(4))],
        dist.group.WORLD,
    )
    # Where there is no GPU, torch.device makes a CPU of it on the ranks of tests.
    (groups,) = owner_compute._groups([kind], [plan], dist.get_rank(), SimpleNamespace(type=device))
    ranks = [dist.get_process_group_ranks(group) for group in groups]
    assert ranks[0] == ranks[1] == list(plan.plan_seconds.ranks)
    return [groups.plan is groups.replicas]


@pytest.mark.parametrize(("device", "is_shared"), [("cpu", False), ("cuda", True)])
def test_one_communicator_serves_a_plan_whose_ranks_are_all_replicas(device, is_shared):
    """On a GPU. On a CPU a thread passes results on, in a group of its own."""
    assert run_ranks(4, _groups_of_replicas, device).check().results == [[is_shared]] * 4
