# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What Muon for FSDP2 refuses: on all ranks together, by name, with what to do."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks


def _error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "no error"


def _good() -> Any:
    """Return a mesh of both ranks, and two parameters on it that Muon takes."""
    from helpers.fsdp2_models import shard
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    first, second = (shard((6, 4), seed, mesh).param for seed in (0, 1))
    return SimpleNamespace(mesh=mesh, first=first, second=second)


def _wrong_parameters(good: Any) -> dict[str, Callable[[], Any]]:
    """Return optimizers of parameters that Muon cannot take, by what is wrong with them."""
    import torch
    import torch.distributed as dist
    from helpers.fsdp2_models import shard
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    from megatron_muon.fsdp2 import Muon, problems

    rank, mesh, w = dist.get_rank(), good.mesh, good.first
    vector = shard((6,), 0, mesh).param
    batch = shard((2, 4, 4), 0, mesh).param

    def dtensor(local: Any, placement: Any, **shape: Any) -> Any:
        made = DTensor.from_local(local, mesh, [placement], run_check=False, **shape)
        return torch.nn.Parameter(made)

    def build_where_torch_cuts_otherwise() -> None:
        """Let torch's list of chunks say something else, as a later release may."""
        with mock.patch.object(problems, "own_box", lambda param: ((1, 4), (0, 4))):
            Muon([("w", w)])

    on_meta = dtensor(torch.ones(3, 4, device="meta"), Shard(0))
    strided = dtensor(torch.ones(2, 4), _StridedShard(0, split_factor=2))
    # Together six rows, but not three each.
    uneven = dtensor(torch.ones(1 + 4 * rank, 4), Shard(0), shape=torch.Size((6, 4)), stride=(4, 1))
    turned = shard((6, 4), 0, DeviceMesh("cpu", [1, 0])).param
    # As Megatron-FSDP marks the meshes of its parameters; this one is not its own.
    marked = DeviceMesh("cpu", [[0], [1]])
    marked._shard_order = [1, 0]
    copied = torch.nn.Parameter(
        DTensor.from_local(torch.ones(3, 4), marked, [Shard(0), Shard(0)], run_check=False)
    )
    half = shard((6, 4), 0, mesh).param.to(torch.float16)
    plain = torch.nn.Parameter(torch.ones(4, 4))
    return {
        "vector": lambda: Muon([("bias", vector)]),
        "vector_on_one_rank": lambda: Muon([("w", vector if rank == 1 else w)]),
        "plain": lambda: Muon([("w", plain)]),
        "fp16": lambda: Muon([("w", torch.nn.Parameter(half))]),
        "device": lambda: Muon([("a", w), ("b", on_meta)]),
        "partial": lambda: Muon([("w", dtensor(torch.ones(4, 4), Partial()))]),
        "strided": lambda: Muon([("w", strided)]),
        "blocks": lambda: Muon([{"params": [("w", w)], "split_sizes": 4}]),
        "rows": lambda: Muon([{"params": [("w", w)], "split_sizes": (4, 3)}]),
        "batch_split": lambda: Muon([{"params": [("w", batch)], "split_sizes": 3}]),
        "uneven_by_hand": lambda: Muon([("w", uneven)]),
        "other_torch": build_where_torch_cuts_otherwise,
        "turned_mesh": lambda: Muon([("w", turned)]),
        "copy_of_megatron_fsdp": lambda: Muon([("w", copied)]),
        "nothing_in_it": lambda: Muon([("w", torch.nn.Parameter(w.detach()[:, :0]))]),
        "twice": lambda: Muon([("a", w), ("b", w)]),
        "same_name": lambda: Muon([("w", w), ("w", good.second)]),
        "first_on_meta": lambda: Muon([("b", on_meta)]),
    }


