# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon, its adaptive methods and its blocks on hand-made row shards, beside upstream's: one table.

The reference of Muon and AdaMuon is upstream's class on whole matrices; for AdaMuon the class of
Megatron-LM main, which has two attributes more than the one of 0.19.2. The reference of NorMuon and
NAMO is emerging-optimizers' class, with each block as a parameter.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers.device import has_stacks
from helpers.ranks import cached_cases
from helpers.sharded_muon import build_optimizers, differences_by_block, step_both

pytestmark = pytest.mark.ranks

SETTINGS: list[dict[str, Any]] = [
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
FP32, BF16 = {"comm_dtype": "fp32"}, {"comm_dtype": "bf16"}
EXCHANGES: list[dict[str, Any]] = [
    FP32,
    BF16,
    {**FP32, "num_buckets": 3, "cost_model": "stack_tiles=4"},
    {
        **BF16,
        "num_buckets": 16,
        "cost_model": "stack_tiles=4,gbps=1000,gbps_between_nodes=1000",
    },
]
# With replicas every bucket has an all-gather more.
SHARING = [{**FP32, "num_buckets": 3}, {**BF16, "num_buckets": 3}]
type Grid = Mapping[str, int]
ONE, REPLICAS, TENSOR = {}, {"num_replicas": 2}, {"num_tensor_ranks": 2}
# By number of ranks: ranks that rows are sharded over, and what shares the work besides.
GRIDS: dict[int, list[tuple[int, Grid]]] = {
    1: [(1, ONE)],
    2: [(2, ONE), (1, REPLICAS)],
    3: [(3, ONE), (1, {"num_replicas": 3})],
    4: [(4, ONE), (2, REPLICAS), (2, TENSOR)],
    8: [(8, ONE), (2, {**TENSOR, **REPLICAS})],
}
# Of stacks on a GPU: three steps of 0.02, times a scale of at most 7, and results that differ where
# rounding to bf16 goes the other way. Results that are not orthogonalized are off by 0.02 and more.
STACKED_ATOL = 5e-3
# Columns and rows by shard, the last one of query, key and value: tall, wide and square; with two
# shards a wide and a tall one more, which tensor parallelism cuts in rows and in columns.
ADAPTIVE_CASES = {
    1: [(24, [48]), (48, [24]), (32, [32]), (24, [32])],
    2: [
        *((24, [31, 17]), (48, [24, 0]), (32, [1, 31])),
        *((48, [4, 4]), (16, [40, 8]), (24, [7, 25])),
    ],
    3: [(24, [0, 47, 1]), (48, [8, 8, 8]), (32, [0, 0, 32]), (24, [0, 9, 23])],
}
# Columns, rows, rows of a group of blocks, and whether blocks are heads.
BLOCKS = {
    "gate and up": (24, 40, (20, 20), False),
    "gate and up, interleaved": (24, 48, (8, 8), False),
    "gated attention": (24, 48, (8, 8, 4, 4), False),
    "heads of query, key and value": (24, 32, (4,) * 8, True),
    "latent queries": (12, 32, (5, 3), False),
    "heads of latent queries": (12, 32, (5, 3) * 4, True),
    "latent keys and values": (12, 36, (5, 4), False),
    "one block": (24, 30, (30,), False),
}


class Row(NamedTuple):
    """Optimizers that are stepped beside whole matrices."""

    num_shards: int
    grid: Grid
    settings: dict[str, Any]
    exchange: dict[str, Any] = FP32
    options: Mapping[str, Any] = {}
    method: str | None = None

    def differences(self) -> list[str]:
        comm_dtype, options = self.exchange["comm_dtype"], dict(self.options)
        if self.method is not None:
            options |= _adaptive(self.method, self.num_shards)
        optimizers = build_optimizers(
            self.num_shards, self.settings, self.exchange, **self.grid, **options
        )
        if self.method in ("normuon", "namo"):
            settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "beta2": 0.9}
            settings |= {"nesterov": True, **self.settings}
            settings.pop("tp_mode", None)
            return differences_by_block(optimizers, comm_dtype, self.method, **settings)
        step_both(optimizers, comm_dtype)
        dtype = getattr(options.get("sharded"), "keywords", {}).get("momentum_dtype", torch.float32)
        assert {momentum.dtype for _, momentum in optimizers.state()} == {dtype}
        atol = STACKED_ATOL if has_stacks(self.exchange.get("cost_model", "")) else 0.0
        return optimizers.differences(atol)


