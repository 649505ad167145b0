# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Rectangles that are moved together: by the kernel, in Triton's interpreter, and by torch."""

import gc
import json
import logging
import os
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.commands import run_command
from helpers.kernel_bits import difference_from_torch
from helpers.layouts import one_matrix, plan_of
from helpers.ranks import ROOT
from helpers.stacks import local_engine, settings

from megatron_muon.plan.cost import CostModel
from megatron_muon.runtime import row_kernel, row_moves
from megatron_muon.runtime.arena import Arena
from megatron_muon.runtime.row_moves import RowMoves, Side, Tensors

ROWS, COLS = 16, 8
CPU = torch.device("cpu")


def _engine(*num_matrices: int, split_shapes: tuple[int, ...] | None = None) -> tuple[Any, Any]:
    """Return an engine of plans of local matrices, in stacks of four at most, and its rows."""
    plans = [
        plan_of(
            [one_matrix([ROWS], COLS, f"{i}.weight", split_shapes) for i in range(number)],
            CostModel(stack_tiles=4),
        )
        for number in num_matrices
    ]
    generator = torch.Generator().manual_seed(0)
    rows = {i: torch.randn(ROWS, COLS, generator=generator) for i in range(sum(num_matrices))}
    return local_engine(plans, settings(scale=(0.3, 0.7)), CPU), rows


def _rectangles(generator: torch.Generator) -> list[tuple[Any, ...]]:
    """Return cases of sources, targets, norms and factors: contiguous, sliced, transposed."""
    # Nothing below the normal numbers, not even a quotient: some CPUs convert it to zero.
    special = torch.tensor([[float("nan"), float("inf"), -float("inf"), 0.0, -0.0]])
    wide = torch.randn(70, 130, generator=generator) * torch.logspace(-25, 25, 130)
    wide[:1, :5] = special
    cases = []
    for source_dtype, target_dtype in (
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ):
        source = wide.to(source_dtype)
        shapes = [
            source,
            source[3:40],
            source[:, 5:77],
            source.mT[2:9, 10:60],
            source[:64].reshape(130, 64),
        ]
        divides = target_dtype == torch.bfloat16 and source_dtype == torch.float32
        scales = target_dtype == torch.float32
        cases.append(
            (
                shapes,
                # Full tiles of contiguous rows at aligned and at other addresses, then gaps.
                [torch.zeros(each.shape, dtype=target_dtype) for each in shapes[:2]]
                + [torch.zeros(9 + each.shape[0], 5 + each.shape[1], dtype=target_dtype)
                   [4 : 4 + each.shape[0], 5:] for each in shapes[2:]],
                [2, 0, 1, 1, 0] if divides else None,
                [(0.3, 1.0), (0.2, 0.7), (1.0, 1.0), (1.3, 0.1), (0.9, 3.0)] if scales else None,
            )
        )  # fmt: skip
    return cases


def _moved(rows: dict[int, torch.Tensor], step: int) -> dict[int, torch.Tensor]:
    """Return the rows in other memory: in one allocation, at other offsets, with other strides."""
    gap, pad = ((0, 0), (1, 0), (3, 2))[step - 1]
    memory = torch.zeros(len(rows) * (ROWS + gap) + gap, COLS + pad)
    moved = {}
    for i, own in rows.items():
        first = gap + i * (ROWS + gap)
        moved[i] = memory[first : first + ROWS, pad:]
        moved[i].copy_(own)
    return moved


def _row_moves(
    moves: list[tuple[int, ...]],
    sources: list[torch.Tensor],
    targets: list[torch.Tensor],
    factors: Any = None,
    *,
    by_kernel: bool,
) -> RowMoves:
    """Return moves between tensors, which are numbered from 1: sources, then targets."""
    tensors = Tensors(torch.empty(0), CPU, by_kernel)
    tensors.bind([*sources, *targets])
    tensors.update()
    sides = Side(sources[0].dtype), Side(targets[0].dtype)
    return RowMoves(moves, *sides, tensors, factors)


