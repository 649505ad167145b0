# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Adaptive Muon on hand-made row shards, against upstream's classes on whole matrices.

adamuon is that of Megatron-LM main, whose class is 0.19.2's with two attributes: without them it
fails in its first step. normuon and namo are those of emerging-optimizers, for each block as a
parameter of its own. Norms that ranks add up, those of namo, are summed in float64: the reference
does too, and one test compares with theirs as it is. Theirs of normuon is as it is.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.device import device
from helpers.ranks import cached_cases, run_ranks
from helpers.sharded_muon import build_optimizers, init_group, step_both, whole_matrix
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.ranks

# A long, a wide and a square matrix; with two shards a wide and a long one more, which tensor
# parallelism cuts in rows and in columns; query, key and value, of which the last two are wide.
CASES = {
    2: [
        *((24, [31, 17]), (48, [24, 0]), (32, [1, 31])),
        *((48, [4, 4]), (16, [40, 8]), (24, [7, 25])),
    ],
    3: [(24, [0, 47, 1]), (48, [8, 8, 8]), (32, [0, 0, 32]), (24, [0, 9, 23])],
}
# By number of ranks: ranks that rows are sharded over, and what shares the work besides.
GRIDS: dict[int, list[tuple[int, dict[str, int]]]] = {
    2: [(2, {}), (1, {"num_replicas": 2})],
    3: [(3, {})],
    4: [(2, {"num_replicas": 2}), (2, {"num_tensor_ranks": 2})],
}


def _adaptive(method: str, **options: Any) -> Any:
    """Return what builds ours with a method."""
    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon

    return functools.partial(FSDPZeROTensorParallelMuon, moment2_method=method, **options)


def _step_adamuon(
    num_shards: int, grid: dict[str, int], comm_dtype: str, settings: dict[str, Any] | None = None
) -> list[str]:
    from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon

    class Whole(TensorParallelAdaptiveMuon):
        """As on Megatron-LM main at d98e8a64."""

        def __init__(self, params: Any, **kwargs: Any) -> None:
            super().__init__(params, **kwargs)
            self.scale_mode = kwargs["scale_mode"]
            self.extra_scale_factor = kwargs["extra_scale_factor"]

    built = build_optimizers(
        num_shards,
        {"scale_mode": "spectral", "extra_scale_factor": 0.2, "beta2": 0.9, **(settings or {})},
        {"comm_dtype": comm_dtype},
        sharded=_adaptive("adamuon"),
        whole=Whole,
        **grid,
    )
    step_both(built, comm_dtype)
    different = built.differences()
    for param, reference, part in built.params:
        found = built.sharded.state[param]["moment2_buffer"]._local_tensor
        expected = built.whole.state[reference]["moment2_buffer"][slice(*part.own_box[0])]
        if not torch.equal(found, expected):
            different.append(f"{part.name}: second moment")
    return different


