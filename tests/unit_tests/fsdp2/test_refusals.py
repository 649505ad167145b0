# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Refusals of the optimizers for FSDP2: by name, with a remedy, and on all ranks together."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.fsdp2_models import mixed_model, shard, wrapped
from helpers.ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

from megatron_muon.fsdp2 import (
    ExchangeSettings,
    Muon,
    MuonAdamW,
    from_parameters,
    parameter_groups,
    validation,
)


def _assert_refused(said: str, call: Callable[[], Any]) -> None:
    """On this rank; no flag of Megatron is named."""
    with pytest.raises((RuntimeError, ValueError, TypeError)) as error:
        call()
    assert said in str(error.value)
    assert "--" not in str(error.value)


def _param(*shape: int, **marks: Any) -> Any:
    param = torch.nn.Parameter(torch.ones(shape))
    for name, value in marks.items():
        setattr(param, name, value)
    return param


BF16, GRAM = ExchangeSettings(comm_dtype="bf16"), ExchangeSettings(newton_schulz="gram")
L2 = {"weight_decay_method": "l2"}
IN_BF16 = {"momentum_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("weight_decay_method: expected one of", {"weight_decay_method": "none"}),
        ("fp32_matmul_prec: expected one of", {"fp32_matmul_prec": "bf16"}),
        ("scale_mode: expected one of", {"scale_mode": "rms"}),
        ("coefficient_type: expected", {"coefficient_type": "cubic"}),
        ("num_ns_steps: expected at least 1", {"num_ns_steps": 0}),
        ("use_syrk: expected False, got True", {"use_syrk": True}),
        ("exchange.comm_dtype: expected fp32", {"fp32_matmul_prec": "high", "exchange": BF16}),
        ("expected one of [torch.float32, torch.bfloat16]", {"momentum_dtype": torch.float16}),
        ("expected a function of a stack, got 'fast'", {"newton_schulz": "fast"}),
        ("exchange.comm_dtype: expected fp32", {"newton_schulz": torch.clone, "exchange": BF16}),
        ("expected a function of a stack", {"newton_schulz": torch.clone, "exchange": GRAM}),
        ("expected one of adamuon, normuon, namo, got adam", {"adaptive": "adam"}),
        ("adaptive: expected a name, or an object with state", {"adaptive": torch.clone}),
        ("expected decoupled or independent or palm with namo", {"adaptive": "namo", **L2}),
        ("momentum_dtype: expected torch.float32 with namo", {"adaptive": "namo", **IN_BF16}),
        ("exchange.newton_schulz: expected standard", {"adaptive": "namo", "exchange": GRAM}),
        ("newton_schulz: expected None", {"adaptive": "namo", "newton_schulz": torch.clone}),
        ("lr: expected a number, at least 0 and less than inf, got -1", {"lr": -1.0}),
        ("momentum: expected a number, at least 0 and less than 1.0, got 2.0", {"momentum": 2.0}),
        ("weight_decay: expected a number, at least 0", {"weight_decay": float("nan")}),
        # A file's 1e-3 is a text to PyYAML, and torch's AdamW takes tensors of one element.
        ("lr: expected a number, at least 0 and less than inf, got '1e-3'", {"lr": "1e-3"}),
        ("lr: expected a number, at least 0", {"lr": torch.tensor([0.1])}),
    ],
)
def test_invalid_arguments_are_refused(said, options):
    """Invalid arguments are refused at construction, also by MuonAdamW, which plans later."""
    _assert_refused(said, lambda: Muon([_param(3, 4)], **options))
    with pytest.raises(ValueError) as error:
        MuonAdamW([("w", _param(3, 4))], **options)
    assert said in str(error.value)


def _muon_adamw(model: Any, num_groups: int = 1, **options: Any) -> MuonAdamW:
    return MuonAdamW([{"params": [model.up.weight], "algorithm": "muon"}] * num_groups, **options)


def _vector_of_adamw(model: Any, **options: Any) -> MuonAdamW:
    return MuonAdamW([{"params": [model.norm.bias], "algorithm": "adamw"}], **options)


class WrongMethod:
    """A method of adaptive Muon that returns another shape."""

    def state_shape(self, rows: int, cols: int) -> tuple[int, int]:
        return 1, 1

    def __call__(self, results: Any, state: Any) -> Any:
        return results[0]


