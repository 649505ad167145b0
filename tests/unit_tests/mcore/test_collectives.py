# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Collectives of a step, compared with docs/communication.md, and their number at construction."""

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import cached_cases
from helpers.toy_fsdp import build_model, build_optimizer, run_backward

pytestmark = pytest.mark.ranks

NAMES = (
    *("all_reduce", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"),
    *("all_gather", "reduce_scatter", "broadcast", "barrier", "all_gather_object", "new_group"),
)


@contextmanager
def _logged(log: list[list[Any]]) -> Iterator[None]:
    """Note each collective: its name, the dtype and elements it is given, the size of its group."""

    def note(name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        num_ranks = dist.get_world_size(kwargs.get("group")) if name != "new_group" else 0
        entry = [name, "", 0, num_ranks]
        tensors = [each for each in args[:2] if isinstance(each, torch.Tensor)]
        if tensors:
            entry[1:3] = [str(tensors[-1].dtype).removeprefix("torch."), tensors[-1].numel()]
        log.append(entry)
        return original(*args, **kwargs)

    with ExitStack() as stack:
        for name in NAMES:
            noted = functools.partial(note, name, getattr(dist, name))
            stack.enter_context(mock.patch.object(dist, name, noted))
        yield


HSDP = {"num_distributed_optimizer_instances": 2}
# World, strategy and settings; ranks that the norm is summed over, and replicas.
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], int, int]] = {
    "zero3": (2, "optim_grads_params", {}, 2, 0),
    "zero0": (2, "no_shard", {}, 1, 2),
    "hsdp": (4, "optim_grads_params", HSDP, 2, 2),
}


def _trace(sharding: str, settings: dict[str, Any]) -> list[Any]:
    """Log construction, and the second step."""
    model = build_model(sharding, **settings)
    construction: list[list[Any]] = []
    with _logged(construction):
        optimizer = build_optimizer(model)
    log: list[list[Any]] = []
    for step in range(2):
        optimizer.zero_grad()
        run_backward(model)
        model.finish_grad_sync()
        with _logged(log if step == 1 else []):
            optimizer.step()
    (plan,) = optimizer.muon_step.engine.plans
    num_blocks = sum(len(matrix.blocks) for matrix in plan.matrices)
    return [construction, log, len(plan.buckets), num_blocks]


traces = cached_cases(
    {
        world_size: {
            name: functools.partial(_trace, sharding, settings)
            for name, (size, sharding, settings, _, _) in LAYOUTS.items()
            if size == world_size
        }
        for world_size in (2, 4)
    }
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_are_those_of_the_document(layout):
    """The collectives of a step are those of docs/communication.md."""
    world_size, sharding, _, num_norm_ranks, num_replicas = LAYOUTS[layout]
    for construction, step, num_buckets, num_blocks in traces(world_size)[layout]:
        assert num_buckets > 0
        num_gathers = 0 if sharding == "no_shard" else num_buckets
        messages = [["all_to_all_single", "bfloat16", world_size]]
        spread = [["all_gather_into_tensor", "bfloat16", num_replicas]] if num_replicas else []
        count = num_gathers + num_buckets * (1 + len(spread))
        assert step[:3] == [
            ["all_reduce", "int32", 1, world_size],
            ["all_reduce", "float32", 1, num_norm_ranks],
            ["all_reduce", "float64", num_blocks, world_size],
        ]
        exchange = [[name, dtype, ranks] for name, dtype, _, ranks in step[3 : 3 + count]]
        assert sorted(exchange) == sorted(
            messages * num_gathers + (messages + spread) * num_buckets
        )
        # Megatron-FSDP's, of weights.
        assert {entry[0] for entry in step[3 + count :]} <= {"all_gather_into_tensor"}
        # One element for every rank that rows go to, and results; under ZeRO-0 no rows travel.
        connect = [entry for entry in construction if entry[0] == "all_to_all_single"]
        assert len(connect) == (num_gathers > 0) + (num_buckets > 0)
        assert all(num_elements < world_size for _, _, num_elements, _ in connect)
        # All else is flags, hashes, and tables of groups and loads. Replicas connect too.
        assert Counter(name for name, *_ in construction) == Counter(
            all_reduce=7,
            all_gather_object=4,
            all_gather_into_tensor=3 + (num_replicas > 0),
            all_to_all_single=len(connect),
        )
        flags = [entry[1:] for entry in construction if entry[0] == "all_reduce"]
        assert flags == [["int32", 1, world_size]] * 7