def _wrong_settings(good: Any) -> dict[str, Callable[[], Any]]:
    """Return optimizers whose settings or subclass Muon refuses."""
    import torch.distributed as dist
    from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon

    from megatron_muon.fsdp2 import ExchangeSettings, Muon

    w = good.first

    class Hooked(Muon):
        def post_weight_update_fn_inplace(self, p: Any) -> None:
            p.div_(p.norm())

    class Decays(Muon):
        def _apply_weight_decay_inplace(self, *args: Any) -> None:
            pass

    def build_with_tunable_kernels() -> None:
        """Let torch time kernels on rank 1."""
        with mock.patch.dict("os.environ", PYTORCH_TUNABLEOP_ENABLED=str(dist.get_rank())):
            Muon([w])

    assert Hooked.post_weight_update_fn_inplace is not (
        WholeMatrixMuon.post_weight_update_fn_inplace
    )
    return {
        "decays_otherwise": lambda: Decays([w]),
        "hooks": lambda: Hooked([w]),
        "text_split": lambda: Muon([{"params": [("w", w)], "split_sizes": ("4", 2)}]),
        "bool_split": lambda: Muon([{"params": [("w", w)], "split_sizes": True}]),
        "text_transposed": lambda: Muon([{"params": [("w", w)], "transposed": "no"}]),
        "decay": lambda: Muon([w], weight_decay_method="none"),
        "precision": lambda: Muon([w], fp32_matmul_prec="bf16"),
        "scale_mode": lambda: Muon([w], scale_mode="rms"),
        "syrk": lambda: Muon([w], use_syrk=True),
        "tunable": build_with_tunable_kernels,
        "comm_dtype": lambda: Muon(
            [w], fp32_matmul_prec="high", exchange=ExchangeSettings(comm_dtype="bf16")
        ),
        "memory": lambda: Muon([w], exchange=ExchangeSettings(staging_bytes=8)),
    }


def _unlike_ranks(good: Any) -> dict[str, Callable[[], Any]]:
    """Return optimizers that are not the same on both ranks."""
    import torch.distributed as dist
    from helpers.fsdp2_models import shard
    from torch.distributed.device_mesh import init_device_mesh

    from megatron_muon.fsdp2 import ExchangeSettings, Muon

    rank, w = dist.get_rank(), good.first
    a, b = ("a", w), ("b", good.second)
    replicated = shard((6, 4), 2, init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))).param
    alone = [dist.new_group([each]) for each in range(2)][rank]
    return {
        "group_of_one": lambda: Muon([("w", w)], group=alone),
        "steps_on_one_rank": lambda: Muon([("w", w)], num_ns_steps=5 * rank),
        "coefficients": lambda: Muon([w], coefficient_type="simple" if rank else "sample"),
        "settings": lambda: Muon([w], num_ns_steps=5 + rank),
        "scale": lambda: Muon([w], extra_scale_factor=0.2 * rank),
        # With a limit a rank joins collectives more.
        "exchange": lambda: Muon(
            [w], exchange=ExchangeSettings(staging_bytes=10**9 if rank else None)
        ),
        "order": lambda: Muon([a, b] if rank else [b, a]),
        "fewer": lambda: Muon([a, b] if rank else [a]),
        "none": lambda: Muon([a] if rank else []),
        "kinds": lambda: Muon([a, ("b", replicated)] if rank else [a]),
        "split_on_one_rank": lambda: Muon([{"params": [a], "split_sizes": 2 if rank else None}]),
    }


def _refuse_to_build() -> dict[str, str]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    good = _good()
    builds = {**_wrong_parameters(good), **_wrong_settings(good), **_unlike_ranks(good)}
    return {name: _error_of(build) for name, build in builds.items()}


@functools.cache
def refusals() -> list[dict[str, str]]:
    """Return the errors of both ranks."""
    return run_ranks(2, _refuse_to_build, timeout_s=120.0).check().results


