# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon on every layout, against emerging-optimizers' Muon on whole matrices: one table.

Layouts of FSDP2, plain tensors of DDP and of tensor parallelism, and Megatron-FSDP's version 1,
which no Megatron trains here.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
from helpers import fsdp2_models as models
from helpers.device import has_megatron, init_group, kind
from helpers.fsdp2_models import CASES, Sharded
from helpers.megatron_fsdp import version_1
from helpers.ranks import Run, run_ranks

pytestmark = pytest.mark.ranks


class Setting(NamedTuple):
    """Dtype of messages, precision of Newton-Schulz, and method of adaptive Muon."""

    comm_dtype: str
    precision: str
    adaptive: str | None = None


PLAIN = (Setting("fp32", "high"), Setting("bf16", "medium"))
ADAPTIVE = tuple(
    setting._replace(adaptive=method)
    for method in ("normuon", "namo", "adamuon")
    for setting in PLAIN
)
# Whole matrices whose parameters are cut by rows and by columns, and batches of them.
ADAPTIVE_LAYOUTS = ("uneven", "columns", "experts", "expert_rows", "expert_columns")


class Row(NamedTuple):
    """A layout on so many ranks.

    Args:
        build: Makes the parameters.
        settings: With which they are stepped.
        marks: Marks of the test.
    """

    build: Callable[[], list[Sharded]]
    settings: Sequence[Setting] = PLAIN
    marks: Sequence[pytest.MarkDecorator] = ()


def _fsdp2_row(build: Callable[[], list[Sharded]], size: int) -> Row:
    """Return a layout of FSDP2; whole matrices and batches are for methods of adaptive Muon too."""
    is_adaptive = size < 4 and build.__name__ in ADAPTIVE_LAYOUTS and kind() == "cpu"
    settings = (*PLAIN, *ADAPTIVE) if is_adaptive else PLAIN
    return Row(build, settings, [pytest.mark.slow] if size == 2 else [])


def _megatron_row(layout: str, size: int, *, is_even: bool = False, **options: Any) -> Row:
    marks = [pytest.mark.megatron, *([pytest.mark.slow] if size > 4 else [])]
    return Row(partial(version_1, layout, is_even, **options), PLAIN[:1], marks)


def _table() -> dict[int, dict[str, Row]]:
    """Return the layouts by number of ranks and name."""
    table = {
        size: {case.__name__: _fsdp2_row(case, size) for case in cases}
        for size, cases in CASES.items()
    }
    # The pieces of --device cuda have the layouts of sharded models alone.
    if kind() == "cpu":
        for size, build in (
            (2, models.plain_replicas),
            (2, models.plain_blocks),
            (3, models.convolutions),
            (4, models.plain_replicas_of_blocks),
        ):
            table[size][build.__name__] = Row(build)
    # Megatron-FSDP's placements do not say who has what, nor is its
    # update_uneven_dtensor_chunk_metadata() called.
    for size, layouts in (
        (4, ("one_axis", "hfsdp", "tensor_rows", "tensor_columns")),
        (8, ("hfsdp_tensor_rows", "hfsdp_tensor_columns")),
    ):
        table.setdefault(size, {}).update(
            {
                f"megatron_{layout}_{rows}": _megatron_row(layout, size, is_even=rows == "even")
                for layout in layouts
                for rows in ("even", "uneven")
            }
        )
    table[4][COPIES] = _megatron_row("tensor_rows", 4, copies=[2])
    table[4][NO_SHARDS] = _megatron_row("hfsdp", 4, strategy="no_shard")
    return table


COPIES, NO_SHARDS = "megatron_copies", "megatron_no_shards"
TABLE = _table()


def _step(parameters: Sequence[Sharded], setting: Setting) -> tuple[Any, list[str]]:
    """Step three times, and return the optimizer, and what differs from whole matrices."""
    from helpers.whole_matrices import WholeMuon, differences

    from megatron_muon.fsdp2 import ExchangeSettings, Muon

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
    # More parts than one owner round differently; test_engine.py has those.
    num_owners = 8 if setting.adaptive in ("normuon", "namo") else 1
    groups = [{"params": [(f"weight.{i}", x.param)], **x.keys} for i, x in enumerate(parameters)]
    muon = Muon(
        groups,
        exchange=ExchangeSettings(comm_dtype=setting.comm_dtype, max_owners=num_owners),
        adaptive=setting.adaptive,
        **(parameters[0].arguments if parameters else {}),
        **settings,
    )
    whole = WholeMuon(parameters, setting.comm_dtype, setting.adaptive, **settings)
    for step in range(3):
        grads = [models.drawn(x.whole.shape, 1000 * step + i) for i, x in enumerate(parameters)]
        for each, grad in zip(parameters, grads, strict=True):
            each.set_grad(grad)
        muon.step()
        whole.step(grads)
    for each in parameters:
        state = muon.state[each.param]
        assert type(state["momentum_buffer"]) is type(each.param.data)
        # Of a batch it is scaled like each of its matrices.
        assert setting.adaptive != "adamuon" or "moment2_buffer" in state
    return muon, differences(parameters, muon, whole.wholes())


