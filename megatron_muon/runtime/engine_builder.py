# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Build the engine for all matrices of a model: settings, plans, groups, connections."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.cost import CostModel, gpu_rates
from megatron_muon.plan.exchange_plan import (
    ExchangePlan,
    layout_entries,
    plan_matrices,
    staging_problem,
)
from megatron_muon.plan.rank_plan import RankSchedule
from megatron_muon.plan.settings import ExchangeSettings, PlanSettings
from megatron_muon.runtime.agreement import (
    Domain,
    differences_between_ranks,
    first_line,
    new_groups,
    own_rank,
    raise_where_any_rank_fails,
)
from megatron_muon.runtime.arena import is_out_of_memory
from megatron_muon.runtime.engine import Engine
from megatron_muon.runtime.plan_runner import PlanInput


def build_engine(
    inputs: Sequence[PlanInput],
    newton_schulz: NewtonSchulzSettings,
    settings: ExchangeSettings,
    *,
    device: torch.device,
    rows_device: torch.device | None = None,
    max_num_plans: int | None = None,
) -> Engine:
    """Build an engine that orthogonalizes each matrix on one rank of its domain, or on several.

    All ranks of the job build together: they plan, create the process groups of the plans, build
    the engine, and connect. Before ranks connect, all of them go on, or all of them raise. A rank
    that fails while it connects raises alone: the others are in the same collective, until the
    launcher ends them or it times out.

    Args:
        inputs: Matrices of this rank by plan, in an order that all ranks share. Ranks may have
            different ones.
        newton_schulz: Steps, coefficients, precision and scale.
        settings: Dtypes of messages, sizes and cost model.
        device: Where matrices are orthogonalized.
        rows_device: See ``Engine``.
        max_num_plans: Maximum number of plans of any rank, which share the staging memory; None if
            all ranks have the same number.

    Raises:
        ValueError: bf16 messages with Newton-Schulz in fp32.
        RuntimeError: On all ranks, when no plan fits into the staging memory, when ranks came to
            different plans, or when one of them lacks memory for the engine.

    Communication: three flags over the job; per plan two hashes, and for every number of buckets
        that is tried an all-reduce of 8 bytes; a list of ranks as objects, and a new process group
        for each set of ranks that splits a matrix, in which one element is all-reduced. Per plan a
        collective sends one element to each rank that it will send to, and one gathers one from
        each replica. A limit of staging memory needs one flag more.
    """
    # All domains have the same number.
    ranks_per_node = inputs[0].domain.ranks_per_node if inputs else None
    resolved = _resolve(ranks_per_node, newton_schulz, settings, device)
    plans = _plan(inputs, resolved.staging_budget(max_num_plans or len(inputs) or 1), device)
    schedule = _schedule(plans, settings.staging_bytes, device)
    groups = _parts_groups(plans, device)

    def build() -> Engine:
        """Allocate, and compile the kernel that moves rows: either may fail on one rank."""
        return Engine(
            plans, inputs, schedule, groups, newton_schulz, device=device, rows_device=rows_device
        )

    engine = on_all_ranks(build, settings, device)
    # Not on all ranks: the others would be in a collective that this rank has left. Waiting for
    # them would only hide its error until a timeout.
    for runner in engine.runners:
        runner.connect()
    return engine


def on_all_ranks[T](build: Callable[[], T], settings: ExchangeSettings, device: torch.device) -> T:
    """Call a function, or raise on all ranks if it fails on one of them.

    If that rank raised alone, the others would wait in their next collective until it times out.

    Raises:
        RuntimeError: On all ranks, with the errors, and advice where memory is short. On a rank
            that failed, its cause is the first error.

    Communication: one flag over the job.
    """
    cause: Exception | None = None
    try:
        result = build()
    # Any exception: other ranks would wait for this one, and compilers of kernels raise their own.
    except Exception as error:
        cause = error
    staging_bytes = settings.staging_bytes or PlanSettings.staging_bytes
    advice = (
        f". Lower exchange.staging_bytes (now {staging_bytes:,}), shard over more ranks, or leave "
        "more memory free"
    )
    problems = [first_line(cause) + advice * is_out_of_memory(cause)] if cause else []
    raise_where_any_rank_fails(problems, None, device, "No optimizer was built.", cause=cause)
    return result


