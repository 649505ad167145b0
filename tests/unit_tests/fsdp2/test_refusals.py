# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What Muon for FSDP2 refuses: on all ranks together, by name, with what to do."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.fsdp2_models import shard
from helpers.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from megatron_muon.fsdp2 import ExchangeSettings, Muon, validation

pytestmark = pytest.mark.ranks


def _assert_refused(said: str, call: Callable[[], Any]) -> None:
    """On this rank; no flag of Megatron is named."""
    with pytest.raises((RuntimeError, ValueError, TypeError)) as error:
        call()
    assert said in str(error.value)
    assert "--" not in str(error.value)


class Hooked(Muon):
    """Changes weights after a step."""

    def post_weight_update_fn_inplace(self, p: Any) -> None:
        p.div_(p.norm())


class Decays(Muon):
    """Decays weights otherwise."""

    def _apply_weight_decay_inplace(self, *args: Any) -> None:
        pass


def _wrong_parameters(mesh: DeviceMesh, w: Any, second: Any) -> list[tuple[str, Any]]:
    """Return parameters that Muon cannot take, with what it says."""
    rank = dist.get_rank()
    vector, batch = shard((6,), 0, mesh).param, shard((2, 4, 4), 0, mesh).param

    def dtensor(local: Any, *placements: Any, on: DeviceMesh = mesh, **shape: Any) -> Any:
        made = DTensor.from_local(local, on, placements, run_check=False, **shape)
        return torch.nn.Parameter(made)

    on_meta = dtensor(torch.ones(3, 4, device="meta"), Shard(0))
    strided = dtensor(torch.ones(2, 4), _StridedShard(0, split_factor=2))
    # Together six rows, but not three each.
    uneven = dtensor(torch.ones(1 + 4 * rank, 4), Shard(0), shape=torch.Size((6, 4)), stride=(4, 1))
    turned = shard((6, 4), 0, DeviceMesh("cpu", [1, 0])).param
    # As Megatron-FSDP marks the meshes of its parameters; this one is not its own.
    marked = DeviceMesh("cpu", [[0], [1]])
    marked._shard_order = [1, 0]
    copied = dtensor(torch.ones(3, 4), Shard(0), Shard(0), on=marked)
    half = torch.nn.Parameter(shard((6, 4), 0, mesh).param.to(torch.float16))
    empty = torch.nn.Parameter(w.detach()[:, :0])
    plain = torch.nn.Parameter(torch.ones(4, 4))
    number = "w: split_sizes: expected a number of blocks"
    return [
        ("ranks 0, 1: bias: expected a matrix, or a batch of matrices", [("bias", vector)]),
        ("rank 1: w: expected a matrix", [("w", vector if rank == 1 else w)]),
        ("w: expected a DTensor in a job of 2 ranks", [("w", plain)]),
        ("w: expected float32 or bfloat16, got torch.float16", [("w", half)]),
        ("b: expected shards on cpu, as the mesh or the first", [("a", w), ("b", on_meta)]),
        ("b: expected shards on cpu, as the mesh or the first", [("b", on_meta)]),
        ("w: expected a reduced tensor", [("w", dtensor(torch.ones(4, 4), Partial()))]),
        ("w: expected a shard of ranges", [("w", strided)]),
        (number, [{"params": [("w", w)], "split_sizes": 4}]),
        (number, [{"params": [("w", w)], "split_sizes": (4, 3)}]),
        (number, [{"params": [("w", batch)], "split_sizes": 3}]),
        ("w: split_sizes: expected an int", [{"params": [("w", w)], "split_sizes": ("4", 2)}]),
        ("w: split_sizes: expected an int", [{"params": [("w", w)], "split_sizes": True}]),
        ("w: transposed: expected True", [{"params": [("w", w)], "transposed": "no"}]),
        ("rank 1: w: expected a shard of ranges", [("w", uneven)]),
        ("w: expected a mesh whose ranks ascend", [("w", turned)]),
        ("w: expected a parameter of the model on a mesh of Megatron-FSDP", [("w", copied)]),
        ("w: expected elements, got shape (6, 0)", [("w", empty)]),
        ("b: expected each parameter and each name once", [("a", w), ("b", w)]),
        ("w: expected each parameter and each name once", [("w", w), ("w", second)]),
    ]


def _unlike_ranks(w: Any, second: Any) -> list[tuple[str, Any]]:
    """Return parameters that are not the same on both ranks, with what Muon says."""
    rank, a, b = dist.get_rank(), ("a", w), ("b", second)
    replicated = shard((6, 4), 2, init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))).param
    differs = "Muon exchange plan: expected the same on all ranks of the group"
    lacks = "expected a parameter of its mesh and placements on all "
    return [
        (differs, [a, b] if rank else [b, a]),
        (differs, [a, b] if rank else [a]),
        (differs, [{"params": [a], "split_sizes": 2 if rank else None}]),
        (f"rank 1: a: {lacks}", [a] if rank else []),
        (f"rank 1: b: {lacks}", [a, ("b", replicated)] if rank else [a]),
    ]


