# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""FSDPZeROTensorParallelMuon on hand-made row shards, against upstream's Muon on whole matrices."""

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.device import device, has_stacks
from helpers.ranks import cached_cases, run_ranks
from helpers.sharded_muon import build_optimizers, init_group, step_both

pytestmark = pytest.mark.ranks

SETTINGS = [
    {},
    {
        "scale_mode": "unit_rms_norm",
        "extra_scale_factor": 0.2,
        "coefficient_type": "simple",
        "use_decoupled_weight_decay": False,
    },
    {"fp32_matmul_prec": "highest", "coefficient_type": "polar_express", "num_ns_steps": 3},
    {
        "nesterov": False,
        "momentum": 0.8,
        "weight_decay": 0.0,
        "split_qkv": False,
        "scale_mode": "shape_scaling",
    },
]
EXCHANGES = [
    {"comm_dtype": "fp32"},
    {"comm_dtype": "bf16"},
    {"comm_dtype": "fp32", "num_buckets": 3, "cost_model": "stack_tiles=4"},
    {
        "comm_dtype": "bf16",
        "num_buckets": 16,
        "cost_model": "stack_tiles=4,gbps=1000,gbps_between_nodes=1000",
    },
]
# With replicas every bucket has two scatters.
SHARING = [{"comm_dtype": "fp32", "num_buckets": 3}, {"comm_dtype": "bf16", "num_buckets": 3}]
# By number of ranks: ranks that rows are sharded over, and what shares the work besides.
GRIDS: dict[int, list[tuple[int, dict[str, int]]]] = {
    1: [(1, {})],
    2: [(2, {}), (1, {"num_replicas": 2})],
    3: [(3, {}), (1, {"num_replicas": 3})],
    4: [(4, {}), (2, {"num_replicas": 2}), (2, {"num_tensor_ranks": 2})],
    8: [(8, {}), (2, {"num_tensor_ranks": 2, "num_replicas": 2})],
}
# Of stacks on a GPU: three steps of 0.02, times a scale of at most 7, and results that differ where
# rounding to bf16 goes the other way. Results that are not orthogonalized are off by 0.02 and more.
STACKED_ATOL = 5e-3


def _step_and_compare(world_size: int) -> list[str]:
    """Step three times for each grid, exchange and setting; list what differs."""
    init_group()
    different = []
    for num_shards, grid in GRIDS[world_size]:
        for exchange, settings in itertools.product(SHARING if grid else EXCHANGES, SETTINGS):
            comm_dtype = exchange.get("comm_dtype", "")
            # A matrix is treated alike whoever owns it: two settings are enough there.
            if settings in SETTINGS[1::2] and ("num_buckets" in exchange or world_size == 8):
                continue
            if comm_dtype == "bf16" and settings.get("fp32_matmul_prec") == "highest":
                continue
            optimizers = build_optimizers(num_shards, settings, exchange, **grid)
            step_both(optimizers, comm_dtype)
            atol = STACKED_ATOL if has_stacks(exchange.get("cost_model", "")) else 0.0
            found = optimizers.differences(atol)
            different += [f"{grid} {exchange} {settings} {each}" for each in found]
    return different


@pytest.mark.parametrize(
    "world_size", [1, 2, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 8))]
)
def test_step_equals_upstream_muon_on_whole_matrices(world_size):
    """Parameters and momentum have upstream's bits after three steps in every layout."""
    assert run_ranks(world_size, _step_and_compare, world_size).check().results == [[]] * world_size


def _owners_of_copies() -> list[list[tuple[str, int, int]]]:
    """List matrices of which tensor-parallel ranks have copies, with all their holders."""
    found = []
    for mode in ("blockwise", "duplicated"):
        engine = build_optimizers(2, {"tp_mode": mode}, num_tensor_ranks=2).sharded.engine
        copied = [
            (matrix.name, len(owners), sorted(matrix.elements_by_rank))
            for plan in engine.plans
            for matrix, owners in zip(plan.matrices, plan.owners, strict=True)
            if any(len(region.holders) > 1 for region in matrix.regions)
        ]
        found.append(copied)
    return found


