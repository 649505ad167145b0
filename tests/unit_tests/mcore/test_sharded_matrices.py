# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""SOAP and all other registered optimizers under Megatron-FSDP, beside upstream's.

On hand-made shards the reference is the class itself on whole matrices, to the bit. Runs go through
the launcher, beside the same optimizer under DDP.
"""

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from emerging_optimizers.utils.sinkhorn_mapper import SinkhornMapper
from helpers import sharded_muon
from helpers.device import kind
from helpers.parity import Setting, check_trains_like_ddp, row
from helpers.ranks import cached_cases, launch, run_ranks
from helpers.sharded_muon import build_optimizers, whole_matrix
from helpers.toy_fsdp import are_equal, build_model, build_optimizer, main_weights, run_backward
from helpers.toy_gpt import (
    BF16,
    EP,
    FP32_GRADIENTS,
    HFSDP,
    HSDP,
    PP,
    TP,
    V2,
    ZERO,
    fsdp_toy_gpt,
    needs_flags,
    slow,
    toy_gpt,
    train,
)
from helpers.user_optimizers import NAMES, OPTIONS, without_noise

from megatron_muon.step.owned_matrix import registered_class

pytestmark = pytest.mark.ranks
on_v2 = functools.partial(pytest.param, marks=needs_flags)


def _classes(name: str) -> dict[str, Any]:
    """Return functions that build ours and the class, as ``build_optimizers()`` calls them."""
    from megatron_muon.mcore.sharded_matrices import FSDPWholeMatrixOptimizer

    options = {"lr": 0.02, **OPTIONS.get(name, {})}
    # Scion has none.
    if name != "scion":
        options["weight_decay"] = 0.1
    build = functools.partial(registered_class(name), **options)

    def sharded(params: Sequence[Any], tensor_shards: Any, pg_collection: Any, **_: Any) -> Any:
        return FSDPWholeMatrixOptimizer(
            params,
            build,
            name,
            tensor_shards=tensor_shards,
            device=torch.device(kind()),
            pg_collection=pg_collection,
        )

    return {"sharded": sharded, "whole": lambda params, **_: build(params)}


def _differ(name: str, num_shards: int, **grid: Any) -> list[str]:
    """Step three times, and return the parameters that differ from whole ones."""
    draw = whole_matrix
    if name == "sinkhorn_muon":
        draw = lambda *args: SinkhornMapper()(whole_matrix(*args).abs())  # noqa: E731
    with without_noise(name):
        with mock.patch.object(sharded_muon, "whole_matrix", draw):
            optimizers = build_optimizers(num_shards, **_classes(name), **grid)
        for step in range(3):
            optimizers.set_gradients(step)
            optimizers.sharded.step()
            optimizers.whole.step()
    return [
        part.name
        for param, reference, part in optimizers.params
        if not torch.equal(param._local_tensor, reference[slice(*part.own_box[0])])
    ]


REPLICAS, TENSOR = {"num_replicas": 2}, {"num_tensor_ranks": 2}
EQUAL: dict[int, dict[str, Any]] = {
    1: {"soap": functools.partial(_differ, "soap", 1)},
    2: {name: functools.partial(_differ, name, 2) for name in NAMES},
    3: {"soap": functools.partial(_differ, "soap", 3)},
    4: {
        "soap": functools.partial(_differ, "soap", 4),
        "soap, replicas": functools.partial(_differ, "soap", 2, **REPLICAS),
        "soap, tensor parallelism": functools.partial(_differ, "soap", 2, **TENSOR),
    },
}
results = cached_cases(EQUAL)


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size, rows in EQUAL.items() for name in rows]
)
def test_equals_the_class_on_whole_matrices(size, name):
    """Parameters equal the class on whole matrices, or shards of tensor ranks, to the bit."""
    assert results(size)[name] == [[]] * size


# Clipping depends on the norm, a sum in another order than DDP's.
SOAP = ("--optimizer", "soap", "--lr", "2e-3", "--clip-grad", "0.0", "--train-iters", "10")
SAME_LOSSES = [
    pytest.param(2, 3, (), id="zero3"),
    slow(2, 2, EP, id="zero2_ep2"),
    slow(2, 1, (), id="zero1"),
    slow(2, 0, (), id="zero0"),
    pytest.param(4, 3, (*EP, *TP, "--sequence-parallel"), id="zero3_tp2_ep2"),
    slow(4, 3, (*PP, *TP), id="stages_tp2"),
    slow(4, 3, PP, id="stages"),
    slow(2, 3, (*BF16, "--swiglu"), id="bf16_gated"),
    on_v2(2, 3, V2, id="v2"),
    on_v2(2, 3, (*V2, *EP), id="v2_ep2"),
]


@pytest.mark.parametrize(("world_size", "zero", "flags"), SAME_LOSSES)
def test_two_data_parallel_ranks_have_the_losses_of_ddp(world_size, zero, flags):
    """Ten iterations on two data-parallel ranks have the losses of DDP on them, bit for bit.

    The sum of two gradients has no order.
    """
    of_both = flags[len(V2) :] if flags[: len(V2)] == V2 else flags
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    expected = train(world_size, toy_gpt(*SOAP, *of_both), env=env).losses
    more = FP32_GRADIENTS if BF16[0] in flags else ()
    found = train(world_size, fsdp_toy_gpt(ZERO[zero], *SOAP, *flags, *more)).losses
    assert found == expected
    assert expected[-1] < expected[0] - 0.05


# SOAP turns by rounding, among eigenvectors of nearly equal eigenvalues: losses of DDP on two and
# three ranks differ by 1.1e-3 from its losses on one, norms by 3.7e-3.
FP32 = Setting(SOAP[:4], 1e-2, 1e-1, gain=0.05)
TRAINS_LIKE_DDP = [
    row("zero3_on_three", 3, 3, setting=FP32),
    row("hsdp", 4, 3, setting=FP32, fsdp=HSDP),
    row("hfsdp", 4, 3, setting=FP32, fsdp=HFSDP),
]


@pytest.mark.parametrize(("world_size", "zero", "setting", "flags", "fsdp_flags"), TRAINS_LIKE_DDP)
def test_trains_like_ddp(world_size, zero, setting, flags, fsdp_flags):
    """Losses and norms of SOAP equal DDP's on more ranks, up to rounding."""
    check_trains_like_ddp(world_size, zero, setting, flags, fsdp_flags)


