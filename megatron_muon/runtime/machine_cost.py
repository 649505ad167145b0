# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The cost model of the machine that a job runs on, the same on all ranks."""

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz.registry import usable_backends
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.cost import CPU_RANKS, CostModel, gpu_rates
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.agreement import raise_where_any_rank_fails
from megatron_muon.runtime.domain import Domain


def machine_costs(
    domains: Sequence[Domain],
    ns_settings: NewtonSchulzSettings,
    settings: ExchangeSettings,
    device: torch.device,
) -> list[CostModel]:
    """Return the costs per domain: backends that all its ranks can run, and rates.

    Args:
        domains: Ranks that plan together, in one order on all ranks. A rank may have none.
        ns_settings: Steps, coefficients and precision.
        settings: Rates that the user gives.
        device: Of this rank.

    Raises:
        RuntimeError: On all ranks, when one cannot run the backend that was asked for.

    Communication: where another backend than ``standard`` may run, a flag over all ranks, and a
        gather of objects over every domain. GPUs of one domain are expected to be the same model:
        ranks with different rates are found when plans are compared.
    """
    backends = _own_backends(ns_settings, settings, device)
    return [
        _rates(_shared_backends(backends, settings, domain), ns_settings, settings, domain, device)
        for domain in domains
    ]


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
        coefficient_type=ns_settings.coefficient_type,
        backends=backends,
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
