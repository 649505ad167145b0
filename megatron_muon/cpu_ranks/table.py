# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The one list of what CPU ranks replace, and why."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megatron_muon.cpu_ranks import collectives, dataset_helpers, megatron_core, torch_cuda
from megatron_muon.cpu_ranks.torch_cuda import constant, refusal


@dataclass(frozen=True)
class Replacement:
    """A name that is bound to another value.

    Attributes:
        target: Dotted path of the name, module first.
        replacement: The new value or, with ``wraps``, a function from the original to it.
        reason: Why, in one clause.
        wraps: Whether ``replacement`` takes the original.
        is_optional: Whether releases may lack the name, which is then left out.
    """

    target: str
    replacement: Any
    reason: str
    wraps: bool = False
    is_optional: bool = False


def _in_cuda(
    reason: str,
    **values: Any,  # noqa: ANN401 - whatever a name stands for
) -> tuple[Replacement, ...]:
    """Return the rows of names of ``torch.cuda`` that are replaced for the same reason."""
    return tuple(Replacement(f"torch.cuda.{name}", value, reason) for name, value in values.items())


_PROPERTIES = torch_cuda.CpuDeviceProperties
_ONE_GENERATOR = "the device draws from the CPU's generator"
_NO_AVERAGE = "gloo has no average"
_UNEVEN = "gloo gathers and scatters equal blocks only"
_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"

TORCH_REPLACEMENTS: tuple[Replacement, ...] = (
    *_in_cuda(
        "one device per rank, the CPU, always present",
        is_available=constant(True),
        device_count=constant(1),
        current_device=constant(0),
        set_device=constant(None),
        device=nullcontext,
        get_device_name=constant("cpu"),
        get_device_properties=constant(_PROPERTIES),
        get_device_capability=constant((_PROPERTIES.major, _PROPERTIES.minor)),
    ),
    Replacement(
        "torch.accelerator.is_available",
        constant(False),
        "torch.optim asks an accelerator's stream, which needs a driver, from torch 2.15 on",
    ),
    *_in_cuda(
        "there is no driver to initialise",
        _lazy_init=constant(None),
        _lazy_call=lambda function, **_: function(),
    ),
    *_in_cuda(
        "a CPU runs in program order",
        Stream=torch_cuda.CpuStream,
        Event=torch_cuda.CpuEvent,
        stream=nullcontext,
        set_stream=constant(None),
        current_stream=constant(torch_cuda.DEFAULT_STREAM),
        default_stream=constant(torch_cuda.DEFAULT_STREAM),
        synchronize=constant(None),
        is_current_stream_capturing=constant(False),
    ),
    *_in_cuda(
        "CPU ranks have neither CUDA graphs nor memory pools of NCCL",
        CUDAGraph=refusal("CUDA graphs"),
        MemPool=refusal("--use-nccl-ub"),
    ),
    *_in_cuda(_ONE_GENERATOR, default_generators=(torch.default_generator,)),
    *(
        Replacement(f"{module}.{name}", function, _ONE_GENERATOR)
        for name, function in (
            ("manual_seed", lambda seed: torch.default_generator.manual_seed(int(seed))),
            # torch.manual_seed calls it after seeding the CPU's generator, which is harmless.
            ("manual_seed_all", lambda seed: torch.default_generator.manual_seed(int(seed))),
            ("get_rng_state", lambda *_, **__: torch.get_rng_state()),
            ("set_rng_state", lambda new_state, *_, **__: torch.set_rng_state(new_state)),
        )
        for module in ("torch.cuda", "torch.cuda.random")
    ),
    *_in_cuda(
        "no device memory to count",
        empty_cache=constant(None),
        memory_allocated=constant(0),
        memory_reserved=constant(0),
        max_memory_allocated=constant(0),
        max_memory_reserved=constant(0),
        reset_peak_memory_stats=constant(None),
        memory_stats=constant(Counter()),
        device_memory_used=constant(0),
        mem_get_info=constant((_PROPERTIES.total_memory,) * 2),
    ),
    *(
        Replacement(f"torch.cuda.nvtx.{name}", constant(None), "there is no profiler of a GPU")
        for name in ("range_push", "range_pop")
    ),
    Replacement("torch.Tensor.cuda", lambda tensor, *_, **__: tensor, "tensors stay on the CPU"),
    Replacement("torch.Tensor.pin_memory", lambda tensor, *_, **__: tensor, "nothing to copy to"),
    Replacement("torch.Tensor.record_stream", constant(None), "a CPU runs in program order"),
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
    *(
        Replacement(f"{module}.{name}", wrapper, reason, True)
        for name, wrapper, reason in (
            ("all_reduce", collectives.averaging, _NO_AVERAGE),
            ("reduce_scatter_tensor", collectives.averaging, _NO_AVERAGE),
            ("all_gather", collectives.uneven_all_gather, _UNEVEN),
            ("reduce_scatter", collectives.uneven_reduce_scatter, _UNEVEN),
            (
                "_coalescing_manager",
                collectives.waiting_coalescing_manager,
                "a stand-in stream cannot keep a buffer alive while a collective uses it",
            ),
        )
        # The second name is what the coalescing manager compares with.
        for module in ("torch.distributed", "torch.distributed.distributed_c10d")
    ),
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
        "gloo has no such options",
    ),
    Replacement(
        "megatron.core.parallel_state.initialize_model_parallel",
        megatron_core.model_parallel_without_context_from,
        "context parallelism needs Transformer Engine",
        True,
    ),
    Replacement(
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        megatron_core.move_to_cpu,
        "the original returns CPU tensors as they are, and its callers expect arrays",
    ),
    Replacement(
        "megatron.core.transformer.dot_product_attention.DotProductAttention.__init__",
        megatron_core.attention_from,
        "only Transformer Engine's attention accepts the dimensions of multi-latent attention, "
        "and records the logits that QK-clip reads",
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
    Replacement(
        f"{_FSDP}.experimental.dbuffer.DBuffer.__init__",
        megatron_core.buffer_with_stream_from,
        "main asserts the stream that has allocated a buffer of version 2",
        True,
        is_optional=True,
    ),
    *(
        Replacement(
            f"{module}.fully_shard_context",
            megatron_core.sharding_on_cpu_from,
            "main's version 2 asserts a CUDA device",
            True,
            is_optional=True,
        )
        # The function is bound in all of them.
        for module in (
            f"{_FSDP}.experimental",
            f"{_FSDP}.experimental.fully_shard",
            "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
            "megatron.core.distributed.fsdp.mcore_adapter_v2",
        )
    ),
    # Last: on import, megatron.training binds names that are replaced above.
    Replacement(
        "megatron.training.arguments.validate_args",
        megatron_core.validate_args_from,
        "the defaults are kernels of Transformer Engine, Apex and CUDA",
        True,
    ),
)

REPLACEMENTS: tuple[Replacement, ...] = TORCH_REPLACEMENTS + MEGATRON_REPLACEMENTS
