# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Random layouts over replicas x shards x tensor-parallel ranks, and owner compute over them."""

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from gpu_checks import reference
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan import buckets, dealing
from megatron_muon.plan.layout import RowLayout, block_rows
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.owned_parameters import OwnedParameter, lay_out
from megatron_muon.runtime.owner_compute import OwnerCompute
from megatron_muon.runtime.sharded_matrix import ShardedMatrix

# A CPU prepares its bf16 products anew for each shape, which takes longer than the products.
_NUM_SHAPES = 8


class Grid(NamedTuple):
    """Ranks by what they hold; the tensor-parallel rank counts fastest."""

    num_replicas: int
    num_shards: int
    num_tensor_ranks: int


@dataclass(frozen=True)
class Case:
    """One parameter.

    Args:
        num_rows: Rows of each tensor-parallel rank's matrix.
        num_cols: Its columns.
        shards: Row range of each shard, not in the order of ranks.
        split_shapes: Rows of a query group that are query, key and value; None for one block.
        partition_dim: Dimension by which tensor-parallel ranks' matrices are joined; None where
            each is a matrix of its own.
    """

    num_rows: int
    num_cols: int
    shards: tuple[tuple[int, int], ...]
    split_shapes: tuple[int, ...] | None
    partition_dim: int | None


@dataclass(frozen=True)
class Problem:
    """Parameters on a grid of ranks, and how they are exchanged.

    Args:
        grid: The ranks.
        cases: The parameters.
        exchange: Arguments of ``ExchangeSettings``.
        precision: ``medium`` for Newton-Schulz in bf16, ``highest`` for fp32.
        device: Of this rank's tensors.
        num_buckets: Buckets of the plan, if ranks have as many matrices; None for those of the
            shortest step, which are few where matrices are small.
    """

    grid: Grid
    cases: tuple[Case, ...]
    exchange: dict[str, Any]
    precision: str
    device: torch.device
    num_buckets: int | None = None


def random_cases(
    rng: random.Random,
    grid: Grid,
    count: int,
    *,
    max_rows: int,
    max_cols: int,
    is_joined: bool = False,
) -> tuple[Case, ...]:
    """Draw parameters: tall, wide, one row, shards uneven, empty and in any order.

    Shapes repeat, as in the layers of a model.

    Args:
        rng: The same on all ranks.
        grid: The ranks.
        count: How many.
        max_rows: Most rows.
        max_cols: Most columns.
        is_joined: Whether tensor-parallel ranks hold one matrix, of one block.
    """
    shapes = [
        _random_shape(rng, max_rows, max_cols, is_small=index % 4 == 3, is_split=not is_joined)
        for index in range(_NUM_SHAPES)
    ]
    cases = []
    for index in range(count):
        num_rows, num_cols, split_shapes = shapes[index % _NUM_SHAPES]
        cuts = sorted(rng.randint(0, num_rows) for _ in range(grid.num_shards - 1))
        bounds = [0, *cuts, num_rows]
        shards = list(zip(bounds, bounds[1:], strict=False))
        rng.shuffle(shards)
        partition_dim = rng.choice([0, 1] if is_joined else [None, 0, 1])
        if grid.num_tensor_ranks == 1:
            partition_dim = None
        cases.append(Case(num_rows, num_cols, tuple(shards), split_shapes, partition_dim))
    return tuple(cases)


