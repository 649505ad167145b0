# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon on every layout, against emerging-optimizers' Muon on whole matrices: one table.

Layouts of FSDP2, plain tensors of DDP and of tensor parallelism, classes, dtypes and settings of
parameters, and Megatron-FSDP's version 1, which no Megatron trains here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.device import has_megatron, kind
from helpers.fsdp2_models import FSDP2, OTHERS, Sharded, drawn, expert_parallel, local, shard
from helpers.megatron_fsdp import version_1
from helpers.ranks import cached_cases
from helpers.whole_matrices import WholeMuon, differences
from torch.distributed.device_mesh import init_device_mesh

from megatron_muon.fsdp2 import ExchangeSettings, Muon, MuonAdamW

pytestmark = pytest.mark.ranks


class Setting(NamedTuple):
    """Dtype of messages, precision, adaptive Muon, AdamW beside it, state in CPU memory, rates."""

    comm_dtype: str = "fp32"
    precision: str = "high"
    adaptive: str | None = None
    has_adamw: bool = False
    is_offloaded: bool = False
    cost_model: str = ""


# Whole experts of a rank move only where collectives cost nothing.
PLAIN = (Setting(cost_model="all_reduce_us=0,collective_us=0"), Setting("bf16", "medium"))
ADAPTIVE = (
    *(each._replace(adaptive=method) for method in ("normuon", "adamuon") for each in PLAIN),
    *(Setting(precision=precision, adaptive="namo") for precision in ("high", "medium")),
)
# Whole matrices whose parameters are cut by rows and by columns, and batches of them.
ADAPTIVE_LAYOUTS = ("uneven", "columns", "experts", "expert_rows", "expert_columns")
# Every placement, and Muon's keys of a group; several_meshes has the parameters of hybrid.
LAYOUTS_WITH_ADAMW = {
    3: ("uneven", "columns", "experts", "fused_columns", "tensor_parallel_alone"),
    4: (
        *("tensor_parallel", "hybrid_tensor_parallel", "expert_parallel", "expert_slices"),
        *("several_meshes", "stages"),
    ),
}
ADAMW = {"lr": 0.03, "weight_decay": 0.2, "betas": (0.8, 0.95), "eps": 1e-6}


class Row(NamedTuple):
    build: Callable[[], list[Sharded]]
    settings: Sequence[Setting] = PLAIN
    marks: Sequence[pytest.MarkDecorator] = ()


def _fsdp2_row(name: str, size: int) -> Row:
    settings = PLAIN
    if name in LAYOUTS_WITH_ADAMW.get(size, ()):
        settings = (
            *(Setting(has_adamw=True, is_offloaded=is_offloaded) for is_offloaded in (False, True)),
            *settings,
        )
    # Three ranks have even shards too, and empty ones.
    if size == 3 and name in ADAPTIVE_LAYOUTS and kind() == "cpu":
        settings = (*settings, *ADAPTIVE)
    return Row(FSDP2[size][name], settings, [pytest.mark.slow] if size == 2 else [])


def _megatron_row(layout: str, size: int, *, is_even: bool = False, **options: Any) -> Row:
    marks = [pytest.mark.megatron, *([pytest.mark.slow] if size > 4 else [])]
    return Row(partial(version_1, layout, is_even, **options), PLAIN[:1], marks)


def _table() -> dict[int, dict[str, Row]]:
    table = {
        size: {name: _fsdp2_row(name, size) for name in names} for size, names in FSDP2.items()
    }
    # The pieces of --device cuda have the layouts of sharded models alone.
    for size, layouts in OTHERS.items() if kind() == "cpu" else ():
        table[size].update({name: Row(build) for name, build in layouts.items()})
    # Megatron-FSDP's placements do not say who has what, nor is its
    # update_uneven_dtensor_chunk_metadata() called.
    for size, names in (
        (4, ("one_axis", "hfsdp", "tensor_rows", "tensor_columns")),
        (8, ("hfsdp_tensor_rows", "hfsdp_tensor_columns")),
    ):
        of_size = table.setdefault(size, {})
        for name in names:
            of_size[f"megatron_{name}_even"] = _megatron_row(name, size, is_even=True)
            of_size[f"megatron_{name}_uneven"] = _megatron_row(name, size)
    table[4][COPIES] = _megatron_row("tensor_rows", 4, copies=[2])
    table[4][NO_SHARDS] = _megatron_row("hfsdp", 4, strategy="no_shard")
    return table


COPIES, NO_SHARDS = "megatron_copies", "megatron_no_shards"
TABLE = _table()


