# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Collectives of a step, compared with docs/communication.md, and their number at construction."""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_ranks
from helpers.toy_fsdp import build_model, build_optimizer, run_backward

pytestmark = pytest.mark.ranks

NAMES = (
    *("all_reduce", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"),
    *("all_gather", "reduce_scatter", "broadcast", "barrier", "all_gather_object", "new_group"),
)


@contextmanager
def _logged(log: list[list[Any]]) -> Iterator[None]:
    """Note each collective: its name, the dtype and elements it is given, the size of its group."""

    def noting(name: str, original: Any) -> Any:
        """Wrap one collective."""

        def call(*args: Any, **kwargs: Any) -> Any:
            """Note the call, and make it."""
            tensors = [each for each in args[:2] if isinstance(each, torch.Tensor)]
            sent = tensors[-1] if tensors else None
            group = kwargs.get("group")
            entry = [name, "", 0, dist.get_world_size(group) if name != "new_group" else 0]
            if sent is not None:
                entry[1:3] = [str(sent.dtype).removeprefix("torch."), sent.numel()]
            log.append(entry)
            return original(*args, **kwargs)

        return call

    originals = {name: getattr(dist, name) for name in NAMES}
    for name, original in originals.items():
        setattr(dist, name, noting(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


HSDP = {"num_distributed_optimizer_instances": 2}
# Strategy and settings, number of ranks that the norm is summed over, and of replicas, by size of
# the world.
LAYOUTS: dict[int, list[tuple[str, dict[str, Any], int, int]]] = {
    2: [("optim_grads_params", {}, 2, 0), ("no_shard", {}, 1, 2)],
    4: [("optim_grads_params", HSDP, 2, 2)],
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
    return [construction, log, len(plan.buckets), plan.num_scatters, num_blocks]


def _trace_all(world_size: int) -> list[Any]:
    return [_trace(sharding, settings) for sharding, settings, *_ in LAYOUTS[world_size]]


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_collectives_are_those_of_the_document(world_size):
    """One more in a step, or another group, is a change that docs/communication.md must say."""
    run = run_ranks(world_size, _trace_all, world_size).check()
    for layout, trace in itertools.product(range(len(LAYOUTS[world_size])), run.results):
        sharding, _, num_norm_ranks, num_replicas = LAYOUTS[world_size][layout]
        construction, step, num_buckets, num_scatters, num_blocks = trace[layout]
        assert num_buckets > 0
        num_gathers = 0 if sharding == "no_shard" else num_buckets
        messages = [["all_to_all_single", "bfloat16", world_size]]
        spread = [["all_gather_into_tensor", "bfloat16", num_replicas]] if num_replicas else []
        count = num_gathers + num_buckets * num_scatters * (1 + len(spread))
        assert step[:3] == [
            ["all_reduce", "float32", 1, num_norm_ranks],
            # NaN where the norm is not finite.
            ["all_reduce", "float32", 1, world_size],
            ["all_reduce", "float64", num_blocks, world_size],
        ]
        exchange = [[name, dtype, ranks] for name, dtype, _, ranks in step[3 : 3 + count]]
        assert sorted(exchange) == sorted(
            messages * num_gathers + (messages + spread) * num_buckets * num_scatters
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
