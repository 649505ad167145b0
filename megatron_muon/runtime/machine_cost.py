# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The cost model of the machine that a job runs on, the same on all ranks."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.call import Call
from megatron_muon.newton_schulz.coefficients import coefficients_of
from megatron_muon.newton_schulz.gram import Gram
from megatron_muon.newton_schulz.registry import BACKENDS, usable_backends
from megatron_muon.newton_schulz.restarts import segments_of
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.cost import CPU_RANKS, CostModel
from megatron_muon.plan.cost_table import CostTable, ShapeTime, matrices_text, timed_shapes
from megatron_muon.plan.layout import MatrixLayout
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.agreement import own_rank, raise_where_any_rank_fails
from megatron_muon.runtime.domain import Domain

# The first call of a shape chooses kernels, and on a GPU loads them.
_NUM_WARM_UP, _NUM_TIMED = 1, 3


def machine_costs(
    domains: Sequence[tuple[Domain, Sequence[MatrixLayout]]],
    ns_settings: NewtonSchulzSettings,
    settings: ExchangeSettings,
    device: torch.device,
) -> list[CostModel]:
    """Put the costs of each domain together: backends, rates, measured times.

    Args:
        domains: Ranks that plan together, and their matrices; in one order on all ranks. A rank may
            have none.
        ns_settings: Steps, coefficients and precision.
        settings: Rates, and whether to measure.
        device: Of this rank.

    Raises:
        RuntimeError: On all ranks, when one cannot run the backend that was asked for, or when
            times cannot be measured, read or written, miss a shape, or are of another precision.

    Communication: where another backend than ``standard`` may run a flag over all ranks, and a
        gather of objects over each domain; with measured times a flag over all ranks, and a
        broadcast of the times over each domain.
    Memory: with ``measure``, one stack and what Newton-Schulz needs for it, until it returns.
    """
    backends = _own_backends(ns_settings, settings, device)
    costs = [
        _rates(_shared_backends(backends, settings, domain), ns_settings, settings, domain, device)
        for domain, _ in domains
    ]
    source = settings.cost_source
    if not source.measures and source.path is None:
        return costs
    problems: list[str] = []
    tables: list[CostTable | None] = []
    for (domain, matrices), cost in zip(domains, costs, strict=True):
        table = None
        # One rank: two that measured would come to two plans, and thousands would open one file.
        if own_rank() == domain.ranks[0]:
            try:
                table, found = _table(matrices, ns_settings, settings, cost, device)
                problems += found
            # What one rank raises alone, the others would wait for; kernels raise what they like.
            except Exception as error:
                problems.append(f"cost model: {str(error).partition(chr(10))[0]}")
        tables.append(table)
    raise_where_any_rank_fails(
        problems,
        None,
        device,
        "Measure the shapes of this model with exchange.cost_model measure:PATH, or leave "
        "measured times out. No optimizer was built.",
    )
    for number, (domain, _) in enumerate(domains):
        if domain.group is not None:
            shared = [tables[number]]
            dist.broadcast_object_list(shared, src=domain.ranks[0], group=domain.group)
            (tables[number],) = shared
    return [
        dataclasses.replace(cost, measured=table) for cost, table in zip(costs, tables, strict=True)
    ]


def _rates(
    backends: tuple[str, ...],
    ns_settings: NewtonSchulzSettings,
    settings: ExchangeSettings,
    domain: Domain,
    device: torch.device,
) -> CostModel:
    """Put together what is not measured."""
    # The rates of the device: a plan for CPU ranks must not assume a GPU's kernels.
    defaults = dataclasses.replace(
        CPU_RANKS if device.type == "cpu" else CostModel(),
        num_ns_steps=ns_settings.steps,
        backends=backends,
    )
    if Gram.name in backends:
        coefficients = coefficients_of(ns_settings.steps, ns_settings.coefficient_type)
        defaults = dataclasses.replace(defaults, segments=segments_of(coefficients))
    if domain.ranks_per_node is not None:
        defaults = dataclasses.replace(defaults, ranks_per_node=domain.ranks_per_node)
    return CostModel.parse(settings.cost_source.rates, defaults)


