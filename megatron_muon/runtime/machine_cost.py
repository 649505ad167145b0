# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings of a job resolved for its machine: the numbers of a plan, the same on all ranks."""

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.methods import Namo, StackMethod
from megatron_muon.newton_schulz.registry import usable_backends
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.cost import CPU_RANKS, CostModel, gpu_rates
from megatron_muon.plan.settings import ExchangeSettings, PlanSettings
from megatron_muon.runtime.agreement import raise_where_any_rank_fails
from megatron_muon.runtime.domain import Domain


def resolve(
    settings: ExchangeSettings,
    ns_settings: NewtonSchulzSettings,
    domains: Sequence[Domain],
    device: torch.device,
) -> list[PlanSettings]:
    """Return the numbers that the plan of each domain is made with, the same on all its ranks.

    Args:
        settings: Settings of the user.
        ns_settings: Steps, coefficients, precision and method.
        domains: Ranks that plan together, in one order on all ranks. A rank may have none.
        device: Of this rank.

    Raises:
        ValueError: A bf16 wire was asked for, and Newton-Schulz runs in fp32.
        RuntimeError: On all ranks, when one cannot run the backend that was asked for.

    Communication: where another backend than ``standard`` may run, a flag over all ranks, and a
        gather of objects over every domain. GPUs of one domain are expected to be the same model:
        ranks with different rates are found when plans are compared.
    """
    backends = _own_backends(ns_settings, settings, device)
    return [
        _for_method(
            settings.plan_settings(
                _rates(
                    _shared_backends(backends, settings, domain),
                    ns_settings,
                    settings,
                    domain,
                    device,
                ),
                is_bf16=ns_settings.is_bf16,
            ),
            ns_settings,
        )
        for domain in domains
    ]


def _for_method(plan: PlanSettings, ns_settings: NewtonSchulzSettings) -> PlanSettings:
    """Return what a method or a function of the user needs."""
    method, wire = ns_settings.method, plan.wire
    if isinstance(method, Namo):
        wire = dataclasses.replace(wire, num_norms=2)
    elif method is not None:
        # What it returns is not bf16-valued.
        wire = dataclasses.replace(wire, scatter_dtype="float32")
    # Both are called with whole matrices.
    is_whole = isinstance(method, StackMethod) or ns_settings.function is not None
    return dataclasses.replace(plan, wire=wire, max_parts=1 if is_whole else plan.max_parts)


def _rates(
    backends: tuple[str, ...],
    ns_settings: NewtonSchulzSettings,
    settings: ExchangeSettings,
    domain: Domain,
    device: torch.device,
) -> CostModel:
    """Return the rates of the device, with those that the user gives in their place."""
    # A plan for CPU ranks must not assume a GPU's kernels.
    known = CPU_RANKS
    if device.type == "cuda":
        known = gpu_rates(torch.cuda.get_device_capability(device)[0])
    defaults = dataclasses.replace(
        known,
        num_ns_steps=ns_settings.steps,
        backends=backends,
        coefficient_type=ns_settings.coefficient_type,
    )
    if domain.ranks_per_node is not None:
        defaults = dataclasses.replace(defaults, ranks_per_node=domain.ranks_per_node)
    return CostModel.parse(settings.cost_model, defaults)


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