@contextmanager
def _float64_sums(method: str, comm_dtype: str) -> Iterator[None]:
    """Let emerging-optimizers sum norms of rows in float64, where ranks add them up."""
    from helpers.whole_matrices import float64_normalize

    original = torch.linalg.vector_norm

    def vector_norm(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(tensor, *args, **kwargs)
        return tensor.double().square().sum().sqrt().float()

    with ExitStack() as stack:
        if method == "namo":
            stack.enter_context(mock.patch("torch.linalg.vector_norm", vector_norm))
        if comm_dtype == "bf16":
            stack.enter_context(mock.patch("torch.nn.functional.normalize", float64_normalize))
        yield


def _block_indices(built: Any, index: int) -> list[Any]:
    """Return for each block of a matrix its elements in the matrices of all tensor-parallel ranks.

    Blocks are joined over these ranks where Newton-Schulz joins them.
    """
    from megatron_muon.plan.layout import block_rows

    param, reference, _ = built.params[index]
    tensor, dim = built.sharded.pg_collection.tp, max(param.partition_dim, 0)
    elements = torch.arange(tensor.size() * reference.numel(), device=device())
    elements = elements.view(-1, *reference.shape)
    ranks = range(tensor.size()) if built.sharded.is_joined(param) else [tensor.rank()]
    return [
        torch.cat([torch.cat([elements[r, x.start : x.stop] for x in rows]) for r in ranks], dim)
        for rows in block_rows(len(reference), built.sharded.planned(param).blocks)
    ]


def _draw(built: Any, index: int, seed: int) -> Any:
    """Draw the elements of a matrix of all tensor-parallel ranks."""
    param, reference, _ = built.params[index]
    ranks = range(built.sharded.pg_collection.tp.size())
    is_cut = param.partition_dim >= 0
    return torch.stack([whole_matrix(reference.shape, seed, r * is_cut) for r in ranks]).flatten()


def _step_by_block(
    method: str,
    num_shards: int,
    grid: dict[str, int],
    comm_dtype: str = "fp32",
    settings: dict[str, Any] | None = None,
    *,
    is_exact: bool = True,
) -> list[float]:
    """Step ours, and each block as a parameter of emerging-optimizers; return differences."""
    from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon

    settings = {"nesterov": True, "extra_scale_factor": 0.2, **(settings or {})}
    built = build_optimizers(
        num_shards,
        settings,
        {"comm_dtype": comm_dtype},
        sharded=_adaptive(method, beta2=0.9),
        cases=CASES.get(num_shards, [(24, [48]), (48, [24]), (32, [32]), (24, [32])]),
        **grid,
    )
    settings.pop("tp_mode", None)
    indices = [_block_indices(built, i) for i in range(len(built.params))]
    blocks = [
        [torch.nn.Parameter(_draw(built, i, i)[elements]) for elements in of_param]
        for i, of_param in enumerate(indices)
    ]
    options = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "beta2": 0.9, **settings}
    reference = AdaptiveMuon(itertools.chain(*blocks), moment2_method=method, **options)
    for step in range(3):
        built.set_gradients(step)
        built.sharded.step()
        for i, of_param in enumerate(indices):
            grad = _draw(built, i, 1000 * step + i)
            for block, elements in zip(blocks[i], of_param, strict=True):
                block.grad = grad[elements]
        with _float64_sums(method, comm_dtype) if is_exact else ExitStack():
            reference.step()
    differences = []
    for i, (param, whole, part) in enumerate(built.params):
        expected = torch.empty_like(_draw(built, i, 0))
        for block, elements in zip(blocks[i], indices[i], strict=True):
            expected[elements] = block.detach()
        rows = expected.view(-1, *whole.shape)[built.tensor_rank, slice(*part.own_box[0])]
        differences.append((param._local_tensor - rows).abs().sum().item())
    return differences


def _step_all(world_size: int) -> list[str]:
    """Step each method on each grid and comm_dtype, and list what differs."""
    init_group()
    different = []
    for (num_shards, grid), comm_dtype in itertools.product(GRIDS[world_size], ("fp32", "bf16")):
        found = _step_adamuon(num_shards, grid, comm_dtype)
        different += [f"adamuon, {grid}, {comm_dtype}: {each}" for each in found]
        for method in ("normuon", "namo"):
            if any(sums := _step_by_block(method, num_shards, grid, comm_dtype)):
                different.append(f"{method}, {grid}, {comm_dtype}: {sums}")
    return different


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_equal_upstreams_on_whole_matrices(world_size):
    """Each adaptive method has upstream's bits on whole matrices, second moments included."""
    assert run_ranks(world_size, _step_all, world_size).check().results == [[]] * world_size


def _step_in_each_tensor_parallel_mode() -> list[str]:
    grid = {"num_tensor_ranks": 2}
    return _step_adamuon(2, grid, "fp32", {"tp_mode": "blockwise"}) + [
        f"{method}, {settings}: {found}"
        for method in ("normuon", "namo")
        for settings in ({"tp_mode": "blockwise"}, {"tp_mode": "distributed", "nesterov": False})
        if any(found := _step_by_block(method, 2, grid, settings=settings))
    ]


