# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""State in CPU memory between steps: values, memory of the device, and lack of memory."""

import contextlib
import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.device import device
from helpers.fsdp2_models import copies, drawn, equal, error_of, small_model, step
from helpers.ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_muon.fsdp2 import MuonAdamW
from megatron_muon.step import offload
from megatron_muon.step.offload import Offload, as_announced


def _storages(*tensors: Any) -> list[StorageWeakRef]:
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def test_views_move_together_and_keep_their_values():
    """Tensors that share an allocation share it in CPU memory too, and the device's is free."""
    flat = drawn((40,), 0).to(device())
    alone = drawn((4, 6), 1).bfloat16().to(device()).T
    number, none = torch.tensor(7.0), torch.zeros(0, 3, device=device())
    tensors = [flat, flat[8:20].view(3, 4), alone, flat[40:].view(0, 3), number, none]
    expected = [tensor.clone() for tensor in tensors]
    own = Offload(lambda: tensors, device())
    for _ in range(2):
        before = _storages(flat, alone)
        own.to_cpu()
        assert all(storage.expired() for storage in before)
        assert {tensor.device.type for tensor in tensors[:4]} == {"cpu"}
        assert flat.is_pinned() == alone.is_pinned() == (device().type == "cuda")
        assert all(map(torch.equal, (tensor.to(device()) for tensor in tensors[:3]), expected))
        flat[8] = expected[0][8] = expected[1][0, 0] = 5.0
        assert tensors[1][0, 0] == 5.0
        own.to_device()
        assert {tensor.device.type for tensor in tensors[:3]} == {device().type}
        assert all(map(torch.equal, tensors, expected))
    assert alone.stride() == (1, 6) and own.problems == []


@pytest.mark.parametrize(
    ("fraction", "moved"), [(0.0, ""), (0.3, "a"), (0.5, "ac"), (0.8, "ab"), (1.0, "abc")]
)
def test_fraction_moves_whole_allocations_in_order(fraction, moved):
    """The share of bytes that moves is not exceeded, and filled as far as allocations allow."""
    tensors = {name: drawn((size,), 0) for name, size in (("a", 30), ("b", 50), ("c", 20))}
    before = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}
    # Otherwise memory that has become free is taken again.
    kept = [tensor.untyped_storage() for tensor in tensors.values()]
    Offload(tensors.values, torch.device("cpu"), fraction).to_cpu()
    found = [name for name in tensors if tensors[name].data_ptr() != before[name]]
    assert "".join(found) == moved and len(kept) == 3


def test_state_that_was_removed_is_not_kept():
    """Memory of state that was removed or replaced between steps goes, and new state moves."""
    tensors = [drawn((40,), 0), drawn((30,), 1)]
    own = Offload(lambda: tensors, torch.device("cpu"))
    own.to_cpu()
    removed, replaced = _storages(*tensors)
    tensors[1] = drawn((30,), 2)
    del tensors[0]
    own.to_cpu()
    assert removed.expired() and replaced.expired()
    own.to_device()
    (before,) = _storages(*tensors)
    own.to_cpu()
    assert before.expired() and torch.equal(tensors[0], drawn((30,), 2))


@pytest.mark.cpu_only
@on_ranks(1)
def test_state_dict_announces_cpu_memory():
    """A DTensor whose shard has moved announces where it is, or ``full_state_dict`` fails."""
    mesh = init_device_mesh("cpu", (1,))
    value = DTensor.from_local(torch.empty(4, 6, device="meta"), mesh, [Shard(0)])
    assert as_announced(value) is value
    value._local_tensor = torch.ones(4, 6)
    assert value.device.type == "meta"
    moved = as_announced(value)
    assert moved.device.type == "cpu"
    assert moved._local_tensor.data_ptr() == value._local_tensor.data_ptr()
    assert torch.equal(moved.full_tensor(), torch.ones(4, 6))


@on_ranks(2)
def test_ranks_refuse_a_step_together_if_one_lacks_memory():
    """A rank without memory for its state, on the device or pinned, must not leave others alone."""
    model = small_model(is_sharded=True)
    optimizer = MuonAdamW.from_model(model, lr=0.1, offload_state=True)
    step(model, optimizer, 0)
    empty, failing = torch.empty, dist.get_rank() == 1

    def lack_device(num_bytes: int, *args: Any) -> Any:
        raise MemoryError(f"expected {num_bytes} bytes")

    def lack_pinned(*args: Any, **options: Any) -> Any:
        if "pin_memory" in options:
            raise RuntimeError("CUDA error: cannot pin")
        return empty(*args, **options)

    with contextlib.ExitStack() as stack:
        if failing:
            stack.enter_context(mock.patch.object(offload, "allocating", lack_device))
        before = copies(model, optimizer)
        error = error_of(optimizer.step)
    assert "rank 1: expected " in error and "Nothing was updated" in error, error
    assert equal(before, copies(model, optimizer))
    with contextlib.ExitStack() as stack:
        if failing:
            stack.enter_context(mock.patch.object(offload.torch, "empty", lack_pinned))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    error = error_of(optimizer.step)
    assert "rank 1: CPU memory for state: CUDA error: cannot pin" in error, error
    assert error_of(optimizer.step) == "no error"
