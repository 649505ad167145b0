# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Rates of this machine, beside the rates that plans assume."""

import functools
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_muon.fsdp2.muon import Muon
from megatron_muon.newton_schulz import BACKENDS
from megatron_muon.newton_schulz.backend import NewtonSchulzArgs
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.plan.cost import CostModel, gpu_rates
from megatron_muon.plan.layout import Splits
from megatron_muon.runtime.agreement import gather_objects, num_ranks_on_node, ranks_per_node
from megatron_muon.runtime.row_moves import RowMoves, Side, Tensors
from megatron_muon.tools.check.verdicts import Finding
from megatron_muon.tools.plan.model_shape import PRESETS

# One core a rank, gloo over the loopback. Stacks pay for the host's time of a call: 2 to 16 times
# up to 64 rows of bf16, half at 128, a tenth at 256, nothing above.
CPU_RANKS = CostModel(
    tflops=0.4,
    half_rate_side=0.0,
    gbps=2.0,
    gbps_between_nodes=2.0,
    kernel_us=20.0,
    all_reduce_us=500.0,
    stack_tiles=32,
)
# Below this share of an assumed rate, plans made with it are far from the best.
_SLOW = 0.6
_ADVICE = "Pass the measured rates (last line) as --muon-fsdp-cost-model"


