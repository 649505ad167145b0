# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The one list of what CPU ranks replace, and why."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_muon.cpu_ranks import (
    bf16_products,
    collectives,
    dataset_helpers,
    megatron_core,
    torch_cuda,
)
from megatron_muon.cpu_ranks.torch_cuda import constant, refusal


@dataclass(frozen=True)
class Replacement:
    """One name given another value.

    Attributes:
        target: Dotted path of the name, module first.
        replacement: The new value or, where ``wraps``, a function from the original to it.
        reason: Why, in one clause.
        wraps: Whether ``replacement`` takes the original.
    """

    target: str
    replacement: Any
    reason: str
    wraps: bool = False


@dataclass(frozen=True)
class KernelReplacement:
    """CPU kernels of some of torch's operators given another implementation.

    They have no name in Python to replace: a backward pass looks them up in torch's dispatcher.

    Attributes:
        operators: Names of the operators, with their overloads.
        install: Replaces the kernels; returns what ``remove`` takes.
        remove: Restores them.
        is_needed: Returns whether this machine needs it.
        reason: Why, in one clause.
    """

    operators: tuple[str, ...]
    install: Callable[[], Any]
    remove: Callable[[Any], None]
    is_needed: Callable[[], bool]
    reason: str


_ONE_DEVICE = "one device per rank, the CPU, always present"
_IN_ORDER = "a CPU runs in program order"
_ONE_GENERATOR = "the device draws from the CPU's generator"
_NO_COUNTERS = "no device memory to count"
_NO_AVERAGE = "gloo has no average"
_NOT_BEHIND = "a stand-in stream cannot keep a buffer alive while a collective uses it"
_UNEVEN = "gloo gathers and scatters equal blocks only"

_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"

TORCH_REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement("torch.cuda.is_available", constant(True), "Megatron asserts a device"),
    Replacement("torch.cuda.device_count", constant(1), _ONE_DEVICE),
    Replacement("torch.cuda.current_device", constant(0), _ONE_DEVICE),
    Replacement("torch.cuda.set_device", constant(None), _ONE_DEVICE),
    Replacement("torch.cuda.device", torch_cuda.NullContext, _ONE_DEVICE),
    Replacement("torch.cuda.get_device_name", constant("cpu"), _ONE_DEVICE),
    Replacement(
        "torch.cuda.get_device_properties", constant(torch_cuda.CpuDeviceProperties), _ONE_DEVICE
    ),
    Replacement(
        "torch.cuda.get_device_capability",
        constant((torch_cuda.CpuDeviceProperties.major, torch_cuda.CpuDeviceProperties.minor)),
        _ONE_DEVICE,
    ),
    Replacement("torch.cuda._lazy_init", constant(None), "no driver to initialise"),
    Replacement("torch.cuda._lazy_call", torch_cuda.lazy_call, "no driver to wait for"),
    Replacement("torch.cuda.Stream", torch_cuda.CpuStream, _IN_ORDER),
    Replacement("torch.cuda.Event", torch_cuda.CpuEvent, _IN_ORDER),
    Replacement("torch.cuda.stream", torch_cuda.NullContext, _IN_ORDER),
    Replacement("torch.cuda.set_stream", constant(None), _IN_ORDER),
    Replacement("torch.cuda.current_stream", constant(torch_cuda.DEFAULT_STREAM), _IN_ORDER),
    Replacement("torch.cuda.default_stream", constant(torch_cuda.DEFAULT_STREAM), _IN_ORDER),
    Replacement("torch.cuda.synchronize", constant(None), _IN_ORDER),
    Replacement("torch.cuda.is_current_stream_capturing", constant(False), "no graphs"),
    Replacement("torch.cuda.CUDAGraph", refusal("CUDA graphs"), "no graphs"),
    Replacement("torch.cuda.MemPool", refusal("--use-nccl-ub"), "no NCCL memory pools"),
    Replacement("torch.cuda.default_generators", torch_cuda.CpuGenerators(), _ONE_GENERATOR),
    Replacement("torch.cuda.manual_seed", torch_cuda.manual_seed, _ONE_GENERATOR),
    # torch.manual_seed calls it after seeding the CPU's generator: seeding twice is harmless.
    Replacement("torch.cuda.manual_seed_all", torch_cuda.manual_seed, _ONE_GENERATOR),
    Replacement("torch.cuda.get_rng_state", torch_cuda.get_rng_state, _ONE_GENERATOR),
    Replacement("torch.cuda.set_rng_state", torch_cuda.set_rng_state, _ONE_GENERATOR),
    Replacement("torch.cuda.random.get_rng_state", torch_cuda.get_rng_state, _ONE_GENERATOR),
    Replacement("torch.cuda.random.set_rng_state", torch_cuda.set_rng_state, _ONE_GENERATOR),
    Replacement("torch.cuda.random.manual_seed", torch_cuda.manual_seed, _ONE_GENERATOR),
    Replacement("torch.cuda.random.manual_seed_all", torch_cuda.manual_seed, _ONE_GENERATOR),
    Replacement("torch.cuda.empty_cache", constant(None), _NO_COUNTERS),
    Replacement("torch.cuda.memory_allocated", constant(0), _NO_COUNTERS),
    Replacement("torch.cuda.memory_reserved", constant(0), _NO_COUNTERS),
    Replacement("torch.cuda.max_memory_allocated", constant(0), _NO_COUNTERS),
    Replacement("torch.cuda.max_memory_reserved", constant(0), _NO_COUNTERS),
    Replacement("torch.cuda.reset_peak_memory_stats", constant(None), _NO_COUNTERS),
    Replacement("torch.cuda.memory_stats", constant(Counter()), "every counter is zero"),
    Replacement("torch.cuda.device_memory_used", constant(0), _NO_COUNTERS),
    Replacement(
        "torch.cuda.mem_get_info",
        constant((torch_cuda.CpuDeviceProperties.total_memory,) * 2),
        _NO_COUNTERS,
    ),
    Replacement("torch.Tensor.cuda", torch_cuda.return_self, "tensors stay on the CPU"),
    Replacement("torch.Tensor.pin_memory", torch_cuda.return_self, "nothing to copy to"),
    Replacement("torch.Tensor.record_stream", constant(None), _IN_ORDER),
    Replacement(
        "torch.utils.data.DataLoader.__init__",
        torch_cuda.without_pinning,
        "nothing to copy to",
        True,
    ),
    Replacement(
        "torch.distributed.distributed_c10d._new_process_group_helper",
        collectives.as_gloo,
        "NCCL needs GPUs; --distributed-backend defaults to it",
        True,
    ),
    Replacement(
        "torch.distributed.device_mesh.DeviceMesh.from_group",
        collectives.mesh_from_group_on_cpu,
        "Megatron asks for CUDA meshes by name",
        True,
    ),
) + tuple(
    Replacement(f"{module}.{name}", wrapper, reason, True)
    for name, wrapper, reason in (
        ("all_reduce", collectives.averaging_all_reduce, _NO_AVERAGE),
        ("reduce_scatter_tensor", collectives.averaging_reduce_scatter_tensor, _NO_AVERAGE),
        ("all_gather", collectives.uneven_all_gather, _UNEVEN),
        ("reduce_scatter", collectives.uneven_reduce_scatter, _UNEVEN),
        ("_coalescing_manager", collectives.waiting_coalescing_manager, _NOT_BEHIND),
    )
    # The second name is what the coalescing manager compares with.
    for module in ("torch.distributed", "torch.distributed.distributed_c10d")
)