def _adaptive(method: str, num_shards: int) -> dict[str, Any]:
    """Return the classes of both optimizers, and matrices."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon

    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon

    class Whole(TensorParallelAdaptiveMuon):
        def __init__(self, params: Any, **kwargs: Any) -> None:
            super().__init__(params, **kwargs)
            self.scale_mode = kwargs["scale_mode"]
            self.extra_scale_factor = kwargs["extra_scale_factor"]

    # Upstream's class takes the same argument for both.
    ours = functools.partial(FSDPZeROTensorParallelMuon, moment2_method=method)
    if method == "adamuon":
        return {"sharded": ours, "whole": Whole}
    return {"sharded": functools.partial(ours, beta2=0.9), "cases": ADAPTIVE_CASES[num_shards]}


def _muon(world_size: int) -> Iterator[Row]:
    for num_shards, grid in GRIDS[world_size]:
        for exchange, settings in itertools.product(SHARING if grid else EXCHANGES, SETTINGS):
            # A matrix is treated alike whoever owns it: two settings are enough there.
            if settings in SETTINGS[1::2] and ("num_buckets" in exchange or world_size == 8):
                continue
            if exchange["comm_dtype"] == "bf16" and "fp32_matmul_prec" in settings:
                continue
            yield Row(num_shards, grid, settings, exchange)


def _adaptive_rows(grids: Sequence[tuple[int, Grid]], *, modes: bool = False) -> Iterator[Row]:
    """Each method with either dtype, and under the other modes of tensor parallelism."""
    scale = {"extra_scale_factor": 0.2}
    of_adamuon = {"scale_mode": "spectral", **scale, "beta2": 0.9}
    for (num_shards, grid), exchange in itertools.product(grids, (FP32, BF16)):
        for method, settings in (("adamuon", of_adamuon), ("normuon", scale)):
            yield Row(num_shards, grid, settings, exchange, {}, method)
        # Owners step it as upstream, on float32 rows.
        precision = {"fp32_matmul_prec": "medium" if exchange is FP32 else "high"}
        yield Row(num_shards, grid, {**scale, **precision}, FP32, {}, "namo")
    blockwise = {"tp_mode": "blockwise"}
    # Upstream's AdaMuon scales by the shape of a tensor-parallel rank, as ours. Not in mode
    # distributed: it multiplies parts of a matrix there, and rounding decides the sign of small
    # elements, which a second moment makes large.
    if modes:
        yield Row(2, TENSOR, {**of_adamuon, **blockwise}, FP32, {}, "adamuon")
        distributed = {"tp_mode": "distributed", "nesterov": False}
        for method, mode in itertools.product(("normuon", "namo"), (blockwise, distributed)):
            yield Row(2, TENSOR, {**scale, **mode}, FP32, {}, method)


def _blocks(grids: Sequence[tuple[int, Grid, str]]) -> Iterator[Row]:
    """Layouts of blocks, cut anywhere, empty shards included."""
    for (num_shards, grid, mode), exchange in itertools.product(grids, (FP32, BF16)):
        draw, cases = random.Random(num_shards), []
        for cols, rows, _, _ in BLOCKS.values():
            cuts = sorted(draw.randint(0, rows) for _ in range(num_shards - 1))
            cases.append((cols, [b - a for a, b in itertools.pairwise([0, *cuts, rows])]))
        options = {
            "cases": cases,
            "blocks": [split for _, _, split, _ in BLOCKS.values()],
            "by_head": [is_head for *_, is_head in BLOCKS.values()],
        }
        yield Row(num_shards, grid, {"tp_mode": mode}, exchange, options)


def _stored(dtype: torch.dtype) -> Iterator[Row]:
    """Momentum in a dtype, beside upstream's that is rounded after each step."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon

    class Rounding(TensorParallelMuon):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for state in self.state.values():
                state["momentum_buffer"].copy_(state["momentum_buffer"].to(dtype))

    options = {
        "sharded": functools.partial(FSDPZeROTensorParallelMuon, momentum_dtype=dtype),
        "whole": Rounding,
    }
    for settings, exchange in itertools.product(({}, {"nesterov": False}), (FP32, BF16)):
        yield Row(2, ONE, settings, exchange, options)


