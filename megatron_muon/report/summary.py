# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory and time of Muon beside AdamW's, for a job that does not run, in a few lines."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megatron_muon.plan.layout import Splits
from megatron_muon.report.model_shape import ModelShape, Parameter
from megatron_muon.report.rank_report import Report
from megatron_muon.report.simulation import Parallelism

_FP32, _BF16 = 4, 2


class Machine(NamedTuple):
    """The GPUs of a job, and its batch.

    Args:
        gpu_gb: Memory of a GPU, GB.
        model_tflops: TFLOP/s of forward and backward passes on a GPU.
        tokens: Tokens of an iteration, all ranks together.
    """

    gpu_gb: float
    model_tflops: float
    tokens: float


class Elements(NamedTuple):
    """Elements of one rank before data-parallel sharding.

    Args:
        muon: Matrices of Muon.
        adamw: Embeddings, output layer and vectors; under FSDP2 routers too.
    """

    muon: int
    adamw: int


class Memory(NamedTuple):
    """Bytes of one rank, without activations and gathered layers.

    Args:
        model: Weights and gradients.
        muon: Optimizer states, with AdamW for the rest.
        adamw: Optimizer states if AdamW steps everything.
        step: While Muon steps: messages, stacks and results.
    """

    model: int
    muon: int
    adamw: int
    step: int


def count_elements(
    parameters: Iterable[Parameter], tensor_ranks: int = 1, *, is_fsdp2: bool = False
) -> Elements:
    """Count the elements of parameters that one tensor-parallel rank has."""
    counts = [0, 0]
    for each in parameters:
        size = math.prod(each.shape)
        if each.partition_dim is not None:
            size //= tensor_ranks
        is_router = each.name.endswith("router.weight")
        counts[len(each.shape) == 1 or (is_fsdp2 and is_router)] += size
    return Elements(*counts)