def _wrong_settings() -> list[tuple[str, dict[str, Any]]]:
    """Return settings that Muon refuses, or that are not the same on both ranks."""
    rank = dist.get_rank()
    bf16 = ExchangeSettings(comm_dtype="bf16")
    # With a limit a rank joins collectives more.
    limited = ExchangeSettings(staging_bytes=10**9 if rank else None)
    return [
        ("weight_decay_method: expected one of", {"weight_decay_method": "none"}),
        ("fp32_matmul_prec: expected one of", {"fp32_matmul_prec": "bf16"}),
        ("scale_mode: expected one of", {"scale_mode": "rms"}),
        ("use_syrk: expected False, got True", {"use_syrk": True}),
        ("exchange.comm_dtype: expected fp32", {"fp32_matmul_prec": "high", "exchange": bf16}),
        ("staging memory: expected", {"exchange": ExchangeSettings(staging_bytes=8)}),
        ("rank 0: num_ns_steps: expected at least 1", {"num_ns_steps": 5 * rank}),
        ("coefficient_type: expected", {"coefficient_type": "simple" if rank else "sample"}),
        ("Muon settings: expected the same on all ranks", {"num_ns_steps": 5 + rank}),
        ("rank 1 has 'scale spectral 0.2", {"extra_scale_factor": 0.2 * rank}),
        ("staging_bytes=1000000000", {"exchange": limited}),
    ]


def _refuse_to_build() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    w, second = (shard((6, 4), seed, mesh).param for seed in (0, 1))
    for said, params in (*_wrong_parameters(mesh, w, second), *_unlike_ranks(w, second)):
        _assert_refused(said, partial(Muon, params))
    for said, options in _wrong_settings():
        _assert_refused(said, partial(Muon, [("w", w)], **options))
    own = "expected emerging-optimizers' own, got"
    _assert_refused(f"Hooked.post_weight_update_fn_inplace: {own}", partial(Hooked, [w]))
    _assert_refused(f"Decays._apply_weight_decay_inplace: {own}", partial(Decays, [w]))
    # torch times kernels on rank 1; its list of chunks says something else in a later release.
    with mock.patch.dict("os.environ", PYTORCH_TUNABLEOP_ENABLED=str(dist.get_rank())):
        _assert_refused("rank 1: PYTORCH_TUNABLEOP_ENABLED", partial(Muon, [w]))
    with mock.patch.object(validation, "checkpointed_box", lambda param: ((1, 4), (0, 4))):
        _assert_refused("expected a shard of ranges", partial(Muon, [w]))


def _refuse_to_step() -> None:
    """Step with gradients that are wrong; nothing changes."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    sharded = [shard((5, 4), 0, mesh), shard((1, 4), 1, mesh)]
    params = [each.param for each in sharded]
    muon = Muon([(f"w{i}", param) for i, param in enumerate(params)], weight_decay=0.1)

    def reset() -> list[Any]:
        """Set gradients, and return the local state."""
        for i, each in enumerate(sharded):
            each.draw_grad(10 + i)
        return local_state()

    def local_state() -> list[Any]:
        momentum = [muon.state[param]["momentum_buffer"] for param in params]
        return [each.to_local().detach().clone() for each in (*params, *momentum)]

    def nan() -> None:
        if rank == 1:
            params[0].grad._local_tensor[0, 0] = float("nan")

    def missing_on_one() -> None:
        if rank == 0:
            params[0].grad = None

    def other_placement() -> None:
        params[0].grad = shard((5, 4), 0, mesh, dim=1).param.detach()

    for spoil, said in (
        (nan, "rank 1: w0: expected a finite gradient, got NaN or Inf"),
        (missing_on_one, "rank 1: w0: expected a gradient on all ranks that hold the parameter"),
        (other_placement, "w0: expected a gradient like the parameter, torch.float32 (3, 4)"),
    ):
        before = reset()
        spoil()
        _assert_refused(said, muon.step)
        assert all(map(torch.equal, before, local_state())), said
    reset()
    for is_unscaled in (False, True):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(sum(param.to_local().sum() for param in params))
        if is_unscaled:
            scaler.unscale_(muon)
        _assert_refused("step: expected gradients that are not scaled", partial(scaler.step, muon))
        assert not hasattr(muon, "grad_scale") and not hasattr(muon, "found_inf")
    late = partial(muon.add_param_group, {"params": []})
    _assert_refused("add_param_group: expected all parameters", late)
    for call in (copy.deepcopy, pickle.dumps):
        _assert_refused("Muon: expected no copy", partial(call, muon))
    # An empty shard may have no gradient; the others step.
    before = reset()
    if rank == 1:
        params[1].grad = None
    muon.step()
    assert not torch.equal(before[0], local_state()[0])


@pytest.mark.parametrize("refuse", [_refuse_to_build, _refuse_to_step])
def test_what_cannot_work_is_refused_on_all_ranks(refuse):
    """Nobody hangs; where a step is refused, parameters and momentum keep their bits."""
    run_ranks(2, refuse, timeout_s=120.0).check()