SHARD = "expected a shard of ranges"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("vector", "ranks 0, 1: bias: expected a matrix, or a batch of matrices, got shape (6,)"),
        ("vector_on_one_rank", "rank 1: w: expected a matrix"),
        ("plain", "w: expected a DTensor in a job of 2 ranks, got a plain tensor. Call fully_sh"),
        ("fp16", "w: expected float32 or bfloat16, got torch.float16. Keep parameters in float32"),
        ("device", "b: expected shards on cpu, as the mesh or the first parameter is, got meta"),
        ("partial", "w: expected a reduced tensor, got placements (Partial(sum),)"),
        ("strided", "w: expected a strided shard as fully_shard makes it, of split factor 1, got"),
        ("blocks", "w: split_sizes: expected a number of blocks that divides 6 rows"),
        ("rows", "w: split_sizes: expected a number of blocks that divides 6 rows"),
        ("batch_split", "w: split_sizes: expected a number of blocks that divides 4 rows"),
        ("uneven_by_hand", f"rank 1: w: {SHARD}"),
        ("other_torch", "w: expected a shard of ranges ((0, 3), (0, 4)), as fully_shard cuts (6,"),
        ("turned_mesh", "w: expected a mesh whose ranks ascend along each axis that shards, got"),
        (
            "copy_of_megatron_fsdp",
            "w: expected a parameter of the model on a mesh of Megatron-FSDP",
        ),
        ("nothing_in_it", "w: expected elements, got shape (6, 0)"),
        ("twice", "b: expected each parameter once, got it twice"),
        ("same_name", "w: expected a name for each parameter, got it 2 times"),
        ("decays_otherwise", "Decays._apply_weight_decay_inplace: expected emerging-optimizers' o"),
        ("first_on_meta", "b: expected shards on cpu, as the mesh or the first parameter is"),
        ("steps_on_one_rank", "rank 0: ValueError: num_ns_steps must be at least 1, got 0"),
        ("group_of_one", "w: expected ranks 0 to 1, which exchange it, in one group of ranks that"),
        ("text_split", "w: split_sizes: expected an int or a tuple of them, got ('4', 2)."),
        ("bool_split", "w: split_sizes: expected an int or a tuple of them, got True."),
        ("text_transposed", "w: transposed: expected True or False, got 'no'"),
        ("coefficients", "rank 0: coefficient_type: expected one of ['aol', 'cans', "),
        ("decay", "weight_decay_method: expected one of ['decoupled', 'independent', 'l2', 'p"),
        ("precision", "fp32_matmul_prec: expected one of ['high', 'highest', 'medium'], got 'bf16"),
        ("scale_mode", "scale_mode: expected one of ['match_adamw', 'none', 'shape_scaling'"),
        ("syrk", "use_syrk: expected False, got True. Pass exchange=ExchangeSettings("),
        ("comm_dtype", "exchange.comm_dtype: expected fp32 for Newton-Schulz in fp32, got bf16"),
        ("memory", "staging memory: expected at most 8 bytes a rank"),
        ("hooks", "Hooked.post_weight_update_fn_inplace: expected emerging-optimizers' own, got"),
        ("tunable", "rank 1: PYTORCH_TUNABLEOP_ENABLED: expected 0, with which copies of a matrix"),
        ("settings", "Muon settings: expected the same on all ranks of the group, got rank 1 has"),
        ("scale", "rank 1 has 'scale spectral 0.2"),
        ("exchange", "staging_bytes=1000000000"),
        ("order", "Muon exchange plan: expected the same on all ranks of the group, got rank 1"),
        ("fewer", "Muon exchange plan: expected the same on all ranks of the group, got rank 1"),
        ("none", "rank 1: a: expected a parameter of its mesh and placements on all of ranks 0 to"),
        ("kinds", "rank 1: b: expected a parameter of its mesh and placements on all of ranks 0"),
        ("split_on_one_rank", "Muon exchange plan: expected the same on all ranks of the group"),
    ],
)
def test_optimizer_that_cannot_work_is_refused_on_all_ranks(case, said):
    """Nobody hangs, no flag of Megatron is named."""
    for errors in refusals():
        assert said in errors[case]
        assert "--" not in errors[case]