def _step_rows(size: int, names: Sequence[str]) -> dict[str, list[Any]]:
    """Return by row what differs, and the holders and owners of each matrix."""
    init_group()
    found: dict[str, list[Any]] = {}
    for name in names:
        row, different = TABLE[size][name], []
        for setting in row.settings:
            muon, of_setting = _step(row.build(), setting)
            different += [f"{setting}: {each}" for each in of_setting]
        plans = muon.engine.plans
        holders = {x.name: sorted(x.elements_by_rank) for plan in plans for x in plan.matrices}
        owners = [list(ranks) for plan in plans for ranks in plan.owners]
        found[name] = [different, holders, owners]
    return found


@functools.cache
def run_of(size: int, is_slow: bool) -> Run:
    """Step the rows of one world of ranks."""
    names = [
        name
        for name, row in TABLE[size].items()
        if (pytest.mark.slow in row.marks) == is_slow
        and (has_megatron() or pytest.mark.megatron not in row.marks)
    ]
    return run_ranks(size, _step_rows, size, names)


def steps(size: int, is_slow: bool = False) -> list[dict[str, list[Any]]]:
    """Return what the ranks of one world found."""
    return run_of(size, is_slow).check().results


@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=row.marks)
        for size, rows in TABLE.items()
        for name, row in rows.items()
    ],
)
def test_step_is_that_of_whole_matrices(size, name):
    """Equal bits of parameters and momentum, for both dtypes of messages and both precisions."""
    for rank, found in enumerate(steps(size, pytest.mark.slow in TABLE[size][name].marks)):
        assert found[name][0] == [], f"rank {rank}"


@pytest.mark.cpu_only
def test_replicas_orthogonalize_each_matrix_once():
    """Of plain tensors each matrix has one owner."""
    for found in steps(4):
        owners = found["plain_replicas_of_blocks"][2]
        assert len(owners) == 6 and all(len(ranks) == 1 for ranks in owners)


@pytest.mark.megatron
def test_tensor_parallel_replicas_are_orthogonalized_once():
    """Each tensor-parallel rank planned its copy alone: on a GPU copies could drift apart.

    Version 1 leaves tensor parallelism out of the mesh of such a parameter.
    """
    holders = [found[COPIES][1]["weight.2"] for found in steps(4)]
    of_copies = {rank for ranks in holders for rank in ranks}
    # Those of the other tensor-parallel rank too.
    assert all(set(ranks) == of_copies for ranks in holders)
    assert {rank % 2 for rank in of_copies} == {0, 1}


@pytest.mark.megatron
def test_instances_without_shards_are_replicas():
    """ZeRO-0 with two instances of the optimizer: every rank holds all rows."""
    for found in steps(4):
        assert all(ranks == [0, 1, 2, 3] for ranks in found[NO_SHARDS][1].values())


def _domains() -> list[list[Any]]:
    """Return for each experts' layout how many ranks exchange how many matrices."""
    import os

    import torch.distributed as dist

    from megatron_muon.fsdp2 import Muon

    init_group()
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found = []
    for each in models.expert_parallel():
        muon = Muon([{"params": [each.param], **each.keys}])
        (found_input,) = muon.muon_step.plan_inputs.inputs
        mesh = each.param.device_mesh
        groups = [None, dist.group.WORLD, *(mesh.get_group(axis) for axis in range(mesh.ndim))]
        is_known = any(found_input.domain.group is group for group in groups)
        (plan,) = muon.engine.plans
        assert plan.cost.ranks_per_node == 2
        found.append([len(found_input.domain.ranks), len(found_input.matrices), is_known])
    return found


def test_axes_that_deal_out_whole_matrices_need_no_exchange():
    """Plans stay small where experts are many, and no group is made that is there already."""
    expected = [
        [1, 2, True],  # two of eight experts on each rank
        [2, 3, True],  # three of six on two ranks
        [2, 2, True],  # two of four, whose rows two ranks share
        [2, 1, True],  # one of two on two ranks
        [4, 4, True],  # fused weights are no batch
        [4, 2, True],
    ]
    assert run_ranks(4, _domains).check().results == [expected] * 4