def _random_shape(
    rng: random.Random, max_rows: int, max_cols: int, *, is_small: bool, is_split: bool
) -> tuple[int, int, tuple[int, ...] | None]:
    """Draw rows, columns and how a query group is split.

    Only a small one has fewer than half of the most rows and columns: otherwise many small matrices
    would share a bucket with a large one.
    """
    split_shapes = rng.choice([None, None, (2, 1, 1), (3, 2, 2)]) if is_split else None
    multiple = sum(split_shapes) if split_shapes else 1
    least_rows, least_cols = (1, 1) if is_small else (max_rows // 2, max_cols // 2)
    num_rows = multiple * rng.randint(-(-least_rows // multiple), max_rows // multiple)
    return num_rows, rng.randint(least_cols, max_cols), split_shapes


def scale(num_rows: int, num_cols: int) -> tuple[float, float]:
    """Return two factors that depend on the shape, one after the other as upstream's."""
    return max(1.0, num_rows / num_cols) ** 0.5, 0.2


class OwnerRun:
    """Owner compute over a problem, on this rank.

    Args:
        problem: The same on all ranks.
        before_read: Called each time before the engine reads rows: what comes late in one rank
            shows whether the others wait for it.

    Communication: makes process groups, and that of ``OwnerCompute``.
    """

    compute: OwnerCompute
    params: list[torch.Tensor]  # stand for the parameters, and hold nothing

    def __init__(self, problem: Problem, before_read: Callable[[], None] | None = None) -> None:
        self._problem = problem
        self._replicas, shards, tensor = _groups(problem.grid)
        self._shard = dist.get_rank(shards) if shards is not None else 0
        self._tensor_rank = dist.get_rank(tensor) if tensor is not None else 0
        self.params = [torch.empty(0, device=problem.device) for _ in problem.cases]
        self._index = {id(param): index for index, param in enumerate(self.params)}
        owned = [
            OwnedParameter(
                param,
                ShardedMatrix(
                    f"layer.{index}.weight",
                    RowLayout(case.num_rows, case.num_cols, case.shards),
                    shards,
                    self._replicas,
                ),
                tensor if case.partition_dim is not None else None,
                case.partition_dim,
                case.split_shapes,
            )
            for index, (param, case) in enumerate(zip(self.params, problem.cases, strict=True))
        ]
        settings = NewtonSchulzSettings(
            reference.STEPS, reference.COEFFICIENTS, problem.precision == "medium", scale
        )
        groups = 1 if problem.grid.num_replicas > 1 else None
        tried = dealing._NUM_BUCKETS if problem.num_buckets is None else (problem.num_buckets,)
        with (
            mock.patch.object(dealing, "_NUM_BUCKETS", tried),
            # What may be portioned is, whether it pays or not.
            mock.patch.object(buckets, "_WORTH_PORTIONS", math.inf),
        ):
            self.compute = OwnerCompute(
                [lay_out(owned, problem.device)],
                settings,
                # Replicas share the work: by the cost model they would not, of small matrices.
                ExchangeSettings(**{"instance_groups": groups, **problem.exchange}),
                device=problem.device,
            )
        if before_read is not None:
            self._delay(before_read)

    def _delay(self, before_read: Callable[[], None]) -> None:
        """Call what delays this rank in front of each read of rows."""
        rows: Any = self.compute._engine._plans[0]._rows
        read = rows.read

        def delayed(targets: Sequence[tuple[Any, torch.Tensor]]) -> None:
            """Delay this rank, and read."""
            before_read()
            read(targets)

        rows.read = delayed

    def _whole(self, index: int, tensor_rank: int, step: int) -> torch.Tensor:
        """Draw the matrix of one tensor-parallel rank, the same wherever it is asked for."""
        case = self._problem.cases[index]
        seed = (step * 1009 + index) * 17 + tensor_rank
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(case.num_rows, case.num_cols, generator=generator)
        return drawn.to(self._problem.device)

    def rows(self, step: int) -> list[torch.Tensor]:
        """Return this rank's rows of all parameters in a step."""
        return [
            self._whole(index, self._tensor_rank, step)[slice(*case.shards[self._shard])].clone()
            for index, case in enumerate(self._problem.cases)
        ]

    def step(self, rows: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Orthogonalize; return copies of this rank's rows of each result."""
        momentum = dict(zip(self.params, rows, strict=True))
        # Every other result in the memory of its momentum, as the optimizer does it.
        copies = [row.clone() for row in rows]
        results = {
            param: copies[index] if index % 2 else torch.empty_like(copies[index])
            for index, param in enumerate(self.params)
        }
        momentum = {p: results[p] if i % 2 else momentum[p] for i, p in enumerate(self.params)}
        with reference.fp32_matmul_precision(self._problem.precision):
            return {
                self._index[id(param)]: results[param].clone()
                for params in self.compute.orthogonalize(momentum, results)
                for param in params
            }

    def num_unequal_replicas(self, results: dict[int, torch.Tensor]) -> int:
        """Return how many results of a step differ from those of the first replica of this shard.

        Communication: a gather of objects over the replicas.
        """
        if self._replicas is None:
            return 0
        copies: list[Any] = [None] * dist.get_world_size(self._replicas)
        own = {index: result.cpu() for index, result in results.items()}
        dist.all_gather_object(copies, own, group=self._replicas)
        return sum(not torch.equal(result, copies[0][index]) for index, result in own.items())

    def expected(self, step: int) -> dict[int, torch.Tensor]:
        """Return what upstream's function makes of the whole matrices, this rank's rows of it."""
        found = {}
        for index, case in enumerate(self._problem.cases):
            start, stop = case.shards[self._shard]
            if start < stop:
                found[index] = self._whole_result(index, case, step)[start:stop]
        return found

    def _whole_result(self, index: int, case: Case, step: int) -> torch.Tensor:
        joined = range(self._problem.grid.num_tensor_ranks)
        tensor_ranks = [*joined] if case.partition_dim is not None else [self._tensor_rank]
        wholes = [self._whole(index, tensor_rank, step) for tensor_rank in tensor_ranks]
        result = torch.empty_like(wholes[0])
        dim, position = case.partition_dim or 0, tensor_ranks.index(self._tensor_rank)
        wire = self._problem.exchange["wire"]
        for ranges in block_rows(case.num_rows, case.split_shapes):
            rows = torch.cat([torch.arange(*each) for each in ranges]).to(result.device)
            block = torch.cat([whole[rows] for whole in wholes], dim=dim)
            done = reference.orthogonalized(
                block, self._problem.precision, has_float64_norm=wire == "bf16"
            )
            done = reference.scaled(done, scale)
            result[rows] = done.chunk(len(wholes), dim=dim)[position]
        return result


# Once for a grid of this process: eight ranks take seconds to connect their groups.
@functools.cache
def _groups(grid: Grid) -> list[Any]:
    """Make the groups of replicas, shards and tensor-parallel ranks; return this rank's.

    None stands for a group of one rank.
    """
    world = torch.arange(dist.get_world_size()).view(grid)
    found: list[Any] = []
    for axis in range(len(grid)):
        if grid[axis] == 1:
            found.append(None)
            continue
        lines = world.movedim(axis, -1).reshape(-1, grid[axis]).tolist()
        # All ranks make all groups, in the same order.
        groups = [dist.new_group(line) for line in lines]
        found.append(
            next(g for g, line in zip(groups, lines, strict=True) if dist.get_rank() in line)
        )
    return found