def _figures() -> list[list[list[float]]]:
    """Return the norms of gradients and momentum, and those of whole matrices."""
    found = []
    for grid in ({}, {"num_replicas": 2}, {"num_tensor_ranks": 2}):
        optimizers = build_optimizers(4 // max([1, *grid.values()]), {"nesterov": False}, **grid)
        optimizers.sharded.muon_step.record_metrics()
        step_both(optimizers, "fp32", num_steps=1)
        figures = optimizers.sharded.muon_step.last_metrics()
        # Tensor-parallel ranks have parts of a matrix, or copies.
        total, of_parts = torch.zeros(2), torch.zeros(2)
        for _, whole, _ in optimizers.params:
            momentum = optimizers.whole.state[whole]["momentum_buffer"]
            squares = torch.stack([whole.grad.square().sum(), momentum.square().sum()]).cpu()
            (of_parts if whole.partition_dim >= 0 else total).add_(squares)
        summed = of_parts.to(device())
        torch.distributed.all_reduce(summed)
        total += summed.cpu() * grid.get("num_tensor_ranks", 1) / 4
        norms = [figures.gradient_norms[0], figures.momentum_norms[0]]
        found.append([norms, total.sqrt().tolist()])
    return found


def _step_with_stored_momentum(dtype: Any, is_offloaded: bool) -> list[str]:
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon

    class Rounding(TensorParallelMuon):
        """Upstream's, with momentum rounded between steps."""

        def step(self, closure: Any = None) -> None:
            """Step, and round the momentum."""
            super().step(closure)
            for state in self.state.values():
                state["momentum_buffer"].copy_(state["momentum_buffer"].to(dtype))

    sharded = functools.partial(
        FSDPZeROTensorParallelMuon, momentum_dtype=dtype, offload_momentum=is_offloaded
    )
    different = []
    for settings, comm_dtype in itertools.product(({}, {"nesterov": False}), ("fp32", "bf16")):
        optimizers = build_optimizers(
            2, settings, {"comm_dtype": comm_dtype}, sharded=sharded, whole=Rounding
        )
        step_both(optimizers, comm_dtype)
        assert {momentum.dtype for _, momentum in optimizers.state()} == {dtype}
        different += [f"{settings} {comm_dtype} {each}" for each in optimizers.differences()]
    return different


def _disagree() -> list[str]:
    """Return the errors of parameters that rank 1 has frozen, named or sharded otherwise."""
    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon, build_muon_step
    from megatron_muon.plan.settings import ExchangeSettings

    params, _, parts = map(list, zip(*build_optimizers(2).params, strict=True))
    is_wrong = dist.get_rank() == 1
    boxes = {0: ((0, 17), (0, 24)), 1: ((17, 48), (0, 24))}

    def error(trained: list[Any], parts: list[Any]) -> str:
        shards = dict(zip(params, parts, strict=True))
        muon = FSDPZeROTensorParallelMuon(trained, tensor_shards=shards)
        with pytest.raises(RuntimeError) as caught:
            build_muon_step([muon], ExchangeSettings())
        return str(caught.value)

    renamed = [*parts[:2], dataclasses.replace(parts[2], name="layer.two.weight"), *parts[3:]]
    moved = [dataclasses.replace(parts[0], known_boxes=boxes), *parts[1:]]
    return [
        error(params[:3] + params[3 + is_wrong :], parts),
        error(params, renamed if is_wrong else parts),
        error(params, moved if is_wrong else parts),
    ]


STORED = list(itertools.product((torch.bfloat16, torch.float32), (False, True)))
CASES = {
    2: {
        "errors": _disagree,
        **{
            f"stored {case}": functools.partial(_step_with_stored_momentum, *case)
            for case in STORED
        },
    },
    4: {"owners": _owners_of_copies, "figures": _figures},
}
results = cached_cases(CASES)


def test_tensor_parallel_replicas_are_orthogonalized_once():
    """Copies on tensor-parallel ranks are one matrix of one plan, and cannot drift apart."""
    router = ["layer.2.weight", 1, [0, 1, 2, 3]]
    assert results(4)["owners"] == [[[router]] * 2] * 4


def test_figures_of_a_step_are_those_of_whole_matrices():
    """Metrics count rows of replicas and of tensor-parallel copies once."""
    for figures, expected in itertools.chain(*results(4)["figures"]):
        # Sums in float32, in another order.
        assert figures == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("case", STORED, ids=str)
def test_stored_momentum_is_rounded_once_a_step(case):
    """Momentum in bf16 or CPU memory has the bits of upstream's, rounded after each step."""
    assert results(2)[f"stored {case}"] == [[]] * 2


def test_ranks_that_disagree_raise_at_construction_on_all_ranks():
    """A parameter that one rank has frozen, renamed or moved is named on all ranks."""
    for of_frozen, of_renamed, of_moved in results(2)["errors"]:
        assert "rank 1 has 'layer.4.weight" in of_frozen
        assert "where rank 0 has 'layer.3.weight" in of_frozen
        assert "rank 1 has 'layer.two.weight" in of_renamed
        assert "rank 1: layer.0.weight: expected a local shard of shape (31, 24)" in of_moved