def _bits(*, by_kernel: bool) -> list[list[int]]:
    """Return the bits that all rectangles, and two steps of an engine, end with."""
    row_moves.uses_kernel = lambda device: by_kernel  # type: ignore[assignment]
    norms = torch.tensor([3.7, 1e-7, 1.9e5])
    found = []
    for sources, targets, positions, factors in _rectangles(torch.Generator().manual_seed(0)):
        moves = [
            (1 + i, 0, 0, 0, 1 + i + len(sources), 0, 0, 0, *source.shape, i)
            for i, source in enumerate(sources)
        ]
        divisors = norms[positions] if positions else None
        _row_moves(moves, sources, targets, factors, by_kernel=by_kernel).run(divisors)
        found += targets
    # Stacks of four and of fewer.
    for num_matrices, split_shapes in ((5, None), (3, (4, 2, 2))):
        engine, rows = _engine(num_matrices, split_shapes=split_shapes)
        for step in range(4):
            if step:
                rows = _moved(rows, step)
            results = rows if step < 2 else {i: torch.zeros_like(r) for i, r in rows.items()}
            done = [i for each in engine.orthogonalize(rows, results) for i in each]
            assert len(done) == num_matrices
            found += results.values()
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
    # NaN has many representations: torch has others on a CPU than on a GPU.
    clean = [torch.where(each.isnan(), torch.full_like(each, 7.0), each) for each in found]
    return [each.view(integers[each.dtype]).flatten().tolist() for each in clean]


def test_kernel_has_the_bits_of_torch():
    """The interpreted kernel has torch's bits on all kinds of rectangles and in whole steps."""
    # A process of its own: Triton reads the variable when it is imported.
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "unit_tests")])
    run = run_command(sys.executable, __file__, env={"TRITON_INTERPRET": "1", "PYTHONPATH": paths})
    assert run.returncode == 0, run.stderr
    is_equal, differs_from_zeros, difference = json.loads(run.stdout.splitlines()[-1])
    assert is_equal
    assert differs_from_zeros
    # What a GPU compares at construction.
    assert difference is None