def _raise_on_one_rank() -> None:
    """Let one matrix fail in the second iteration, on its owner."""
    from emerging_optimizers.soap import SOAP as SoapClass

    original = SoapClass.step

    def step(self: Any) -> None:
        (param,) = self.param_groups[0]["params"]
        if self.state[param].get("step") == 1 and param.shape == (32, 56):
            raise ValueError("no convergence")
        original(self)

    SoapClass.step = step


def test_class_that_raises_ends_the_run_on_all_ranks():
    """A class that raises on the owner of a matrix ends the run, naming it, and nothing hangs."""
    run = launch(2, fsdp_toy_gpt(ZERO[3], *SOAP), before=_raise_on_one_rank)
    assert run.exit_codes == [1, 1]
    for output in run.outputs:
        assert "layers.0.mlp.linear_fc2.weight: ValueError: no convergence" in output
        assert "Load weights and optimizer from a checkpoint" in output


# Without Megatron's classes of Muon, and ours, which have tests of their own.
WALKED = sorted({*NAMES} - {"muon", "adaptive_muon"})


def _walk() -> dict[str, Any]:
    """Step every registered optimizer, built by its name, and name parameters unlike upstream's."""
    from megatron.core.optimizer.emerging_optimizers import (
        _default_adam_based_eopt_config_to_kwargs,
    )

    found: dict[str, Any] = {}
    for name in WALKED:
        model, optimizer_class = build_model(), registered_class(name)
        try:
            optimizer = build_optimizer(model, optimizer=name, clip_grad=0.0)
        except RuntimeError as error:
            found[name] = str(error)
            continue
        run_backward(model)
        optimizer.prepare_grads()
        kwargs = _default_adam_based_eopt_config_to_kwargs(name, optimizer.config, None, None)
        taken = inspect.signature(optimizer_class).parameters
        kwargs = {key: value for key, value in kwargs.items() if key in taken}
        pairs = []
        # The second one is Adam.
        for param in optimizer.chained_optimizers[0].get_parameters():
            whole = torch.nn.Parameter(param._local_tensor.clone())
            whole.grad = param.grad._local_tensor.clone()
            pairs.append((param, whole, optimizer_class([whole], **kwargs)))
        with without_noise(name):
            optimizer.step()
            for _, _, reference in pairs:
                reference.step()
        found[name] = [
            n for n, (p, w, _) in enumerate(pairs) if not torch.equal(p._local_tensor, w)
        ]
    return found


def test_every_registered_optimizer_is_built_by_name():
    """The factory builds each registered optimizer, with upstream's arguments for its class."""
    (found,) = run_ranks(1, _walk).check().results
    # Of weights as no model has them from the start.
    assert "Sinkhorn-normalized matrices must have non-negative" in found.pop("sinkhorn_muon")
    assert found == {name: [] for name in WALKED if name != "sinkhorn_muon"}


def _go_on_with_noise() -> list[bool]:
    """Step an optimizer that draws noise, and a new one that has loaded its state."""
    model = build_model()
    optimizer = build_optimizer(model, optimizer="psgd_pro")
    run_backward(model, 0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    before = main_weights(model)
    found = []
    for is_new in (False, True):
        if is_new:
            model = build_model()
            optimizer = build_optimizer(model, optimizer="psgd_pro")
            for name, param in model.param_and_grad_buffer.optimizer_named_parameters:
                param._local_tensor.copy_(before[name])
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        run_backward(model, 1)
        optimizer.step()
        found.append(main_weights(model))
    return are_equal(*found)


def test_noise_goes_on_after_a_load():
    """An optimizer that has loaded its state draws the noise of the run that saved it."""
    for equal in run_ranks(2, _go_on_with_noise).check().results:
        assert equal and all(equal)
