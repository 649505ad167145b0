# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Where the tests compute: on CPU ranks over gloo, or with ``--device cuda`` on GPUs over NCCL.

With a GPU for every rank of a world, ranks are placed as torchrun places them. Otherwise ranks
share the GPUs: NCCL refuses two ranks on one GPU of one host, and takes ``NCCL_HOSTID`` for the
host (``src/init.cc`` and ``src/misc/utils.cc`` of NCCL 2.28.9), so every rank has another one, and
they connect by sockets. Where NCCL does not start so, set ``MEGATRON_MUON_TEST_BACKEND=gloo``.

Tests ask ``device()`` for tensors, ``kind()`` for meshes and ``init_group()`` for the ranks' group.
References are computed on the same device, so exact digits are compared within it.
"""

import importlib.util
import os
from dataclasses import dataclass, field
from typing import Any

BACKEND = "MEGATRON_MUON_TEST_BACKEND"
# Every rank is a node of its own, reached by sockets of this machine.
_SHARED_BY_NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    # NCCL 2.30 and later ask for it.
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    # Kernels of several ranks wait for each other on one GPU: few multiprocessors are enough.
    "NCCL_MAX_CTAS": "2",
}
_ON_CUDA = {
    # Megatron compiles functions as it starts, whatever its flags say: a minute a run.
    "TORCHDYNAMO_DISABLE": "1",
    # The same products have the same bits in every stream.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Megatron offers no precision above "high", which is TF32 on a GPU: a change of the last bit
    # then changes Newton-Schulz by 2e-3. Both sides of a comparison compute in fp32 instead.
    "NVIDIA_TF32_OVERRIDE": "0",
    # What Triton has chosen for a shape is kept for the next process.
    "TRITON_CACHE_AUTOTUNING": "1",
}

# What --piece runs, the largest questions first: files below tests/unit_tests. With -m "not slow"
# a piece is meant to end within eight minutes on one GPU.
PIECES: dict[str, tuple[str, ...]] = {
    # Upstream's bits on whole matrices, over NCCL.
    "optimizer": ("mcore/test_muon.py",),
    # Streams, the allocator, reads of the host; bytes and faults of the exchange.
    "engine": (
        "runtime/test_on_gpu.py",
        "runtime/test_two_plans.py",
        "runtime/test_engine.py",
        "runtime/test_norms.py",
        "runtime/test_engine_builder.py",
        "runtime/test_agreement.py",
    ),
    # Losses of upstream's Muon under DDP.
    "parity": ("mcore/test_parity.py",),
    # All optimizers of a model under Megatron-FSDP.
    "model": (
        "mcore/test_fsdp_model.py",
        "mcore/test_chained_optimizer.py",
        "mcore/test_gradient_faults.py",
    ),
    "fsdp2": (
        "fsdp2/test_layouts.py",
        "fsdp2/test_optimizer.py",
        "fsdp2/test_megatron_fsdp.py",
        "fsdp2/test_megatron_fsdp_v2.py",
    ),
    "newton_schulz": (
        "newton_schulz/test_backends_on_gpu.py",
        "newton_schulz/test_standard.py",
    ),
    # Scripts, runs that are saved and resumed, adaptive Muon.
    "training": (
        "repository/test_scripts.py",
        "checkpoint/test_resume.py",
        "checkpoint/test_async_save.py",
        "mcore/test_adaptive_muon.py",
    ),
}


@dataclass(frozen=True)
class Place:
    """Where one rank of a world computes."""

    kind: str
    local_rank: int
    backend: str
    variables: dict[str, str] = field(default_factory=dict)


def place_ranks(world_size: int) -> list[Place]:
    if kind() == "cpu":
        return [Place("cpu", rank, "gloo") for rank in range(world_size)]
    import torch

    num_gpus = torch.cuda.device_count()
    if world_size <= num_gpus:
        return [Place("cuda", rank, "nccl", dict(_ON_CUDA)) for rank in range(world_size)]
    backend = os.environ.get(BACKEND, "nccl")
    return [
        Place(
            "cuda",
            rank % num_gpus,
            backend,
            {**_ON_CUDA, **_SHARED_BY_NCCL, "NCCL_HOSTID": f"rank{rank}"},
        )
        for rank in range(world_size)
    ]


def kind() -> str:
    """Return ``cpu`` or ``cuda``: of this process, which is a test's or a rank's."""
    return os.environ.get("MEGATRON_MUON_TEST_DEVICE", "cpu")


def has_megatron() -> bool:
    """Return whether megatron-core is installed, which tests of plain FSDP2 do without."""
    return importlib.util.find_spec("megatron") is not None


def device() -> Any:
    """Return the ``torch.device`` of this process."""
    import torch

    if kind() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def init_group(**options: Any) -> None:
    """Start the group of all ranks of a world.

    On GPUs plans are then made as on CPU ranks, so that what tests expect of plans of small
    matrices holds, and nothing is stacked unless a test asks for it. Runs through the launcher plan
    as on any GPU.
    """
    import torch.distributed as dist

    if kind() == "cuda":
        _plan_as_on_cpu_ranks()
    dist.init_process_group(os.environ.get(BACKEND, "gloo"), **options)


def has_stacks(cost_model: str) -> bool:
    """Return whether a cost model lets matrices of one shape share a product on a GPU.

    Batched products of cuBLAS round otherwise than single ones do.
    """
    return kind() == "cuda" and "stack_tiles" in cost_model


def claim_gpu(backend: str) -> None:
    """Use this rank's GPU, and add what gloo lacks of NCCL if ranks communicate over gloo."""
    import torch

    torch.cuda.set_device(device())
    torch.zeros(1, device=device())
    if backend == "gloo":
        import cpu_ranks.torch_cuda

        cpu_ranks.wrap(cpu_ranks.torch_cuda.COLLECTIVES)


def _plan_as_on_cpu_ranks() -> None:
    import torch

    from megatron_muon.runtime import engine_builder

    rates = engine_builder._rates

    def rates_of_cpu_ranks(*args: Any) -> Any:
        return rates(*args[:-1], torch.device("cpu"))

    engine_builder._rates = rates_of_cpu_ranks
