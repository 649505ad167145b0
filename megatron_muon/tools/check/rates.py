# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Rates of this machine, beside the rates that plans assume."""

import functools
import time
from collections.abc import Callable
from statistics import linear_regression, median

import torch
import torch.distributed as dist

from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.newton_schulz.backend import NewtonSchulzArgs
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.cost import gpu_rates
from megatron_muon.runtime.agreement import gather_objects, num_ranks_on_node, ranks_per_node
from megatron_muon.tools.check.verdicts import Finding

# Timed calls of a measurement, after one that is not timed.
_ROUNDS = 5


class Rates:
    """Measures the rates of the ranks of a job, which all measure together.

    Args:
        device: Of this rank.

    Attributes:
        measured: Rates by their names in ``--muon-fsdp-cost-model``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_gpu = device, device.type == "cuda"
        self._assumed = gpu_rates(
            torch.cuda.get_device_capability(device)[0] if self._is_gpu else 9
        )
        self.measured: dict[str, float] = {}

    def check_newton_schulz(self) -> Finding:
        """Time Newton-Schulz by the shorter side n, and fit ``tflops * n / (n + half_rate_side)``.

        It is a line of 1 / rate over 1 / n.
        """
        # A GPU multiplies bf16. Most CPUs have no instructions for it.
        dtype = torch.bfloat16 if self._is_gpu else torch.float32
        settings = NewtonSchulzSettings(5, "quintic", self._is_gpu, lambda rows, cols: (1.0, 1.0))
        rates = {}
        for n in (512, 1024, 2048, 4096) if self._is_gpu else (64, 128):
            shape = (n, 4 * n)
            size = self._assumed.stack_size(*shape)
            # Of norm 1, nearly.
            stack = (torch.randn(size, *shape, device=self._device) / (2 * n)).to(dtype)
            args = NewtonSchulzArgs(settings, shape, is_normalized=self._is_gpu)
            seconds = self._seconds(functools.partial(BACKENDS["standard"].run, stack, args))
            rates[n] = size * self._assumed.work(*shape).flops / seconds / 1e12
        slope, constant = linear_regression(
            [1 / n for n in rates], [1 / rate for rate in rates.values()]
        )
        tflops, half_rate_side = max(rates.values()), 0.0
        if slope >= 0 and constant > 0:
            tflops, half_rate_side = 1 / constant, slope / constant
        self.measured |= {"tflops": tflops, "half_rate_side": half_rate_side}
        assumed = self._assumed.tflops * n / (n + self._assumed.half_rate_side)
        by_side = ", ".join(f"{side}: {rate:.3g}" for side, rate in rates.items())
        return Finding("PASS", f"TFLOP/s by side {by_side}; plans assume {assumed:.3g} for {n}")

    def check_all_to_all(self) -> Finding:
        """Time an all-to-all of all ranks: inside the node, or between nodes if there are several.

        Bytes that stay inside a node do not count beside those that leave it.
        """
        num_ranks = dist.get_world_size()
        if num_ranks == 1:
            return Finding("SKIP", "one rank exchanges nothing")
        # None without a launcher.
        on_node = ranks_per_node(gather_objects(num_ranks_on_node())) or num_ranks
        is_one_node = on_node == num_ranks
        name = "gbps" if is_one_node else "gbps_between_nodes"
        # 268 MB of float32, or what one core moves in milliseconds.
        num_elements = (2**26 if self._is_gpu else 2**21) // num_ranks * num_ranks
        sent = torch.zeros(num_elements, device=self._device)
        exchange = functools.partial(dist.all_to_all_single, torch.empty_like(sent), sent)
        # The share of this rank itself does not move.
        share = 1 - (1 if is_one_node else on_node) / num_ranks
        rate = self.measured[name] = sent.nbytes * share / self._seconds(exchange) / 1e9
        assumed = getattr(self._assumed, name)
        return Finding("PASS", f"{name} {rate:.3g}, plans assume {assumed:g}")

    def _seconds(self, call: Callable[[], object]) -> float:
        """Return the median time of a call, of the slowest rank."""
        wait = torch.cuda.synchronize if self._is_gpu else lambda: None
        times = []
        for _ in range(_ROUNDS + 1):
            dist.barrier()
            wait()
            start = time.perf_counter()
            call()
            wait()
            times.append(time.perf_counter() - start)
        slowest = torch.tensor(median(times[1:]), dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()