def _differences(rows: Any, *args: Any, **options: Any) -> list[str]:
    """Step the rows that a function yields; list what differs."""
    return [
        f"{row[:4]} {row.method}: {each}"
        for row in rows(*args, **options)
        for each in row.differences()
    ]


# Rows of the table, by number of ranks and name; rows of the whole suite apart.
STORED = torch.bfloat16, torch.float32
FAST: dict[int, dict[str, Any]] = {
    1: {"muon": (_muon, 1)},
    2: {
        "muon": (_muon, 2),
        "adaptive": (_adaptive_rows, GRIDS[2]),
        "blocks": (_blocks, [(2, ONE, "blockwise")]),
        **{f"stored in {dtype}": (_stored, dtype) for dtype in STORED},
    },
    3: {
        "adaptive": (_adaptive_rows, GRIDS[3][:1]),
        "blocks": (_blocks, [(3, ONE, "blockwise")]),
    },
    4: {
        "muon": (_muon, 4),
        "modes": (functools.partial(_adaptive_rows, modes=True), []),
        "blocks": (
            _blocks,
            [(4, ONE, "blockwise"), (2, TENSOR, "duplicated"), (2, TENSOR, "blockwise")],
        ),
    },
}
SLOW = {
    3: {"muon": (_muon, 3)},
    4: {"adaptive": (_adaptive_rows, GRIDS[4][1:])},
    8: {"muon": (_muon, 8)},
}


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


def _disagree() -> list[str]:
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


def _cases(table: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {
        size: {name: functools.partial(_differences, *row) for name, row in rows.items()}
        for size, rows in table.items()
    }


OTHERS = {2: {"errors": _disagree}, 4: {"owners": _owners_of_copies}}
fast = cached_cases({n: {**rows, **OTHERS.get(n, {})} for n, rows in _cases(FAST).items()})
slow = cached_cases(_cases(SLOW))


@pytest.mark.parametrize(
    ("results", "world_size", "name"),
    [
        pytest.param(results, size, name, id=f"{size}-{name}", marks=marks)
        for results, table, marks in ((fast, FAST, ()), (slow, SLOW, pytest.mark.slow))
        for size, rows in table.items()
        for name in rows
    ],
)
def test_step_has_upstreams_bits_on_whole_matrices(results, world_size, name):
    """Parameters and states have upstream's bits after three steps, in each row of the table."""
    assert results(world_size)[name] == [[]] * world_size


def test_tensor_parallel_replicas_are_orthogonalized_once():
    """Copies on tensor-parallel ranks are one matrix of one plan, and cannot drift apart."""
    router = ["layer.2.weight", 1, [0, 1, 2, 3]]
    assert fast(4)["owners"] == [[[router]] * 2] * 4


def test_ranks_that_disagree_raise_at_construction_on_all_ranks():
    """A parameter that one rank has frozen, renamed or moved is named on all ranks."""
    for of_frozen, of_renamed, of_moved in fast(2)["errors"]:
        assert "rank 1 has 'layer.4.weight" in of_frozen
        assert "where rank 0 has 'layer.3.weight" in of_frozen
        assert "rank 1 has 'layer.two.weight" in of_renamed
        assert "rank 1: layer.0.weight: expected a local shard of shape (31, 24)" in of_moved