class Rates:
    """Measures the rates of the ranks of a job, which all measure together.

    Args:
        device: Of this rank.
        rounds: Timed calls of each measurement, after one that is not timed.
    """

    def __init__(self, device: torch.device, rounds: int = 5) -> None:
        self._device, self._rounds = device, rounds
        is_gpu = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device)[0] if is_gpu else 0
        self._assumed = gpu_rates(capability) if is_gpu else CPU_RANKS
        # Elements of a measurement: 268 MB of float32, or what one core moves in milliseconds.
        self._numel = 2**26 if is_gpu else 2**21
        self._sides = (512, 1024, 2048, 4096) if is_gpu else (64, 128, 256)
        self.measured: dict[str, float] = {}

    def cost_model(self) -> str:
        """Return the measured rates as the value of ``--muon-fsdp-cost-model``."""
        return ",".join(f"{name}={value:.4g}" for name, value in self.measured.items())

    def check_row_moves(self) -> Finding:
        """Time rows moved to a message, divided and rounded, beside torch's plain copy."""
        source = torch.randn(self._numel, device=self._device).view(-1, 4096)
        target = torch.empty_like(source, dtype=torch.bfloat16)
        tensors = Tensors(source.view(-1), self._device)
        tensors.bind([source, target])
        tensors.update()
        sides = Side(source.dtype), Side(target.dtype)
        moves = RowMoves([(1, 0, 0, 0, 2, 0, 0, 0, *source.shape, 0)], *sides, tensors)
        norms = torch.ones(1, device=self._device)
        num_bytes = source.nbytes + target.nbytes
        ours = num_bytes / self._seconds(lambda: moves.run(norms)) / 1e9
        copy = num_bytes / self._seconds(lambda: target.copy_(source)) / 1e9
        text = f"{ours:.3g} GB/s, torch's copy {copy:.3g} GB/s"
        if self._device.type == "cuda" and ours < _SLOW * copy:
            return Finding("SLOW", text, "Report it with the name of the GPU")
        return Finding("PASS", text)

    def check_newton_schulz(self) -> Finding:
        """Time Newton-Schulz by the shorter side, and fit ``tflops * n / (n + half_rate_side)``."""
        # A GPU multiplies bf16. Most CPUs have no instructions for it.
        is_gpu = self._device.type == "cuda"
        dtype = torch.bfloat16 if is_gpu else torch.float32
        settings = NewtonSchulzSettings(5, "quintic", is_gpu, lambda rows, cols: (1.0, 1.0))
        rates = []
        for side in self._sides:
            shape = (side, 4 * side)
            size = self._assumed.stack_size(*shape)
            # Of norm 1, nearly.
            stack = (torch.randn(size, *shape, device=self._device) / (2 * side)).to(dtype)
            args = NewtonSchulzArgs(settings, shape, is_normalized=is_gpu)
            seconds = self._seconds(functools.partial(BACKENDS["standard"].run, stack, args))
            rates.append(size * self._assumed.work(*shape).flops / seconds / 1e12)
        tflops, half_rate_side = fitted_curve(self._sides, rates)
        self.measured |= {"tflops": tflops, "half_rate_side": half_rate_side}
        pairs = zip(self._sides, rates, strict=True)
        text = "TFLOP/s by side " + ", ".join(f"{n}: {rate:.3g}" for n, rate in pairs)
        n = self._sides[-1]
        assumed = self._assumed.tflops * n / (n + self._assumed.half_rate_side)
        return self._beside(text, rates[-1], assumed)

    def check_all_to_all(self) -> Finding:
        """Time an all-to-all inside nodes, and between ranks of equal local rank on all nodes."""
        num_ranks = dist.get_world_size()
        if num_ranks == 1:
            return Finding("SKIP", "one rank exchanges nothing")
        # None without a launcher. The same number on all ranks, as they choose groups by it.
        on_node = ranks_per_node(gather_objects(num_ranks_on_node())) or num_ranks
        mesh = init_device_mesh(self._device.type, (num_ranks // on_node, on_node))
        texts, ratios = [], []
        for axis, name in ((1, "gbps"), (0, "gbps_between_nodes")):
            group = mesh.get_group(axis)
            size = dist.get_world_size(group)
            if size == 1:
                continue
            sent = torch.zeros(self._numel // size * size, device=self._device)
            exchange = functools.partial(
                dist.all_to_all_single, torch.empty_like(sent), sent, group=group
            )
            seconds = self._seconds(exchange)
            # The share of this rank itself does not move.
            self.measured[name] = sent.nbytes * (size - 1) / size / seconds / 1e9
            where = "inside a node" if axis else "between nodes"
            texts.append(f"{self.measured[name]:.3g} GB/s {where}")
            ratios.append(self.measured[name] / getattr(self._assumed, name))
        return self._beside(", ".join(texts), min(ratios), 1.0)

    def check_step(self, preset: str, num_layers: int) -> Finding:
        """Time a step of Muon on layers of a model beside AdamW's on the same shards."""
        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
        shapes = [
            parameter.shape
            for layer in range(num_layers)
            for parameter in PRESETS[preset].dense_parameters(layer, Splits())
            if len(parameter.shape) == 2
        ]
        params = []
        for shape in shapes:
            whole = torch.randn(shape, device=self._device) * 0.02
            params.append(torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
            params[-1].grad = torch.ones_like(params[-1])
        seconds = []
        for optimizer in (Muon(params), torch.optim.AdamW(params)):
            seconds.append(self._seconds(optimizer.step))
        numel = sum(param.numel() for param in params)
        ms, adam_ms = (time_of_step * 1e3 for time_of_step in seconds)
        return Finding(
            "PASS",
            f"{num_layers} layers of {preset}, {numel / 1e6:.0f} M elements: Muon {ms:.1f} ms, "
            f"AdamW {adam_ms:.1f} ms, {ms / adam_ms:.1f} times",
        )

    def _beside(self, text: str, rate: float, assumed: float) -> Finding:
        """Compare a rate with the one that plans assume, on GPUs."""
        if self._device.type == "cuda" and rate < _SLOW * assumed:
            text = f"{text}; {rate / assumed:.0%} of the assumed rate"
            return Finding("SLOW", text, _ADVICE)
        return Finding("PASS", text)

    def _seconds(self, call: Callable[[], object]) -> float:
        """Return the median time of a call, of the slowest rank."""
        times = []
        for _ in range(self._rounds + 1):
            dist.barrier()
            self._synchronize()
            start = time.perf_counter()
            call()
            self._synchronize()
            times.append(time.perf_counter() - start)
        slowest = torch.tensor(median(times[1:]), dtype=torch.float64, device=self._device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def fitted_curve(sides: Sequence[int], rates: Sequence[float]) -> tuple[float, float]:
    """Fit ``rate = tflops * n / (n + half_rate_side)`` by least squares of 1 / rate over 1 / n.

    Args:
        sides: Shorter sides n.
        rates: TFLOP/s by side.

    Returns:
        ``tflops`` and ``half_rate_side``; 0 for the latter where rates do not grow.
    """
    columns = torch.tensor([[1.0, 1 / n] for n in sides], dtype=torch.float64)
    inverse = torch.tensor([[1 / rate] for rate in rates], dtype=torch.float64)
    constant, slope = torch.linalg.lstsq(columns, inverse).solution.flatten().tolist()
    if constant <= 0 or slope < 0:
        return max(rates), 0.0
    return 1 / constant, slope / constant
