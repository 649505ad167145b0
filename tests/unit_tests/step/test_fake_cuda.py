# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Waits, launches, bytes and allocations of a step, on fake CUDA tensors, as one rank."""

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from helpers.fake_cuda import Recorder, fake_cuda

from megatron_muon.fsdp2 import Muon, MuonAdamW
from megatron_muon.step.elementwise import elementwise_bytes

SHAPES = [(256, 256)] * 4 + [(1024, 256)] * 2
# The embedding has as many elements as the largest workspace of Newton-Schulz.
EMBEDDING = [(8192, 1024)]
SMALL_BYTES = 1_000
OF_FSDP2, OF_MEGATRON = "fsdp2/gradients.py", "mcore/chained_optimizer.py"


def _parameters(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.empty(s, device="cuda", dtype=dtype)) for s in shapes]


def _muon(dtype: torch.dtype = torch.float32, **options: Any) -> Muon:
    return Muon(_parameters(SHAPES, dtype), nesterov=True, **options)


def _muon_and(
    algorithm: str, others: Sequence[tuple[int, int]] = EMBEDDING, **options: Any
) -> MuonAdamW:
    of_others = {"params": _parameters(others), "algorithm": algorithm}
    return MuonAdamW([{"params": _parameters(SHAPES)}, of_others], **options)


def _with_metrics(**options: Any) -> Muon:
    optimizer = _muon(**options)
    optimizer.record_metrics()
    return optimizer


@contextmanager
def _alone(build: Callable[[], Any]) -> Iterator[tuple[Recorder, Any]]:
    with fake_cuda() as recorder:
        yield recorder, build()


def _step(recorder: Recorder, optimizer: Any) -> list[torch.Tensor]:
    """Record a step anew, and return the parameters; Megatron-FSDP has gradients of its own."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params if isinstance(optimizer, torch.optim.Optimizer) else []:
        param.grad = torch.empty_like(param)
    recorder.clear()
    optimizer.step()
    return params


def _norm_on_device(_: int, __: Any, tensors: Any, *___: Any) -> tuple[torch.Tensor, None]:
    """Stand in for Apex's and Transformer Engine's norm, which the host does not read."""
    return torch.stack(torch._foreach_norm(tensors[0])).norm().reshape(1), None


def _scale_on_device(_: int, __: Any, tensors: Any, factor: torch.Tensor) -> None:
    """Stand in for Transformer Engine's scaling by a factor on the device."""
    torch._foreach_mul_(tensors[1], factor.reshape(()))


def _gather_of_one_rank(values: list[Any], value: Any, group: Any = None) -> None:
    values[:] = [value] * len(values)


@contextmanager
def _chained(has_transformer_engine: bool) -> Iterator[tuple[Recorder, Any]]:
    """Build the chained optimizer of a GPT under Megatron-FSDP, whose weights are clipped."""
    import torch.distributed as dist
    from counting import uncounted
    from gpt_under_fsdp import build_gpt
    from helpers.toy_fsdp import build_optimizer
    from megatron.core import parallel_state
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.optimizer import clip_grads
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import megatron_muon

    init_meshes = uncounted(FullyShardedDataParallel._init_dist_index)
    replaced = [
        # Ranks in meshes are numbers.
        (FullyShardedDataParallel, "_init_dist_index", init_meshes),
        (dist, "all_gather_object", _gather_of_one_rank),
        # The model is on the device; fake parameters cannot be moved.
        (torch.nn.Module, "to", lambda self, *_, **__: self),
        (torch.cuda, "empty_cache", lambda: None),
        (clip_grads, "l2_norm_impl", _norm_on_device),
        (
            clip_grads,
            "multi_tensor_scale_tensor_impl",
            _scale_on_device if has_transformer_engine else None,
        ),
    ]
    with ExitStack() as stack:
        # Megatron sets variables of Transformer Engine, which later processes would inherit.
        stack.enter_context(mock.patch.dict(os.environ))
        megatron_muon.enable()
        stack.callback(megatron_muon.disable)
        # With options, whose timeout new groups get.
        options = {"store": FakeStore(), "pg_options": FakeProcessGroup.Options()}
        dist.init_process_group("fake", rank=0, world_size=1, **options)
        stack.callback(dist.destroy_process_group)
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        recorder = stack.enter_context(fake_cuda())
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        stack.callback(parallel_state.destroy_model_parallel)
        with torch.device("cuda"):
            model = build_gpt(
                8192,
                32,
                num_layers=2,
                hidden_size=256,
                num_attention_heads=4,
                normalization="RMSNorm",
                add_bias_linear=False,
                perform_initialization=False,
            )
        # The norm is 1: all gradients are clipped.
        optimizer = build_optimizer(model, muon_nesterov=True, clip_grad=0.1)
        # The gather belongs to the next forward pass; FakeTensors do not know coalesced ones.
        model.start_param_sync = mock.Mock()
        model.finish_grad_sync()
        yield recorder, optimizer


class Case(NamedTuple):
    """An optimizer, and what its third step may ask for.

    Args:
        build: Context with a recorder and the optimizer.
        readers: Files whose reads the host waits for; ranks agree in the last one.
        launches: Most operations, the kernel that moves rows among them.
        products: Most matrix products.
        num_bytes: Most bytes that operations read and write, by parameter element.
    """

    build: Callable[[], Any]
    readers: Sequence[str]
    launches: int
    products: int
    num_bytes: float


