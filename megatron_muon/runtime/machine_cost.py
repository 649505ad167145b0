# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Resolve settings for the machine of a job, the same on all ranks."""

import dataclasses
from collections.abc import Sequence

import torch

from megatron_muon.newton_schulz import BACKENDS, CHOICES
from megatron_muon.newton_schulz.settings import Namo, NewtonSchulzSettings, StackMethod
from megatron_muon.plan.cost import CPU_RANKS, CostModel, gpu_rates
from megatron_muon.plan.settings import ExchangeSettings, PlanSettings
from megatron_muon.runtime.agreement import Domain, gather_objects, raise_where_any_rank_fails


def resolve(
    domains: Sequence[Domain],
    newton_schulz: NewtonSchulzSettings,
    settings: ExchangeSettings,
    device: torch.device,
) -> list[PlanSettings]:
    """Return the numbers that each domain plans with: rates, dtypes and limits.

    Args:
        domains: Ranks that plan together, in one order on all ranks. A rank may have none.
        newton_schulz: Steps, coefficients, precision and method.
        settings: Settings of the user.
        device: Of this rank.

    Raises:
        ValueError: bf16 messages with Newton-Schulz in fp32.
        RuntimeError: On all ranks, when one cannot run the backend that was asked for.

    Communication: where another backend than ``standard`` may run, a flag over all ranks, and a
        gather of objects over every domain. GPUs of one domain are expected to be the same model:
        ranks with different rates are found when plans are compared.
    """
    backends = _usable_backends(newton_schulz, settings, device)
    rates = _rates(newton_schulz, device)
    numbers = []
    for domain in domains:
        known = dataclasses.replace(rates, backends=_shared_backends(backends, settings, domain))
        if domain.ranks_per_node is not None:
            known = dataclasses.replace(known, ranks_per_node=domain.ranks_per_node)
        cost = CostModel.parse(settings.cost_model, known)
        plan = settings.plan_settings(cost, is_bf16=newton_schulz.is_bf16)
        numbers.append(_for_method(plan, newton_schulz))
    return numbers


def _for_method(plan: PlanSettings, newton_schulz: NewtonSchulzSettings) -> PlanSettings:
    """Return the numbers of a plan with a method or a function of the user."""
    method, dtypes = newton_schulz.method, plan.dtypes
    if isinstance(method, Namo):
        dtypes = dataclasses.replace(dtypes, num_norms=2)
    elif method is not None:
        # Its results are not bf16-valued.
        dtypes = dataclasses.replace(dtypes, scatter_dtype="float32")
    # Both are called with whole matrices.
    is_whole = isinstance(method, StackMethod) or newton_schulz.function is not None
    return dataclasses.replace(plan, dtypes=dtypes, max_owners=1 if is_whole else plan.max_owners)


def _rates(newton_schulz: NewtonSchulzSettings, device: torch.device) -> CostModel:
    """Return the rates of the device for the steps of Newton-Schulz."""
    # A plan for CPU ranks must not assume a GPU's kernels.
    known = CPU_RANKS
    if device.type == "cuda":
        known = gpu_rates(torch.cuda.get_device_capability(device)[0])
    return dataclasses.replace(
        known,
        num_ns_steps=newton_schulz.steps,
        coefficient_type=newton_schulz.coefficient_type,
    )


def _usable_backends(
    newton_schulz: NewtonSchulzSettings, settings: ExchangeSettings, device: torch.device
) -> tuple[str, ...]:
    """Return the backends of the user's choice that this rank can run, or raise on all ranks."""
    choice = settings.newton_schulz
    if choice == "standard":
        return CHOICES[choice]
    problems = {name: BACKENDS[name].problems(newton_schulz, device) for name in CHOICES[choice]}
    reasons = [f"Newton-Schulz {name}: {each}" for name in problems for each in problems[name]]
    raise_where_any_rank_fails(
        [] if choice == "auto" else reasons,
        None,
        device,
        "Use exchange.newton_schulz standard, or auto for what this machine can run. No "
        "optimizer was built.",
    )
    return tuple(name for name in problems if not problems[name])


def _shared_backends(
    backends: tuple[str, ...], settings: ExchangeSettings, domain: Domain
) -> tuple[str, ...]:
    """Return the backends that all ranks of a domain can run: their plans must be one."""
    # By what was asked for, which all ranks know, not by what this one can run.
    if domain.group is None or settings.newton_schulz == "standard":
        return backends
    of_ranks = gather_objects(backends, domain.group)
    return tuple(name for name in backends if all(name in others for others in of_ranks))