def _step(build: Callable[[], list[Sharded]], setting: Setting) -> tuple[Any, list[str]]:
    """Step three times, and return the optimizer, and what differs from whole matrices."""
    parameters = build()
    classes = [type(getattr(x.param, "_local_tensor", x.param)) for x in parameters]
    # This scale tells outputs from inputs.
    settings: dict[str, Any] = {
        "lr": 0.02,
        "momentum": 0.95,
        "weight_decay": 0.1,
        "nesterov": True,
        "scale_mode": "unit_rms_norm",
        "fp32_matmul_prec": setting.precision,
    }
    if setting.adaptive is not None:
        settings["beta2"] = 0.9
    whole = WholeMuon(parameters, setting.comm_dtype, setting.adaptive, **settings)
    # More parts than one owner round differently; test_engine.py has those.
    settings["offload_state"] = setting.is_offloaded
    num_owners = 8 if setting.adaptive in ("normuon", "namo") else 1
    settings["exchange"] = ExchangeSettings(
        comm_dtype=setting.comm_dtype, max_owners=num_owners, cost_model=setting.cost_model
    )
    groups = [{"params": [(f"weight.{i}", x.param)], **x.keys} for i, x in enumerate(parameters)]
    rest, theirs = (build(), build()) if setting.has_adamw else ([], [])
    # Torch steps parameters of one mesh at a time.
    adamw = torch.optim.AdamW([{"params": [x.param]} for x in theirs] or [{"params": []}], **ADAMW)
    if setting.has_adamw:
        of_rest = ({"params": [(f"rest.{i}", x.param)]} for i, x in enumerate(rest))
        groups += [{**group, "algorithm": "adamw", **ADAMW} for group in of_rest]
        optimizer: Any = MuonAdamW(groups, **settings)
    else:
        arguments = parameters[0].arguments if parameters else {}
        optimizer = Muon(groups, adaptive=setting.adaptive, **arguments, **settings)
    for step in range(3):
        drawn_grads = (drawn(x.whole.shape, 1000 * step + i) for i, x in enumerate(parameters))
        grads = [
            grad.to(x.param.dtype).float() for grad, x in zip(drawn_grads, parameters, strict=True)
        ]
        for each, grad in zip(parameters, grads, strict=True):
            each.set_grad(grad)
        for i, pair in enumerate(zip(rest, theirs, strict=True)):
            for each in pair:
                each.draw_grad(1000 * step + 100 + i)
        for stepped in (optimizer, adamw):
            stepped.step()
        whole.step(grads)
    different = differences(parameters, optimizer, whole.wholes())
    assert classes == [type(getattr(x.param, "_local_tensor", x.param)) for x in parameters]
    for each in parameters:
        state = optimizer.state[each.param]
        if setting.adaptive != "namo":
            assert type(state["momentum_buffer"]) is type(each.param.data)
        if "main_param" in state:
            own, main = local(each.param), local(state["main_param"])
            different += ["value in bfloat16"] * (not torch.equal(own, main.bfloat16()))
        # Of a batch it is scaled like each of its matrices.
        assert setting.adaptive != "adamuon" or "moment2_buffer" in state
    for i, (own, other) in enumerate(zip(rest, theirs, strict=True)):
        found = {"value": own.param, **optimizer.state[own.param]}
        expected = {"value": other.param, **adamw.state[other.param]}
        different += [
            f"of AdamW: {i}, {key}"
            for key, value in expected.items()
            if not torch.equal(local(found[key]), local(value))
        ]
    return optimizer, different


def _domains() -> list[list[Any]]:
    """Return for each experts' layout how many ranks exchange how many matrices."""
    found = []
    for each in expert_parallel():
        with mock.patch.dict("os.environ", LOCAL_WORLD_SIZE="2"):
            muon = Muon([{"params": [each.param], **each.keys}])
        (found_input,) = muon.muon.plan_inputs.inputs
        mesh = each.param.device_mesh
        groups = [None, dist.group.WORLD, *(mesh.get_group(axis) for axis in range(mesh.ndim))]
        is_known = any(found_input.domain.group is group for group in groups)
        (plan,) = muon.muon.engine.plans
        assert plan.cost.ranks_per_node == 2
        found.append([len(found_input.domain.ranks), len(found_input.matrices), is_known])
    return found