def _state_shapes(method: str, mode: str) -> dict[str, list[int]]:
    """Return the shapes of the state that a method adds, by parameter and key."""
    built = build_optimizers(
        2, {"tp_mode": mode}, sharded=_adaptive(method), cases=CASES[2], num_tensor_ranks=2
    )
    return {
        f"{part.name}.{key}": list(value.shape)
        for param, _, part in built.params
        for key, value in built.sharded.state[param].items()
        if key != "momentum_buffer"
    }


def _step_shards_that_start_within_a_query_group() -> list[list[float]]:
    # The second has rows of key, value and query, in this order.
    with mock.patch.dict(CASES, {3: [(24, [9, 11, 12])]}):
        return [_step_by_block(method, 3, {}) for method in ("normuon", "namo")]


def _calls_of_many_blocks(num_layers: int = 24) -> dict[str, tuple[int, dict[str, int]]]:
    """Return by method the number of blocks, and the calls of a step that Muon's does not make."""
    from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon

    class Counted(TorchDispatchMode):
        """Count operations by name, but for views."""

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
        sharded = FSDPZeROTensorParallelMuon if method == "muon" else _adaptive(method)
        built = build_optimizers(2, sharded=sharded, cases=cases, blocks=blocks)
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
        built = build_optimizers(2, sharded=_adaptive(method), cases=CASES[2])
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


def _refusals() -> list[str]:
    with pytest.raises(ValueError) as decay:
        build_optimizers(2, {"use_decoupled_weight_decay": False}, {}, sharded=_adaptive("namo"))
    with pytest.raises(ValueError) as name:
        build_optimizers(2, sharded=_adaptive("adam"))
    return [str(decay.value), str(name.value)]


CASES_BY_WORLD = {
    2: {
        "calls": _calls_of_many_blocks,
        "sums": functools.partial(_step_by_block, "namo", 2, {}, is_exact=False),
        "refusals": _refusals,
        "offload": _offloaded_between_steps,
    },
    3: {"order": _step_shards_that_start_within_a_query_group},
    4: {
        "modes": _step_in_each_tensor_parallel_mode,
        "joined": functools.partial(_state_shapes, "normuon", "duplicated"),
        "apart": functools.partial(_state_shapes, "normuon", "blockwise"),
        "namo": functools.partial(_state_shapes, "namo", "duplicated"),
    },
}
results = cached_cases(CASES_BY_WORLD)


def test_blocks_under_each_tensor_parallel_mode():
    """A block is that of Newton-Schulz: of one tensor-parallel rank, or of all of them.

    As upstream, adamuon scales by the shape that a tensor-parallel rank has. Not in mode
    distributed: upstream multiplies parts of a matrix there, and its rounding decides the sign of
    small elements, which a second moment makes large.
    """
    assert results(4)["modes"] == [[]] * 4


def test_rows_may_be_in_another_order_than_blocks():
    """A shard that starts with the key of a query group has the same bits."""
    assert results(3)["order"] == [[[0.0], [0.0]]] * 3


def test_a_block_costs_less_than_one_call():
    """Second moments of a block take less than half a call, and one all-reduce for normuon."""
    for found in results(2)["calls"]:
        for method, (num_blocks, calls) in found.items():
            assert calls.get("allreduce_", 0) == (method == "normuon")
            assert sum(calls.values()) <= 0.5 * num_blocks, calls


def test_sums_in_float64_change_rounding_alone():
    """Sums in float64 differ from emerging-optimizers' sums in float32 by rounding.

    Three steps of 0.02 on at most 1536 elements of a rank; each may differ by a few units in the
    last place of a weight of size 3, 2.4e-7. A moment of another step would give 1e-2 an element.
    """
    for differences in results(2)["sums"]:
        assert max(differences) <= 1536 * 2 * 2.4e-7


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


def test_second_moments_that_were_offloaded_are_followed():
    """Second moments that a trainer replaces between steps are the ones that the step uses."""
    assert results(2)["offload"] == [[]] * 2


def test_what_cannot_be_normalized_is_refused_with_the_reason():
    """Settings that a method cannot have are refused at construction, with the reason."""
    for of_decay, of_name in results(2)["refusals"]:
        assert "expected decoupled weight decay with namo" in of_decay
        assert "expected one of adamuon, normuon, namo, got adam" in of_name