def test_rows_of_one_shape_are_divided_by_their_own_norms():
    """Rows of one shape between others are divided by their own norms."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3), (4, 5), (2, 3), (600, 700), (4, 5), (2, 3), (600, 700)]
    norms = torch.rand(9, generator=generator) + 1
    positions = [8, 0, 3, 1, 5, 2, 4]
    sources = [torch.randn(shape, generator=generator) for shape in shapes]
    targets = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    moves = [
        (1 + i, 0, 0, 0, 8 + i, 0, 0, 0, *shape, positions[i]) for i, shape in enumerate(shapes)
    ]
    _row_moves(moves, sources, targets, by_kernel=False).run(norms)
    for source, target, position in zip(sources, targets, positions, strict=True):
        assert torch.equal(target, (source / norms[position]).bfloat16())


def test_number_of_launches_does_not_grow_with_matrices(monkeypatch):
    """Each stack takes one launch for its rows and one for its results."""
    launches: Counter[int] = Counter()
    monkeypatch.setattr(row_moves, "uses_kernel", lambda device: True)
    monkeypatch.setattr(row_kernel, "launch", lambda table, *_: launches.update([len(table.moves)]))
    for num_matrices, split_shapes, expected in (
        (6, None, {4: 2, 2: 2}),
        (8, None, {4: 4}),
        # Query, key and value of one matrix: two rectangles each.
        (1, (4, 2, 2), {2: 2, 4: 2}),
    ):
        launches.clear()
        engine, rows = _engine(num_matrices, split_shapes=split_shapes)
        list(engine.orthogonalize(rows, rows))
        assert launches == expected


def test_rows_that_moved_are_viewed_again():
    """Rows in other memory are viewed again, and those before may be dropped."""
    engine, rows = _engine(3)
    before = {number: each.clone() for number, each in rows.items()}
    list(engine.orthogonalize(rows, rows))
    list(engine.orthogonalize(before, before))
    assert all(torch.equal(rows[number], before[number]) for number in rows)
    engine.forget()
    kept = {number: each.clone() for number, each in rows.items()}
    results = {number: torch.zeros_like(each) for number, each in rows.items()}
    list(engine.orthogonalize(rows, results))
    assert all(torch.equal(rows[number], kept[number]) for number in rows)
    assert all(bool(each.any()) for each in results.values())


def test_all_lists_of_a_step_share_one_copy_of_addresses(monkeypatch):
    """All lists of a step share one copy of addresses, made only if rows moved."""
    copies, launched = [], []
    monkeypatch.setattr(row_moves, "uses_kernel", lambda device: True)
    monkeypatch.setattr(
        row_kernel, "on_device", lambda tensor, device: copies.append(tensor) or tensor
    )
    monkeypatch.setattr(row_kernel, "launch", lambda table, tensors, *_: launched.append(tensors))
    engine, rows = _engine(6, 3)
    # Where the allocator places the arena is not what is tested.
    monkeypatch.setattr(Arena, "free", lambda self: None)
    # Stacks of 4, 2 and 3 matrices: rows in, results out.
    num_lists = 6
    # Kept, or the next step's rows might be where they were.
    memory = []
    for is_moved in (True, False, True, True, False):
        copies.clear()
        launched.clear()
        if is_moved:
            rows = {handle: own.clone() for handle, own in rows.items()}
            memory.append(rows)
        list(engine.orthogonalize(rows, rows))
        assert len(launched) == num_lists
        assert len(set(map(id, launched))) == 1
        if len(memory) > 1:
            assert len(copies) == is_moved
    # Views anew of the same memory, then of other results.
    copies.clear()
    list(engine.orthogonalize({handle: own[:] for handle, own in rows.items()}, dict(rows)))
    assert copies == []
    list(engine.orthogonalize(rows, memory[0]))
    assert len(copies) == 1
    # The same tensors, whose memory was freed and allocated again.
    for own in rows.values():
        own.data = own.clone()
    list(engine.orthogonalize(rows, memory[0]))
    assert len(copies) == 2


@pytest.mark.parametrize("by_kernel", [False, True])
def test_rows_are_dropped_where_asked(monkeypatch, by_kernel):
    """forget() drops all references to the caller's rows."""
    monkeypatch.setattr(row_moves, "uses_kernel", lambda device: by_kernel)
    monkeypatch.setattr(row_kernel, "launch", lambda *_: None)
    engine, rows = _engine(3)
    results = {number: torch.zeros_like(each) for number, each in rows.items()}
    memory = [each.data_ptr() for each in results.values()]
    list(engine.orthogonalize(rows, results))
    engine.forget()
    del results
    kinds = (torch.Tensor, torch.UntypedStorage)
    alive = [each for each in gc.get_objects() if type(each) in kinds and each.device == CPU]
    assert not [each for each in alive if each.data_ptr() in memory]


def test_kernel_that_cannot_be_compiled_is_not_used_and_logged(monkeypatch, caplog):
    """A rank whose compiler fails moves rows by torch, and a warning says why."""

    def fail(*_args: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\n at")

    row_moves.uses_kernel.cache_clear()
    assert not row_moves.uses_kernel(CPU)
    monkeypatch.setattr(row_moves.Tensors, "update", fail)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(torch, "zeros", lambda *_, **__: torch.empty(2))
        assert not row_moves.uses_kernel(torch.device("cuda", 0))
    assert caplog.messages == ["no kernel moves rows on cuda:0: Failed to find C compiler."]
    row_moves.uses_kernel.cache_clear()


if __name__ == "__main__":
    torch_bits, kernel_bits = (_bits(by_kernel=by_kernel) for by_kernel in (False, True))
    print(
        json.dumps(
            [
                torch_bits == kernel_bits,
                all(any(each) for each in kernel_bits),
                difference_from_torch(CPU),
            ]
        )
    )