def _collectives_of_experts() -> dict[str, dict[str, int]]:
    """Return the collectives of a step of six experts on four ranks by cost model."""
    called: dict[str, dict[str, int]] = {}
    for cost_model in {setting.cost_model for setting in PLAIN}:
        experts = shard((6, 8, 5), 0, init_device_mesh(kind(), (4,)))
        exchange = ExchangeSettings("bf16", cost_model=cost_model, num_buckets=1)
        muon = Muon([experts.param], exchange=exchange)
        experts.draw_grad(1)
        muon.step()
        experts.draw_grad(2)
        names = ("all_reduce", "all_to_all_single")
        spies = {name: mock.patch.object(dist, name, wraps=getattr(dist, name)) for name in names}
        with spies[names[0]] as reduces, spies[names[1]] as exchanges:
            muon.step()
        called[cost_model] = {
            "all_reduce": reduces.call_count,
            "all_to_all_single": exchanges.call_count,
        }
    return called


def _step_row(size: int, name: str) -> dict[str, Any]:
    """Return differences from whole matrices; holders and owners."""
    row, different = TABLE[size][name], []
    for setting in row.settings:
        muon, of_setting = _step(row.build, setting)
        different += [f"{setting}: {each}" for each in of_setting]
    plans = muon.muon.engine.plans
    return {
        "different": different,
        "holders": {x.name: sorted(x.elements_by_rank) for plan in plans for x in plan.matrices},
        "owners": [list(ranks) for plan in plans for ranks in plan.owners],
    }


def _cases(is_slow: bool) -> dict[int, dict[str, Any]]:
    """Return the rows of the fast run, or those of the whole suite alone."""
    return {
        size: {
            name: partial(_step_row, size, name)
            for name, row in rows.items()
            if (pytest.mark.slow in row.marks) == is_slow
            and (has_megatron() or pytest.mark.megatron not in row.marks)
        }
        for size, rows in TABLE.items()
    }


FAST = _cases(is_slow=False)
FAST[4]["domains"] = _domains
FAST[4]["collectives"] = _collectives_of_experts
results = {False: cached_cases(FAST), True: cached_cases(_cases(is_slow=True))}


def found_by_rank(size: int, name: str) -> list[dict[str, Any]]:
    return results[pytest.mark.slow in TABLE[size][name].marks](size)[name]


@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=row.marks)
        for size, rows in TABLE.items()
        for name, row in rows.items()
    ],
)
def test_step_is_that_of_whole_matrices(size, name):
    """Parameters and momentum have the bits of whole matrices, and of AdamW beside them."""
    for rank, found in enumerate(found_by_rank(size, name)):
        assert found["different"] == [], f"rank {rank}"


@pytest.mark.cpu_only
def test_replicas_orthogonalize_each_matrix_once():
    """Each plain tensor on replicas has one owner."""
    for found in found_by_rank(4, "plain_replicas_of_blocks"):
        assert [len(ranks) for ranks in found["owners"]] == [1] * 6


@pytest.mark.megatron
def test_tensor_parallel_replicas_are_orthogonalized_once():
    """Copies on tensor-parallel ranks are one matrix of one plan, and cannot drift apart."""
    holders = [found["holders"]["weight.2"] for found in found_by_rank(4, COPIES)]
    of_copies = {rank for ranks in holders for rank in ranks}
    # Those of the other tensor-parallel rank too.
    assert all(set(ranks) == of_copies for ranks in holders)
    assert {rank % 2 for rank in of_copies} == {0, 1}


@pytest.mark.megatron
def test_instances_without_shards_are_replicas():
    """Every rank holds all rows under ZeRO-0 with two instances of the optimizer."""
    for found in found_by_rank(4, NO_SHARDS):
        assert all(ranks == [0, 1, 2, 3] for ranks in found["holders"].values())


def test_axes_that_deal_out_whole_matrices_need_no_exchange():
    """Axes that assign whole experts join no domain, and existing groups are used again."""
    expected = [
        [1, 2, True],  # two of eight experts on each rank
        [2, 3, True],  # three of six on two ranks
        [2, 2, True],  # two of four, whose rows two ranks share
        [2, 1, True],  # one of two on two ranks
        [4, 4, True],  # fused weights are no batch
        [4, 2, True],
    ]
    assert results[False](4)["domains"] == [expected] * 4


def test_ranks_wait_for_nobody_where_whole_experts_stay():
    """A step reduces its flag alone; where it pays to balance, norms are reduced, and rows move."""
    stay, move = (setting.cost_model for setting in reversed(PLAIN))
    expected = {
        stay: {"all_reduce": 1, "all_to_all_single": 0},
        move: {"all_reduce": 2, "all_to_all_single": 2},
    }
    assert results[False](4)["collectives"] == [expected] * 4
