# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Second moments of adaptive Muon: names, calls, and rounding; test_muon.py has their bits."""

import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.ranks import cached_cases
from helpers.sharded_muon import build_optimizers, differences_by_block
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.ranks

# Tall, wide and square; query, key and value last.
MATRICES = [
    *((24, [31, 17]), (48, [24, 0]), (32, [1, 31])),
    *((48, [4, 4]), (16, [40, 8]), (24, [7, 25])),
]


def _build(method: str | None, **options: Any) -> Any:
    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon

    sharded = functools.partial(FSDPZeROTensorParallelMuon, moment2_method=method, beta2=0.9)
    return build_optimizers(**{"num_shards": 2, "sharded": sharded, **options})


def _by_block(method: str, sums_in_float64: bool, **options: Any) -> list[str]:
    settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "beta2": 0.9, "nesterov": True}
    return differences_by_block(
        _build(method, **options), "fp32", method, sums_in_float64=sums_in_float64, **settings
    )


def _shards_that_start_within_a_query_group() -> list[str]:
    # The second has rows of key, value and query, in this order.
    options = {"num_shards": 3, "cases": [(24, [9, 11, 12])]}
    return [each for name in ("normuon", "namo") for each in _by_block(name, True, **options)]


def _state_shapes(method: str, mode: str) -> dict[str, list[int]]:
    """Return the shapes of the state that a method adds, by parameter and key."""
    built = _build(method, settings={"tp_mode": mode}, cases=MATRICES, num_tensor_ranks=2)
    return {
        f"{part.name}.{key}": list(value.shape)
        for param, _, part in built.params
        for key, value in built.sharded.state[param].items()
        if key != "momentum_buffer"
    }


def _calls_of_many_blocks(num_layers: int = 24) -> dict[str, tuple[int, dict[str, int]]]:
    """Return by method the number of blocks, and the calls of a step that Muon's does not make."""

    class Counted(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            self.calls[func.overloadpacket.__name__] += not func.is_view
            return func(*args, **(kwargs or {}))

    # Tall and wide experts, of which a rank holds half or less; query, key and value that one rank
    # holds, and that both do.
    layer = [*((8, [12, 0]), (8, [0, 12])) * 3, *((12, [0, 8]), (12, [8, 0]), (12, [0, 8])) * 2]
    cases = [*layer * num_layers, (8, [0, 32]), *[(8, [7, 25])] * num_layers]
    blocks = [[sum(rows)] for _, rows in layer] * num_layers + [[8, 4, 4]] * (num_layers + 1)
    found = {}
    for method in ("muon", "normuon", "namo"):
        built = _build(
            None if method == "muon" else method,
            cases=cases,
            blocks=blocks,
            # As on a GPU: CPU ranks stack nothing.
            exchange={"cost_model": "stack_tiles=32"},
        )
        built.set_gradients(0)
        built.sharded.step()
        built.set_gradients(1)
        with Counted() as counted:
            built.sharded.step()
        found[method] = counted.calls
    of_muon = found.pop("muon")
    return {
        # A method may also make fewer calls than Muon, as it moves other dtypes.
        method: (sum(map(len, blocks)), calls - of_muon)
        for method, calls in found.items()
    }


def _offloaded_between_steps() -> list[str]:
    """Step with the second moments of the state replaced by copies, and list what differs."""
    found: dict[bool, list[Any]] = {False: [], True: []}
    for method, is_offloaded in itertools.product(("normuon", "namo"), found):
        built = _build(method, cases=MATRICES)
        states = [built.sharded.state[param] for param, *_ in built.params]
        for step in range(3):
            built.set_gradients(step)
            built.sharded.step()
            built.sharded.muon_step.publish_moments()
            for state in states if is_offloaded else ():
                for key in [key for key in state if key.startswith("moment2_")]:
                    before, state[key] = state[key], state[key].clone()
                    before.fill_(float("nan"))
        moments = [
            (key, getattr(state[key], "_local_tensor", state[key]))
            for state in states
            for key in state
            if "2_" in key
        ]
        found[is_offloaded] += [*moments, *enumerate(value for value, _ in built.state())]
    return [
        str(name)
        for (name, a), (_, b) in zip(*found.values(), strict=True)
        if not torch.equal(a, b)
    ]


results = cached_cases(
    {
        2: {
            "calls": _calls_of_many_blocks,
            "sums": functools.partial(_by_block, "namo", False, cases=MATRICES),
            "offload": _offloaded_between_steps,
        },
        3: {"order": _shards_that_start_within_a_query_group},
        4: {
            "joined": functools.partial(_state_shapes, "normuon", "duplicated"),
            "apart": functools.partial(_state_shapes, "normuon", "blockwise"),
            "namo": functools.partial(_state_shapes, "namo", "duplicated"),
        },
    }
)


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        # A shard that starts with the key of a query group has the same bits.
        (3, "order"),
        # Beside emerging-optimizers as it is, whose sums are in float32.
        (2, "sums"),
        # Trainers that offload states between steps replace tensors: moments went stale.
        (2, "offload"),
    ],
)
def test_second_moments_are_upstreams(world_size, name):
    """Second moments are upstream's for any order of rows, and after tensors were replaced."""
    assert results(world_size)[name] == [[]] * world_size


def test_a_block_costs_less_than_one_call():
    """Second moments of a block take less than half a call, and one all-reduce for normuon."""
    for found in results(2)["calls"]:
        for method, (num_blocks, calls) in found.items():
            assert calls.get("allreduce_", 0) == (method == "normuon")
            assert sum(calls.values()) <= 0.5 * num_blocks, calls


def test_state_of_a_whole_block_has_one_name_on_its_ranks():
    """State of a joined block has one name on all ranks, and of blocks apart one by rank."""
    joined, apart, namo = (results(4)[name] for name in ("joined", "apart", "namo"))
    assert joined[0] == joined[1] == joined[2] == joined[3]
    assert joined[0]["layer.1.weight.moment2_cols"] == [1, 96]
    assert joined[0]["layer.5.weight.moment2_cols"] == [2, 24]
    assert apart[0]["layer.1.weight.moment2_cols_tensor_rank_0_of_2"] == [1, 48]
    assert apart[1]["layer.1.weight.moment2_cols_tensor_rank_1_of_2"] == [1, 48]
    # Replicated by tensor parallelism: equal on both.
    assert apart[0]["layer.2.weight.moment2_rows"] == [32, 1]
    assert {key: shape for key, shape in namo[0].items() if "layer.5" in key} == {
        "layer.5.weight.moment2_buffer": [3]
    }
    assert "layer.1.weight.moment2_rows" not in joined[0]