def test_every_refusal_has_a_test():
    """A case without an expectation would prove nothing."""
    parametrize = test_optimizer_that_cannot_work_is_refused_on_all_ranks.pytestmark[0]
    assert {case for case, _ in parametrize.args[1]} == set(refusals()[0])


def _refuse_to_step() -> dict[str, Any]:
    """Step with gradients that are wrong, and look for what has changed."""
    import copy
    import pickle

    import torch
    import torch.distributed as dist
    from helpers.fsdp2_models import drawn, shard
    from torch.distributed.device_mesh import init_device_mesh

    from megatron_muon.fsdp2 import Muon

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    sharded = [shard((5, 4), 0, mesh), shard((1, 4), 1, mesh)]
    muon = Muon([(f"w{i}", each.param) for i, each in enumerate(sharded)], weight_decay=0.1)

    def reset() -> None:
        for i, each in enumerate(sharded):
            each.param.grad = each.like_param(each.own(drawn(each.whole.shape, 10 + i)))

    def local_state() -> list[Any]:
        params = [each.param for each in sharded]
        momentum = [muon.state[param]["momentum_buffer"] for param in params]
        return [each.to_local().detach().clone() for each in (*params, *momentum)]

    def nan() -> None:
        if rank == 1:
            sharded[0].param.grad._local_tensor[0, 0] = float("nan")

    def missing_on_one() -> None:
        if rank == 0:
            sharded[0].param.grad = None

    def other_placement() -> None:
        sharded[0].param.grad = shard((5, 4), 0, mesh, dim=1).param.detach()

    def scaled() -> None:
        scaler = torch.amp.GradScaler("cpu")
        loss = sum(each.param.to_local().sum() for each in sharded)
        scaler.scale(loss)
        scaler.step(muon)

    def unscaled() -> None:
        scaler = torch.amp.GradScaler("cpu")
        loss = sum(each.param.to_local().sum() for each in sharded)
        scaler.scale(loss)
        scaler.unscale_(muon)
        scaler.step(muon)

    found = {}
    for name, spoil in {
        "nan": nan, "missing_on_one": missing_on_one, "other_placement": other_placement,
    }.items():  # fmt: skip
        reset()
        spoil()
        before = local_state()
        error = _error_of(muon.step)
        is_same = all(map(torch.equal, before, local_state()))
        found[name] = [error, is_same]
    reset()
    found["scaled"] = [_error_of(scaled), not hasattr(muon, "grad_scale")]
    found["unscaled"] = [_error_of(unscaled), not hasattr(muon, "found_inf")]
    found["group"] = [_error_of(lambda: muon.add_param_group({"params": []})), True]
    found["copy"] = [_error_of(lambda: copy.deepcopy(muon)), True]
    found["pickle"] = [_error_of(lambda: pickle.dumps(muon)), True]
    # An empty shard may have no gradient; the others step.
    reset()
    if rank == 1:
        sharded[1].param.grad = None
    before = local_state()
    found["empty"] = [_error_of(muon.step), not torch.equal(before[0], local_state()[0])]
    return found


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("nan", "rank 1: w0: expected a finite gradient, got NaN or Inf"),
        ("missing_on_one", "rank 1: w0: expected a gradient on all ranks that hold the parameter"),
        ("other_placement", "w0: expected a gradient like the parameter, torch.float32 (3, 4)"),
        ("scaled", "step: expected gradients that are not scaled, got a GradScaler"),
        ("unscaled", "step: expected gradients that are not scaled, got a GradScaler"),
        ("group", "add_param_group: expected all parameters at construction"),
        ("copy", "Muon: expected no copy"),
        ("pickle", "Muon: expected no copy"),
        ("empty", "no error"),
    ],
)
def test_step_that_cannot_work_changes_nothing(case, said):
    """All ranks raise; parameters and momentum keep their bits."""
    for found in step_faults():
        error, is_fine = found[case]
        assert said in error
        assert is_fine


@functools.cache
def step_faults() -> list[dict[str, Any]]:
    """Return what both ranks found."""
    return run_ranks(2, _refuse_to_step, timeout_s=120.0).check().results