def count_layers(
    model: ModelShape, parallel: Parallelism, *, is_fsdp2: bool
) -> tuple[Elements, Elements]:
    """Count dense parameters and experts of a tensor-parallel rank of the first stage."""
    splits, layers = Splits(), range(-(-model.num_layers // parallel.pp))
    num_experts = model.num_experts // parallel.ep
    dense = [p for layer in layers for p in model.dense_parameters(layer, splits)]
    experts = [p for layer in layers for p in model.expert_parameters(layer, num_experts, splits)]
    return (
        count_elements(dense, parallel.tp, is_fsdp2=is_fsdp2),
        count_elements(experts, parallel.expert_tp),
    )


def active_elements(model: ModelShape) -> int:
    """Count the weights that multiply a token: the output layer and chosen experts included."""
    splits, total = Splits(), model.head_elements
    for layer in range(model.num_layers):
        experts = model.expert_parameters(layer, model.moe_router_topk, splits)
        total += sum(count_elements(model.dense_parameters(layer, splits) + experts))
    return total


def memory_of_a_rank(
    model: ModelShape, parallel: Parallelism, report: Report, *, is_fsdp2: bool
) -> Memory:
    """Add up the memory of a rank of the first pipeline stage.

    Megatron-FSDP keeps weights in bfloat16, and in float32 main weights and gradients; FSDP2 keeps
    weights and gradients in float32.
    """
    of_dense, of_experts = count_layers(model, parallel, is_fsdp2=is_fsdp2)
    # The last stage has the output layer.
    embedding = model.embedding_elements if parallel.pp == 1 else model.head_elements
    of_dense = of_dense._replace(adamw=of_dense.adamw + embedding // parallel.tp)
    expert_ranks = parallel.expert_tp * parallel.ep
    parts = [(of_dense, parallel.dp), (of_experts, parallel.stage_size // expert_ranks)]
    total = [0, 0, 0, 0]
    for elements, num_ranks in parts:
        shards = num_ranks // parallel.hsdp
        of_states = num_ranks if parallel.shards_outer else shards
        shared_out = {"optim": 1, "optim_grads": 2, "optim_grads_params": 3}
        level = shared_out.get(parallel.sharding, 0)
        weights, gradients, states = (
            sum(elements) // (ranks if level >= least else 1)
            for ranks, least in ((shards, 3), (shards, 2), (of_states, 1))
        )
        total[0] += _FP32 * (gradients + states) + (0 if is_fsdp2 else _BF16 * weights)
        ranks = of_states if level else 1
        total[1] += (_FP32 * elements.muon + 2 * _FP32 * elements.adamw) // ranks
        total[2] += 2 * _FP32 * sum(elements) // ranks
        # Under Megatron-FSDP results overwrite gradients.
        total[3] += _FP32 * elements.muon // ranks * is_fsdp2
    total[3] += report.max_staging_bytes
    return Memory(*total)


def summary(
    name: str,
    model: ModelShape,
    parallel: Parallelism,
    report: Report,
    machine: Machine,
    *,
    is_fsdp2: bool,
) -> Iterator[str]:
    """Yield the lines that answer: does it fit, how long is a step, and what limits it."""
    dense, experts = count_layers(model, Parallelism(1), is_fsdp2=is_fsdp2)
    num_ranks = parallel.stage_size * parallel.pp
    muon = dense.muon + experts.muon
    total = sum(dense) + sum(experts) + model.embedding_elements
    yield (
        f"{name}: {total / 1e9:,.1f} B parameters, {muon / 1e9:,.1f} B of them in matrices of Muon,"
        f" on {num_ranks} GPUs"
    )
    memory = memory_of_a_rank(model, parallel, report, is_fsdp2=is_fsdp2)
    yield (
        f"memory, GB a GPU: weights and gradients {memory.model / 1e9:.1f}, states "
        f"{memory.muon / 1e9:.1f} (AdamW {memory.adamw / 1e9:.1f}), while a step runs "
        f"{memory.step / 1e9:.1f}"
    )
    left_gb = machine.gpu_gb - (memory.model + memory.muon + memory.step) / 1e9
    with_adamw = machine.gpu_gb - (memory.model + memory.adamw) / 1e9
    yield (
        f"fits: {left_gb:.1f} of {machine.gpu_gb:.0f} GB are left for activations and gathered "
        f"layers (AdamW {with_adamw:.1f})"
        if left_gb > 0
        else f"does not fit: {-left_gb:.1f} GB more than {machine.gpu_gb:.0f} GB. Use more GPUs"
    )
    busiest = max(report.ranks, key=lambda rank: rank.newton_schulz_ns)
    traffic_ns = max(rank.traffic_ns for rank in report.ranks)
    yield (
        f"step of Muon: {report.min_step_ns / 1e6:.1f} ms at least; Newton-Schulz "
        f"{busiest.newton_schulz_ns / 1e6:.1f} ms on the busiest GPU, messages "
        f"{traffic_ns / 1e6:.1f} ms on the busiest link"
    )
    iteration_s = 6 * active_elements(model) * machine.tokens
    iteration_s /= num_ranks * machine.model_tflops * 1e12
    share = report.min_step_ns / 1e9 / (iteration_s + report.min_step_ns / 1e9)
    yield (
        f"iteration of {machine.tokens / 1e6:.1f} M tokens: {iteration_s:.2f} s of forward and "
        f"backward passes at {machine.model_tflops:.0f} TFLOP/s a GPU; the step is {share:.1%}"
    )
    yield f"limit: {_limit(report, traffic_ns, is_fsdp2=is_fsdp2)}"


def _limit(report: Report, traffic_ns: int, *, is_fsdp2: bool) -> str:
    """Name what bounds a step, and the setting to change."""
    prefix = "ExchangeSettings: " if is_fsdp2 else "--muon-fsdp-"
    names = {name: prefix + (name.replace("-", "_") if is_fsdp2 else name) for name in _SETTINGS}
    if traffic_ns > report.busiest_ns:
        return (
            "messages. Fewer replicas (HSDP, ZeRO-0) send fewer bytes; pass measured rates as "
            f"{names['cost-model']}"
        )
    if report.busiest_over_ideal > 1.5:
        return (
            f"too few matrices for the ranks: the busiest has {report.busiest_over_ideal:.1f} "
            f"times the mean. A higher {names['max-owners']} splits them further"
        )
    return (
        f"Newton-Schulz, spread evenly ({report.busiest_over_ideal:.2f} times the mean). "
        f"{names['newton-schulz']} auto takes fewer operations"
    )


_SETTINGS = ("cost-model", "max-owners", "newton-schulz")