def _resolve(
    ranks_per_node: int | None,
    newton_schulz: NewtonSchulzSettings,
    settings: ExchangeSettings,
    device: torch.device,
) -> PlanSettings:
    """Return the numbers that plans are made with: rates, dtypes and limits.

    GPUs of one domain are expected to be the same model: ranks with different rates are found when
    plans are compared.

    Args:
        ranks_per_node: Ranks that the launcher started per node; None if it did not say.
        newton_schulz: Steps, coefficients, precision and owner.
        settings: Settings of the user.
        device: Of this rank.

    Raises:
        ValueError: bf16 messages with Newton-Schulz in fp32.
    """
    rates = dataclasses.replace(
        _rates(device),
        num_ns_steps=newton_schulz.steps,
        coefficient_type=newton_schulz.coefficient_type,
        backend=settings.newton_schulz,
    )
    if ranks_per_node is not None:
        rates = dataclasses.replace(rates, ranks_per_node=ranks_per_node)
    cost = CostModel.parse(settings.cost_model, rates)
    plan = settings.plan_settings(cost, is_bf16=newton_schulz.is_bf16)
    return _for_owner(plan, newton_schulz)


def _for_owner(plan: PlanSettings, newton_schulz: NewtonSchulzSettings) -> PlanSettings:
    """Adapt the dtypes and owners of a plan to a function of owners, or of a user."""
    owner, dtypes = newton_schulz.owner, plan.dtypes
    if owner is not None and owner.num_inputs > 1:
        return plan.for_whole_matrices()
    if owner is not None:
        # Its results are not bf16-valued.
        dtypes = dataclasses.replace(dtypes, scatter_dtype="float32")
    # Both are called with whole matrices.
    is_whole = owner is not None or newton_schulz.function is not None
    return dataclasses.replace(plan, dtypes=dtypes, max_owners=1 if is_whole else plan.max_owners)


def _rates(device: torch.device) -> CostModel:
    """Return the rates of a device."""
    if device.type == "cuda":
        return gpu_rates(torch.cuda.get_device_capability(device)[0])
    # On a CPU the kernel of a product, and so its last bits, depend on the size of a stack: on the
    # other matrices of a rank. Therefore its stacks are single matrices.
    return CostModel(stack_tiles=1)


def _plan(
    inputs: Sequence[PlanInput], settings: PlanSettings, device: torch.device
) -> list[ExchangePlan]:
    """Plan every input, and compare plans across ranks."""
    plans: list[ExchangePlan] = []
    differences = []
    for plan_input in inputs:
        domain = plan_input.domain
        # Costs decide the sizes of stacks. Ranks plan together: they compare what they plan from,
        # and then the plans.
        found = _differences([str(settings), *layout_entries(plan_input.matrices)], domain, device)
        if not found:
            fullest_bytes = functools.partial(_fullest_bytes, domain, device)
            plans.append(plan_matrices(plan_input.matrices, settings, fullest_bytes))
            found = _differences(plans[-1].entries(), domain, device)
        differences += found
    # After the loop: ranks whose domains have no difference raise with the others.
    raise_where_any_rank_fails(
        differences,
        None,
        device,
        "Build the same model with the same arguments on every rank. No optimizer was built.",
    )
    return plans


def _schedule(
    plans: Sequence[ExchangePlan], limit: int | None, device: torch.device
) -> RankSchedule:
    """Return the step of this rank, or raise on all ranks if memory is exceeded."""
    schedule = RankSchedule.build(plans, own_rank())
    if limit is not None:
        problem = staging_problem(plans, schedule.staging_bytes, limit)
        problems = [problem] if problem else []
        raise_where_any_rank_fails(problems, None, device, "No optimizer was built.")
    return schedule


def _fullest_bytes(domain: Domain, device: torch.device, plan: ExchangePlan) -> int:
    """Return the staging memory of the fullest rank of a domain; collective."""
    own = RankSchedule.build([plan], own_rank()).staging_bytes
    num_bytes = torch.tensor([own], dtype=torch.int64, device=device)
    if domain.group is not None:
        dist.all_reduce(num_bytes, dist.ReduceOp.MAX, group=domain.group)
    return int(num_bytes)


def _differences(entries: list[str], domain: Domain, device: torch.device) -> list[str]:
    """Compare the plans that the ranks of a domain have built.

    A difference would hang the first step.
    """
    if domain.group is None:
        return []
    return differences_between_ranks(entries, domain.group, device, "Muon exchange plan")


def _parts_groups(
    plans: Sequence[ExchangePlan], device: torch.device
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make the groups of ranks that split matrices, and use them once.

    A backend connects a group at its first collective, and failures should surface here.
    """
    rank = own_rank()
    groups = new_groups({o for plan in plans for o in plan.owners if len(o) > 1 and rank in o})
    for owners in sorted(groups):
        own = torch.zeros(1, dtype=torch.float32, device=device)
        dist.all_reduce(own, group=groups[owners])
    return groups
