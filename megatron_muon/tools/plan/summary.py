# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory and time of Muon beside AdamW's, for a job that does not run, in a few lines."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, get_args

from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.layout import Splits
from megatron_muon.tools.plan.model_shape import ModelShape, Parameter
from megatron_muon.tools.plan.rank_report import Report
from megatron_muon.tools.plan.simulation import Parallelism, Sharding

_FP32, _BF16 = 4, 2


class Elements(NamedTuple):
    """Elements by optimizer.

    Args:
        muon: Matrices of Muon.
        adamw: All others: embeddings, output layer, vectors, under FSDP2 routers too.
    """

    muon: int
    adamw: int


class Memory(NamedTuple):
    """Bytes of one rank, without activations and gathered layers.

    Args:
        model: Weights and gradients.
        muon: Optimizer states, with AdamW for the rest.
        adamw: Optimizer states if AdamW steps everything.
        muon_step: Results, and float32 copies of gradients, while Muon steps, without what the plan
            needs.
        adamw_step: Float32 copies of gradients while AdamW steps.
    """

    model: int
    muon: int
    adamw: int
    muon_step: int
    adamw_step: int


class Size(NamedTuple):
    """Parameters of a model.

    Args:
        total: All of them.
        muon: In matrices of Muon.
        active: That multiply a token: the output layer and chosen experts included.
        has_embeddings: Whether embeddings count.
    """

    total: int
    muon: int
    active: int
    has_embeddings: bool = True


def _count(layers: Iterable[Sequence[Parameter]], tensor_ranks: int) -> Elements:
    """Count the elements of parameters that one tensor-parallel rank has."""
    counts = [0, 0]
    for parameter in itertools.chain(*layers):
        num_ranks = 1 if parameter.partition_dim is None else tensor_ranks
        counts[len(parameter.shape) == 1] += math.prod(parameter.shape) // num_ranks
    return Elements(*counts)


def count_layers(model: ModelShape, parallel: Parallelism) -> tuple[Elements, Elements]:
    """Count dense parameters and experts of a tensor-parallel rank of the first stage."""
    dense, experts = model.stage(parallel.pp, parallel.ep, Splits())
    return _count(dense, parallel.tp), _count(experts, parallel.expert_tp)


def size_of_shape(model: ModelShape) -> Size:
    """Count the parameters of a decoder of Megatron-LM."""
    dense, experts = count_layers(model, Parallelism(1))
    return Size(
        total=sum(dense) + sum(experts) + model.embedding_elements,
        muon=dense.muon + experts.muon,
        active=sum(dense)
        + sum(experts) * model.moe_router_topk // max(1, model.num_experts)
        + model.head_elements,
        has_embeddings=model.vocab_size > 0,
    )