def _step(optimizer: Any, **key: Any) -> None:
    """Step with gradients of ones, after a key of the first group was set."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param, dtype=getattr(param, "grad_dtype", None))
    optimizer.param_groups[0].update(key)
    optimizer.step()


def _from_shared(model: Any) -> Any:
    """Build of parameters that two modules have, by names that lead to other choices."""
    _modules = [torch.nn.ModuleDict({name: model}) for name in ("decoder", "lora_model")]
    return from_parameters([*model.parameters()])


def _from_a_layer(model: Any) -> Any:
    head = torch.nn.Linear(8, 3)
    return from_parameters([*model.parameters(), *head.parameters()])


def _from_parameters_before_sharding(model: Any) -> Any:
    listed = [*model.parameters()]
    model.up.weight = torch.nn.Parameter(model.up.weight.detach().clone())
    return from_parameters(listed)


IN_FLOAT16 = _param(3, 4, grad_dtype=torch.float16)
# What is said of a call with a model on one rank.
CALLS: list[tuple[str, Callable[[Any], Any]]] = [
    ("got ['zz'], which find none", lambda m: parameter_groups(m, elementwise_names=["zz"])),
    (
        "splits: expected patterns that find some of",
        lambda m: parameter_groups(m, splits={"q": 3}),
    ),
    ("expected trainable parameters", lambda m: parameter_groups(m.requires_grad_(False))),
    ("got 'sgd'", lambda m: MuonAdamW([{"params": [m.up.weight], "algorithm": "sgd"}])),
    ("unexpected keyword argument 'mu'", lambda m: _muon_adamw(m, mu=0.9)),
    ("Invalid beta parameter", lambda m: _vector_of_adamw(m, betas=(2.0, 0.9))),
    ("lr: expected a number", lambda m: Muon([{"params": [m.up.weight], "lr": -1.0}])),
    ("lr: expected a number", lambda m: _muon_adamw(m, lr=-1.0)),
    ("in more than one parameter", lambda m: _muon_adamw(m, 2)),
    ("expected record_metrics() before", lambda m: Muon([m.up.weight]).last_metrics()),
    # Parameters whose modules are uncertain.
    ("1 that no module has, of shapes [(7, 3)]",
     lambda m: from_parameters([*m.parameters(), _param(7, 3)])),
    ("1 that no module has, of shapes [(12, 8)]", _from_parameters_before_sharding),
    ("['ModuleDict', 'ModuleDict'], with 10 shared", _from_shared),
    ("['Sequential', 'Linear'], with 0 shared", _from_a_layer),
    ("trainable parameters", lambda m: from_parameters(m.requires_grad_(False).parameters())),
    ("empty parameter list", lambda _: from_parameters(iter(()))),
    ("more than one parameter group",
     lambda m: from_parameters([{"params": m.parameters()}, {"params": m.head.weight}])),
    ("unexpected keyword argument 'amsgrad'",
     lambda m: from_parameters(m.parameters(), lr=0.1, amsgrad=True)),
    # Gradients in float16 may be scaled.
    *[
        ("expected a gradient like the parameter", lambda _: _step(Muon([IN_FLOAT16])))
    ] * hasattr(torch.Tensor, "grad_dtype"),
    # The plan is made.
    ("split_sizes, transposed and flatten of the plan, got others",
     lambda m: _step(Muon([m.up.weight]), split_sizes=2)),
    # A user's function, by its first result of another type, shape or dtype.
    *((said, lambda m, options=options: _step(Muon([m.up.weight], **options)))
      for said, options in (
        ("newton_schulz: expected a function that returns", {"newton_schulz": lambda _: "x"}),
        ("newton_schulz: expected a function that", {"newton_schulz": lambda x: x[:, :2]}),
        ("newton_schulz: expected a function that", {"newton_schulz": torch.Tensor.double}),
        ("WrongMethod: expected a function that returns", {"adaptive": WrongMethod()}),
      )),
    # Blocks that do not add up.
    *(("split_sizes: expected",
       lambda _, sizes=sizes: Muon([{"params": [_param(10, 6)], "split_sizes": sizes}]))
      for sizes in ((3, 3), (-1,), (5, 5, -1), (-1, 3), (3, -2))),
    # Muon's keys, which were removed from groups of AdamW.
    *((f"{key}: expected", lambda m, key=key: MuonAdamW(
        [{"params": [m.norm.bias], "algorithm": "adamw", key: 0.5}]))
      for key in ("nesterov", "momentum", "split_sizes", "beta", "algorithms", "num_heads")),
]  # fmt: skip


@pytest.mark.parametrize(("said", "call"), CALLS)
def test_calls_that_cannot_work_are_refused(said, call):
    """Calls that cannot work are refused on one rank, by the name of their argument."""
    _assert_refused(said, lambda: call(mixed_model()))
    _muon_adamw(mixed_model(), betas=(2.0, 0.9))


# Keys of a group that no step reads, with the remedy.
IGNORED: list[tuple[str, Any, str]] = [
    ("nesterov", "no", "Pass nesterov to the constructor"),
    ("num_ns_steps", 3, "expected 5, the setting of all groups of Muon, got 3"),
    ("scale_mode", "none", "Pass scale_mode"),
    ("ns_steps", 5, "Pass num_ns_steps to the constructor of an optimizer that has it"),
    ("adjust_lr_fn", None, "Pass scale_mode"),
    ("num_heads", 4, "Write split_sizes"),
    ("mu", 0.5, "Write momentum"),
    ("lr", None, "expected a number"),
    ("newton_schulz_steps", 3, "Pass num_ns_steps"),
    ("epsilon", 1e-8, "Pass eps"),
    ("use_muon", False, "Pass algorithm to the constructor"),
    ("momentun", 0.5, "Write momentum"),
    ("weightdecay", 0.5, "Write weight_decay"),
    ("betas", (0.9, 0.9), "choose another algorithm"),
    ("maximize", True, "choose another algorithm"),
]


@pytest.mark.parametrize(("key", "value", "said"), IGNORED)
def test_keys_that_no_step_reads_are_refused(key, value, said):
    """Keys of a group that no step reads are refused in groups and in loaded states."""
    for make in (Muon, MuonAdamW):
        group = {"params": [("w", _param(3, 4))], "algorithm": "muon", key: value}
        _assert_refused(said, lambda make=make, group=group: make([group]))
        param = _param(3, 4)
        optimizer = make([{"params": [param], "algorithm": "muon"}])
        param.grad = torch.ones_like(param)
        optimizer.step()
        before, state = param.detach().clone(), optimizer.state_dict()
        state["param_groups"][0][key] = value
        _assert_refused(said, lambda one=optimizer, two=state: one.load_state_dict(two))
        optimizer.param_groups[0][key] = value
        _assert_refused(f"group 0: {key}", optimizer.step)
        assert torch.equal(param, before)


def test_keys_of_tools_have_no_effect():
    """Keys that schedules and trainers keep in groups are accepted and change nothing."""
    tools = {"initial_lr": 1.0, "max_momentum": 0.9, "lr_scale": 0.5, "name": "experts"}
    tools |= {"is_expert_parallel": True, "wd_mult": 1.0, "layer_id": 3, "swa_lr": 0.1}
    stepped = []
    for keys in ({}, {**tools, "nesterov": True, "num_ns_steps": 5}):
        param = _param(3, 4)
        param.grad = torch.arange(12.0).view(3, 4)
        optimizer = MuonAdamW([{"params": [param], "algorithm": "muon", **keys}])
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert optimizer.param_groups[0].keys() >= keys.keys()
        optimizer.step()
        stepped.append(param.detach())
    assert torch.equal(*stepped)


class Hooked(Muon):
    def post_weight_update_fn_inplace(self, p: Any) -> None:
        p.div_(p.norm())


class Decays(Muon):
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
    number = "w: split_sizes: expected a number of blocks"
    return [
        ("ranks 0, 1: bias: expected a matrix, or a batch of matrices", [("bias", vector)]),
        ("rank 1: w: expected a matrix", [("w", vector if rank == 1 else w)]),
        ("set flatten=True in the group of a convolution", [("w", _param(4, 3, 2, 2))]),
        ("w: expected a DTensor in a job of 2 ranks, got a plain tensor", [("w", _param(4, 4))]),
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
        ("w: flatten: expected True or False, got 1", [{"params": [("w", w)], "flatten": 1}]),
        ("rank 1: w: expected a shard of ranges", [("w", uneven)]),
        ("w: expected a mesh whose ranks ascend", [("w", turned)]),
        ("w: expected a parameter of the model on a mesh of Megatron-FSDP", [("w", copied)]),
        ("w: expected elements, got shape (6, 0)", [("w", empty)]),
        ("b: expected each parameter and each name once", [("a", w), ("b", w)]),
        ("w: expected each parameter and each name once", [("w", w), ("w", second)]),
    ]


def _wrong_plain_tensors(w: Any) -> list[tuple[str, Any, dict[str, Any]]]:
    """Return plain tensors and groups that Muon cannot take: never a silent WORLD."""
    data, tensor = {"process_group": dist.group.WORLD}, {"tensor_group": dist.group.WORLD}
    plain = ("w", _param(4, 4))
    block = ("w", _param(4, 4, partition_dim=0))
    strided = ("w", _param(4, 4, partition_dim=0, partition_stride=2))
    kernel = _param(4, 3, 2, 2)
    kernel.data = kernel.data.to(memory_format=torch.channels_last)
    grid = "process_group, tensor_group: expected ranks in a grid"
    return [
        ("w: expected tensor_group with a partition_dim of 0", [block], data),
        ("v: expected plain tensors with process_group or tensor", [plain, ("v", w)], data),
        # This rank's row is the job, and its column too: no grid.
        (grid, [plain], {**data, **tensor}),
        (f"rank 0: {grid}", [plain], data if dist.get_rank() == 0 else {}),
        (
            "expected none with a partition_stride",
            [{"params": [strided], "split_sizes": 2}],
            tensor,
        ),
        ("expected a contiguous tensor", [{"params": [("w", kernel)], "flatten": True}], data),
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


def _unlike_settings() -> list[tuple[str, dict[str, Any]]]:
    """Return settings that are not the same on both ranks, or do not fit the parameters."""
    rank = dist.get_rank()
    # With a limit a rank joins collectives more.
    limited = ExchangeSettings(staging_bytes=10**9 if rank else None)
    return [
        ("staging memory: expected", {"exchange": ExchangeSettings(staging_bytes=8)}),
        ("rank 0: num_ns_steps: expected at least 1", {"num_ns_steps": 5 * rank}),
        ("coefficient_type: expected", {"coefficient_type": "simple" if rank else "sample"}),
        ("Muon settings: expected the same on all ranks", {"num_ns_steps": 5 + rank}),
        ("rank 1 has 'scale spectral 0.2", {"extra_scale_factor": 0.2 * rank}),
        ("staging_bytes=1000000000", {"exchange": limited}),
        # A rank that checks nothing joins no collective.
        ("check_gradients", {"check_gradients": ("sync", "off")[rank]}),
    ]


def _refuse_to_build(mesh: DeviceMesh) -> None:
    w, second = (shard((6, 4), seed, mesh).param for seed in (0, 1))
    for said, params in (*_wrong_parameters(mesh, w, second), *_unlike_ranks(w, second)):
        _assert_refused(said, partial(Muon, params))
    for said, params, groups in _wrong_plain_tensors(w):
        _assert_refused(said, partial(Muon, params, **groups))
    for said, options in _unlike_settings():
        _assert_refused(said, partial(Muon, [("w", w)], **options))
    release = "another" if dist.get_rank() else "one"
    with mock.patch("megatron_muon.step.muon_step.releases", lambda: release):
        _assert_refused("rank 1 has 'another' where rank 0 has 'one'", partial(Muon, [w]))
    own = "expected no method of emerging-optimizers"
    _assert_refused(f"Hooked.post_weight_update_fn_inplace: {own}", partial(Hooked, [w]))
    _assert_refused(f"Decays._apply_weight_decay_inplace: {own}", partial(Decays, [w]))
    # torch times kernels on rank 1; its list of chunks says something else in a later release.
    with mock.patch.dict("os.environ", PYTORCH_TUNABLEOP_ENABLED=str(dist.get_rank())):
        _assert_refused("rank 1: PYTORCH_TUNABLEOP_ENABLED", partial(Muon, [w]))
    with mock.patch.object(validation, "checkpointed_box", lambda param: ((1, 4), (0, 4))):
        _assert_refused("expected a shard of ranges", partial(Muon, [w]))


def _refuse_calls(mesh: DeviceMesh) -> None:
    """Scale gradients, add parameters, or copy an optimizer."""
    sharded = shard((5, 4), 0, mesh)
    muon = Muon([("w", sharded.param)])
    sharded.draw_grad(10)
    for is_unscaled in (False, True):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(sharded.param.to_local().sum())
        if is_unscaled:
            scaler.unscale_(muon)
        _assert_refused("step: expected gradients that are not scaled", partial(scaler.step, muon))
        assert not hasattr(muon, "grad_scale") and not hasattr(muon, "found_inf")
    for make in (Muon, MuonAdamW):
        (each,) = wrapped(lambda rows: TwoTensor(rows, rows.clone()))
        said = "w: expected a tensor with memory"
        _assert_refused(said, lambda make=make, w=each.param: make([("w", w)]).step())
    late = partial(muon.add_param_group, {"params": []})
    _assert_refused("add_param_group: expected all parameters", late)
    for call in (copy.deepcopy, pickle.dumps):
        _assert_refused("Muon: expected no copy", partial(call, muon))


@on_ranks(2, timeout_s=120.0)
def test_what_cannot_work_is_refused_on_all_ranks():
    """All ranks refuse a setting that one rank refuses, so that no rank hangs."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    _refuse_to_build(mesh)
    _refuse_calls(mesh)
