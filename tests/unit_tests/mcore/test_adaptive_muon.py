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


def _shards_that_start_within_a_query_group() -> list[str]:
    # The second has rows of key, value and query, in this order.
    settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "beta2": 0.9, "nesterov": True}
    return [
        each
        for name in ("normuon", "namo")
        for each in differences_by_block(
            _build(name, num_shards=3, cases=[(24, [9, 11, 12])]), "fp32", name, **settings
        )
    ]


def _moments(method: str, mode: str) -> dict[str, list[int]]:
    """Return the shapes of the second moments that a rank keeps, by parameter and key."""
    built = _build(method, settings={"tp_mode": mode}, cases=MATRICES, num_tensor_ranks=2)
    return {
        f"{part.name}.{key}": list(value.shape)
        for param, _, part in built.params
        for key, value in built.sharded.state[param].items()
        if "moment2_" in key
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
    for method in ("muon", "normuon"):
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


def _refused_with_namo() -> list[str]:
    """Return the errors of settings that owners of whole matrices do not have."""
    errors = []
    for options, exchange in (
        ({"momentum_dtype": torch.bfloat16}, {}),
        ({}, {"comm_dtype": "bf16"}),
        ({}, {"newton_schulz": "gram"}),
    ):
        with pytest.raises(ValueError, match="with namo") as error:
            _build("namo", settings=options, exchange=exchange)
        errors.append(str(error.value).partition(" with namo")[0])
    return errors


def _offloaded_between_steps() -> list[str]:
    """Step with the second moments of the state replaced by copies, and list what differs."""
    found: dict[bool, list[Any]] = {False: [], True: []}
    for method, is_offloaded in itertools.product(("normuon", "namo"), found):
        built = _build(method, cases=MATRICES)
        states = [built.sharded.state[param] for param, *_ in built.params]
        for step in range(3):
            built.set_gradients(step)
            built.sharded.step()
            for state in states if is_offloaded else ():
                for key in [key for key in state if "moment2_" in key]:
                    before, state[key] = state[key], state[key].clone()
                    before.fill_(float("nan"))
        moments = [(key, state[key]) for state in states for key in state if "moment2_" in key]
        found[is_offloaded] += [
            *moments,
            *((part.name, param._local_tensor) for param, _, part in built.params),
        ]
    return [
        str(name)
        for (name, a), (_, b) in zip(*found.values(), strict=True)
        if not torch.equal(a, b)
    ]


results = cached_cases(
    {
        2: {
            "calls": _calls_of_many_blocks,
            "offload": _offloaded_between_steps,
            "refused": _refused_with_namo,
        },
        3: {"order": _shards_that_start_within_a_query_group},
        4: {
            "joined": functools.partial(_moments, "normuon", "duplicated"),
            "apart": functools.partial(_moments, "normuon", "blockwise"),
            "namo": functools.partial(_moments, "namo", "duplicated"),
        },
    }
)


@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        # A shard that starts with the key of a query group has the same bits.
        (3, "order"),
        # Trainers that offload states between steps replace tensors: moments went stale.
        (2, "offload"),
    ],
)
def test_second_moments_are_upstreams(world_size, name):
    """Second moments are upstream's for any order of rows, and after tensors were replaced."""
    assert results(world_size)[name] == [[]] * world_size


def test_a_block_costs_less_than_one_call():
    """Second moments of a block take less than half a call, and no collective."""
    for found in results(2)["calls"]:
        for num_blocks, calls in found.values():
            assert calls.get("allreduce_", 0) == 0
            assert sum(calls.values()) <= 0.5 * num_blocks, calls


def test_state_of_a_block_has_one_owner_and_one_name():
    """Each block has one state, named by its tensor-parallel rank where this rank has it alone."""
    joined, apart, namo = (
        [pair for found in results(4)[name] for pair in found.items()]
        for name in ("joined", "apart", "namo")
    )
    for pairs in (joined, apart, namo):
        assert len(dict(pairs)) == len(pairs)
    assert dict(joined)["layer.1.weight.moment2_of_owner"] == [1, 96]
    assert dict(joined)["layer.5.weight.block 1.moment2_of_owner"] == [1, 24]
    for rank in (0, 1):
        name = f"layer.1.weight.tensor rank {rank} of 2.moment2_of_owner"
        assert dict(apart)[name] == [1, 48]
    # Replicated by tensor parallelism: one owner.
    assert dict(apart)["layer.2.weight.moment2_of_owner"] == [32, 1]
    assert {key: shape for key, shape in namo if "layer.5" in key} == {
        f"layer.5.weight.block {block}.moment2_buffer": [1] for block in range(3)
    }


def test_settings_of_shards_are_refused_with_namo():
    """Settings that owners of whole matrices would ignore are refused by flag."""
    for errors in results(2)["refused"]:
        assert errors == [
            "--exp-avg-dtype: expected torch.float32",
            "--muon-fsdp-comm-dtype: expected auto or fp32",
            "--muon-fsdp-newton-schulz: expected standard",
        ]