CASES = {
    "fsdp2.Muon": Case(lambda: _alone(_muon), [OF_FSDP2], 31, 30, 80.1),
    "fsdp2.MuonAdamW": Case(
        lambda: _alone(lambda: _muon_and("adamw", [(2048, 256)] * 2)), [OF_FSDP2], 39, 30, 84.6
    ),
    "FSDPMuonChainedOptimizer": Case(lambda: _chained(True), [OF_MEGATRON], 77, 45, 98.7),
    "FSDPMuonChainedOptimizer without Transformer Engine": Case(
        # Upstream reads the norm itself.
        lambda: _chained(False), ["megatron/core/optimizer/clip_grads.py", OF_MEGATRON],
        94, 45, 106.7,
    ),
}  # fmt: skip


@functools.cache
def _third_step(name: str) -> tuple[Recorder, int]:
    """Record the third step of a case, and count the elements of its parameters."""
    with CASES[name].build() as (recorder, optimizer):
        for _ in range(3):
            params = _step(recorder, optimizer)
        return recorder, sum(param.numel() for param in params)


of_each_optimizer = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.megatron] * n.startswith("FSDP")) for n in CASES],
)


@of_each_optimizer
def test_third_step_has_one_wait_and_stays_within_its_bounds(name):
    """The host waits once in a step, for the gradients; its launches and bytes are bounded.

    The norm, a number, was copied to the device from pageable memory: the host waited again. Lists
    with a tensor in CPU memory are computed tensor by tensor, or not at all.
    """
    (recorder, num_elements), case = _third_step(name), CASES[name]
    assert [wait.file for wait in recorder.waits] == case.readers, recorder.waits
    assert recorder.slow == []
    launches = recorder.operations.total()
    num_bytes = recorder.num_bytes.total() / num_elements
    # A bound far above would hold nothing.
    assert 0.9 * case.launches <= launches <= case.launches, recorder.operations
    assert recorder.matrix_products.total() == case.products
    assert 0.95 * case.num_bytes <= num_bytes <= case.num_bytes, recorder.num_bytes


@pytest.mark.parametrize("check", ["sync", "next_step", "off"])
def test_host_waits_only_for_gradients_that_are_checked_in_the_same_step(check):
    """The host waits for gradients with ``sync`` alone.

    It waited for the gradients of each step, and could not launch it before they came.
    """
    with _alone(lambda: _muon_and("adamw", check_gradients=check)) as (recorder, optimizer):
        for _ in range(3):
            _step(recorder, optimizer)
    assert [wait.file for wait in recorder.waits] == [OF_FSDP2] * (check == "sync")
    assert recorder.slow == []
    # Of the flags; the other one is of norms.
    assert recorder.operations["aten::_to_copy"] == 1 + (check == "next_step")


def _not_agreed_on(recorder: Recorder, reader: str) -> list[Any]:
    """Return the allocations that nothing before the agreement of ranks has asked for."""
    (num_before,) = (wait.num_allocations for wait in recorder.waits if wait.file == reader)
    return recorder.not_agreed_on(num_before, SMALL_BYTES)


@of_each_optimizer
def test_nothing_is_allocated_after_ranks_agree(name):
    """No memory is allocated after the last read, where ranks agree."""
    assert _not_agreed_on(_third_step(name)[0], CASES[name].readers[-1]) == []


# Whose first step is recorded too: it makes state.
OPTIONS: dict[str, Callable[[], Any]] = {
    "momentum in bfloat16": lambda: _muon(momentum_dtype=torch.bfloat16),
    "state in CPU memory": lambda: _muon_and("adamw", foreach=True, offload_state=True),
    "weights in bfloat16": lambda: _muon(torch.bfloat16),
    "AdamW at once": lambda: _muon_and("adamw", foreach=True),
    "AdamW one by one": lambda: _muon_and("adamw", foreach=False),
    "cautious decay": lambda: _muon(weight_decay_method="cautious"),
    "Lion": lambda: _muon_and("lion"),
    "metrics": lambda: _with_metrics(momentum_dtype=torch.bfloat16),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", OPTIONS)
def test_options_allocate_what_ranks_have_agreed_on(name):
    """All memory of a step with an option is taken before ranks agree."""
    with _alone(OPTIONS[name]) as (recorder, optimizer):
        for _ in range(2):
            _step(recorder, optimizer)
            assert _not_agreed_on(recorder, OF_FSDP2) == []


@pytest.mark.megatron
def test_adam_asks_for_the_memory_of_its_step():
    """Adam asks for the bytes that its step on DTensors takes."""
    with _chained(True) as (recorder, optimizer):
        matrices = optimizer.chained_optimizers[0].get_parameters()
        adam = torch.optim.AdamW(matrices)
        # It makes the state, and DTensor finds the shapes of results by fake tensors of its own.
        adam.step()
        asked = elementwise_bytes([adam], torch.device("cuda", 0))
        recorder.clear()
        recorder.wait("agreement")
        adam.step()
    most_bytes = max(each.live_bytes for each in recorder.allocations)
    assert asked.state + asked.temporaries == most_bytes
    assert most_bytes > 3 * max(each._local_tensor.nbytes for each in matrices)


@pytest.mark.cpu_only
def test_weights_in_bfloat16_are_compared_in_the_first_step_alone():
    """Later steps compare no weight with its copy, which would take 7 bytes an element."""
    with _alone(lambda: _muon(torch.bfloat16)) as (recorder, optimizer):
        for num_compared in (len(SHAPES), 0):
            _step(recorder, optimizer)
            assert recorder.operations["aten::where"] == num_compared