def memory_under_megatron_fsdp(
    model: ModelShape, parallel: Parallelism, *, has_fp32_gradients: bool
) -> Memory:
    """Add up the memory of a rank of the first pipeline stage.

    Weights and gradients are bfloat16, main weights float32. A step has float32 copies of the
    gradients that it needs, unless they are float32 (``--megatron-fsdp-main-grads-dtype``), and
    results overwrite gradients. Source: ``param_and_grad_buffer.py`` of megatron-core 0.19.2.
    """
    of_dense, of_experts = count_layers(model, parallel)
    # The last stage has the output layer.
    embedding = model.embedding_elements if parallel.pp == 1 else model.head_elements
    of_dense = of_dense._replace(adamw=of_dense.adamw + embedding // parallel.tp)
    num_expert_ranks = parallel.stage_size // (parallel.expert_tp * parallel.ep)
    level = get_args(Sharding).index(parallel.sharding)
    gradient_bytes = _FP32 if has_fp32_gradients else _BF16
    model_bytes, states = 0, [0, 0]
    for elements, num_ranks in ((of_dense, parallel.dp), (of_experts, num_expert_ranks)):
        inner = num_ranks // parallel.hsdp
        outer = num_ranks if parallel.hfsdp else inner
        model_bytes += _BF16 * sum(elements) // (inner if level >= 3 else 1)
        model_bytes += gradient_bytes * sum(elements) // (inner if level >= 2 else 1)
        for kind, number in enumerate(elements):
            states[kind] += number // (outer if level >= 1 else 1)
    copies = 0 if has_fp32_gradients else _FP32 * sum(states)
    return _memory(Elements(*states), model_bytes, copies, copies)


def memory_under_fsdp2(elements: Elements) -> Memory:
    """Add up the memory of a rank with these elements; weights and gradients are float32."""
    return _memory(elements, _FP32 * sum(elements), _FP32 * elements.muon, 0)


def _memory(elements: Elements, model_bytes: int, muon_step: int, adamw_step: int) -> Memory:
    """Add float32 weights and the states of both optimizers, for the elements of a rank."""
    muon, adamw = (_FP32 * number for number in elements)
    states = muon + adamw
    return Memory(model_bytes + states, states + adamw, 2 * states, muon_step, adamw_step)


def summary(
    name: str,
    size: Size,
    num_ranks: int,
    report: Report,
    memory: Memory,
    *,
    gpu_gb: float,
    model_tflops: float,
    tokens: float,
) -> Iterator[str]:
    """Yield the lines that answer: does it fit, how long is a step, and what limits it.

    Args:
        name: Name of the model.
        size: Its parameters.
        num_ranks: Ranks of all pipeline stages.
        report: Figures of the planned ranks.
        memory: Bytes of a rank.
        gpu_gb: Memory of a GPU, GB.
        model_tflops: TFLOP/s of forward and backward passes on a GPU.
        tokens: Tokens of an iteration, all ranks together.
    """
    without = "" if size.has_embeddings else ", without embeddings (no --vocab-size)"
    yield (
        f"{name}: {size.total / 1e9:,.1f} B parameters{without}, {size.muon / 1e9:,.1f} B of them "
        f"in matrices of Muon, on {num_ranks} GPUs"
    )
    in_step = memory.muon_step + max(r.staging_bytes + r.workspace_bytes for r in report.ranks)
    yield (
        f"memory, GB a GPU: weights and gradients {memory.model / 1e9:.1f}, states "
        f"{memory.muon / 1e9:.1f} (AdamW {memory.adamw / 1e9:.1f}), while a step runs "
        f"{in_step / 1e9:.1f} (AdamW {memory.adamw_step / 1e9:.1f})"
    )
    left_gb, with_adamw = (
        gpu_gb - (memory.model + states + step) / 1e9
        for states, step in ((memory.muon, in_step), (memory.adamw, memory.adamw_step))
    )
    yield (
        f"fits: {left_gb:.1f} of {gpu_gb:.0f} GB are left for activations and gathered "
        f"layers (AdamW {with_adamw:.1f})"
        if left_gb > 0
        else f"does not fit: {-left_gb:.1f} GB more than {gpu_gb:.0f} GB. Use more GPUs"
    )
    slowest = max(report.ranks, key=lambda rank: rank.step_ns)
    waits_ns = slowest.step_ns - slowest.newton_schulz_ns
    yield (
        f"step of Muon: {slowest.step_ns / 1e6:.1f} ms on the slowest GPU, of which Newton-Schulz "
        f"{slowest.newton_schulz_ns / 1e6:.1f} ms and waits for messages {waits_ns / 1e6:.1f} ms"
    )
    num_split = sum(len(matrix["owners"]) > 1 for matrix in report.matrices)
    sent_mb = sum(rank.bytes_sent for rank in report.ranks) / len(report.ranks) / 1e6
    staging_gb = max(rank.staging_bytes for rank in report.ranks) / 1e9
    yield (
        f"exchange: {len(report.matrices)} matrices, {num_split} of them split; a GPU sends "
        f"{sent_mb:,.0f} MB, and needs {staging_gb:.1f} GB for messages and stacks"
    )
    iteration_s = 6 * size.active * tokens / (num_ranks * model_tflops * 1e12)
    share = slowest.step_ns / (iteration_s * 1e9 + slowest.step_ns)
    yield (
        f"iteration of {tokens / 1e6:.1f} M tokens: {iteration_s:.2f} s of forward and "
        f"backward passes at {model_tflops:.0f} TFLOP/s a GPU; the step is {share:.1%}"
    )
    yield f"bound by {_bound(report)}"


def summary_of_soap(plans: Sequence[ExchangePlan], report: Report) -> Iterator[str]:
    """Yield the lines that tell states, arithmetic and messages of SOAP.

    Source: ``soap.py`` of emerging-optimizers 0.3.0, which renews eigenbases in every step.
    """
    states, operations = Counter[int](), Counter[int]()
    for plan in plans:
        for matrix, (owner,) in zip(plan.matrices, plan.owners, strict=True):
            for m, n in matrix.blocks:
                # A factor and an eigenbasis of each side, and the averages of Adam, in float32.
                states[owner] += 8 * (m * m + n * n + m * n)
                # Products of the matrix with each side. Of a side two products and its QR.
                operations[owner] += 10 * m * n * (m + n) + 6 * (m**3 + n**3)
    sent = Counter({rank.rank: rank.bytes_sent for rank in report.ranks})
    for text, of in (("MB of states", states), ("MFLOP a step", operations), ("MB sent", sent)):
        mean, most = of.total() / len(report.ranks) / 1e6, max(of.values()) / 1e6
        yield f"SOAP, {text} a GPU: {mean:,.0f}, at most {most:,.0f}"


def _bound(report: Report) -> str:
    """Name what bounds a step, and the setting to change."""
    ratio = report.busiest_over_ideal
    if max(r.traffic_ns for r in report.ranks) > max(r.newton_schulz_ns for r in report.ranks):
        return (
            "messages: fewer replicas (HSDP, ZeRO-0) send fewer bytes; pass measured rates as "
            "--muon-fsdp-cost-model"
        )
    if ratio > 1.5:
        return (
            f"too few matrices: the busiest rank has {ratio:.1f} times the mean. A higher "
            "--muon-fsdp-max-owners splits them further"
        )
    return (
        f"Newton-Schulz, spread evenly ({ratio:.2f} times the mean), in the form that "
        "--muon-fsdp-newton-schulz names"
    )