def _table(
    matrices: Sequence[MatrixLayout],
    ns_settings: NewtonSchulzSettings,
    settings: ExchangeSettings,
    cost: CostModel,
    device: torch.device,
) -> tuple[CostTable, list[str]]:
    """Measure or read the times of a domain, and list what is wrong with them."""
    shapes = [shape for matrix in matrices for shape in matrix.blocks]
    source = settings.cost_source
    if source.measures:
        normalizes = settings.wire_for(ns_settings.is_bf16).normalizes
        table = measure_newton_schulz(
            shapes, ns_settings, cost, normalizes=normalizes, device=device
        )
        _write(table, source.path)
        return table, []
    assert source.path is not None  # otherwise there are no times
    table = CostTable.read(source.path)
    return table, _table_problems(table, shapes, cost)


def _own_backends(
    ns_settings: NewtonSchulzSettings, settings: ExchangeSettings, device: torch.device
) -> tuple[str, ...]:
    """Return the backends that this rank can run, or raise on all ranks."""
    choice = settings.newton_schulz
    if choice == "standard":
        return (choice,)
    backends, reasons = usable_backends(choice, ns_settings, device)
    raise_where_any_rank_fails(
        [] if choice == "auto" else reasons,
        None,
        device,
        "Use exchange.newton_schulz standard, or auto for what this machine can run. No "
        "optimizer was built.",
    )
    return backends


def _shared_backends(
    backends: tuple[str, ...], settings: ExchangeSettings, domain: Domain
) -> tuple[str, ...]:
    """Return the backends that all ranks of a domain can run: their plans must be one."""
    # By what was asked for, which all ranks know, not by what this one can run.
    if domain.group is None or settings.newton_schulz == "standard":
        return backends
    of_ranks: list[tuple[str, ...]] = [()] * len(domain.ranks)
    dist.all_gather_object(of_ranks, backends, group=domain.group)
    return tuple(name for name in backends if all(name in others for others in of_ranks))


def _table_problems(
    table: CostTable, shapes: Sequence[tuple[int, int]], cost: CostModel
) -> list[str]:
    problems = [
        f"cost table: expected a time of {matrices_text(*key)}, got none"
        for key in table.missing(shapes, cost.backends)
    ]
    if cost.segments is not None and table.segments != cost.segments:
        problems.append(
            f"cost table: expected times of the Gram form in segments of {cost.segments} steps, as "
            f"these coefficients need, got {table.segments or 'none'}"
        )
    precision = torch.get_float32_matmul_precision()
    if table.precision != precision:
        problems.append(
            f"cost table: expected times in {precision} precision (fp32_matmul_prec), got "
            f"{table.precision}"
        )
    return problems


def _write(table: CostTable, path: Path | None) -> None:
    """Add a table to a file, on the first rank of the job: experts and dense matrices have one."""
    if path is None or own_rank() != 0:
        return
    (CostTable.read(path).joined(table) if path.exists() else table).write(path)


def measure_newton_schulz(
    shapes: Sequence[tuple[int, int]],
    ns_settings: NewtonSchulzSettings,
    cost: CostModel,
    *,
    normalizes: bool,
    device: torch.device,
) -> CostTable:
    """Time each distinct shape with each backend, in the largest stacks that a step would make.

    The caller sets the matmul precision of a step.

    Args:
        shapes: Rows and columns, with repetitions.
        ns_settings: Steps, coefficients and precision.
        cost: Sizes of stacks.
        normalizes: Whether rows travel normalized in bf16; otherwise matrices are orthogonalized
            one by one, in fp32 memory.
        device: Where to run.

    Communication: none.
    Memory: one stack and what Newton-Schulz needs for it, until it returns.
    """
    times = []
    # A generator of its own: Megatron's must be in the same state on tensor-parallel ranks.
    generator = torch.Generator(device).manual_seed(0)
    for name, rows, cols in timed_shapes(shapes, cost.backends):
        num_matrices = cost.stack_size(rows, cols) if normalizes else 1
        stack = torch.empty(
            *(num_matrices, rows, cols),
            dtype=torch.bfloat16 if normalizes else torch.float32,
            device=device,
        )
        # The norm of such a matrix is about 1.
        stack.normal_(std=(rows * cols) ** -0.5, generator=generator)
        call = partial(BACKENDS[name].run, stack, Call(ns_settings, (rows, cols), normalizes))
        times.append(ShapeTime(rows, cols, num_matrices, _milliseconds(call, device), name))
    return CostTable(
        ns_settings.steps,
        torch.get_float32_matmul_precision(),
        tuple(times),
        cost.segments or (),
    )


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call, launches included."""
    found = []
    for _ in range(_NUM_WARM_UP + _NUM_TIMED):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found[_NUM_WARM_UP:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