MEGATRON_REPLACEMENTS: tuple[Replacement, ...] = (
    Replacement(
        "megatron.core.datasets.utils.compile_helpers",
        dataset_helpers.compile_where_missing_from,
        "the wheel ships the helpers compiled, and no Makefile",
        True,
    ),
    Replacement(
        "megatron.core.parallel_state.get_nccl_options",
        constant(None),
        "gloo takes no NCCL options",
    ),
    Replacement(
        "megatron.core.parallel_state.initialize_model_parallel",
        megatron_core.model_parallel_without_context_from,
        "context parallelism needs Transformer Engine",
        True,
    ),
    Replacement(
        "megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork",
        megatron_core.fork_rng,
        "device and CPU share a generator, which the original warns of twice an iteration",
    ),
    Replacement(
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        megatron_core.move_to_cpu,
        "the original leaves CPU tensors tensors where arrays are expected",
    ),
    Replacement(
        "megatron.core.transformer.dot_product_attention.DotProductAttention.__init__",
        megatron_core.attention_from,
        "multi-latent attention passes widths that only Transformer Engine's attention takes, and "
        "QK-clip reads logits that only it records",
        True,
    ),
    Replacement(
        "megatron.core.utils.is_te_min_version",
        megatron_core.release_of_qk_clip_from,
        "QK-clip asserts a release of Transformer Engine, in whose place the row above records",
        True,
    ),
    Replacement(
        "megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__",
        megatron_core.torch_norm_from,
        "torch norms refuse sequence parallelism, and Transformer Engine's need a GPU",
        True,
    ),
    Replacement(
        f"{_FSDP}.param_and_grad_buffer.gradient_reduce_preprocessing",
        megatron_core.preprocessing_without_premul_from,
        "gloo has no pre-multiplied sum",
        True,
    ),
)

REPLACEMENTS: tuple[Replacement, ...] = TORCH_REPLACEMENTS + MEGATRON_REPLACEMENTS

KERNEL_REPLACEMENTS: tuple[KernelReplacement, ...] = (
    KernelReplacement(
        bf16_products.OPERATORS,
        bf16_products.install,
        bf16_products.remove,
        bf16_products.lacks_bf16_instructions,
        "a CPU without bf16 instructions multiplies bf16 fifty times slower than fp32",
    ),
)

__all__ = [
    "KERNEL_REPLACEMENTS",
    "MEGATRON_REPLACEMENTS",
    "REPLACEMENTS",
    "TORCH_REPLACEMENTS",
    "KernelReplacement",
    "Replacement",
]
