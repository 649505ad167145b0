# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of whole matrices on shards: every registered one, beside itself on whole ones."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emerging_optimizers import registry
from emerging_optimizers.utils.sinkhorn_mapper import SinkhornMapper
from helpers.device import init_group, kind
from helpers.fsdp2_models import (
    FSDP2,
    OTHERS,
    Sharded,
    draw_grads,
    drawn,
    error_of,
    load_state,
    local,
    mixed_model,
    save_state,
    shard,
)
from helpers.ranks import cached_cases, run_ranks
from helpers.user_optimizers import (
    NAMES,
    OPTIONS,
    Counting,
    Early,
    Failing,
    Fussy,
    Halving,
    OneSided,
    without_noise,
)
from helpers.whole_matrices import WholeOptimizer
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_muon.fsdp2 import Muon, MuonAdamW, parameter_groups
from megatron_muon.step.owned_matrix import registered_class

pytestmark = pytest.mark.ranks


def _build(
    parameters: Sequence[Sharded], optimizer_class: Any, options: dict[str, Any]
) -> tuple[Muon, WholeOptimizer]:
    """Return an optimizer of shards, and the class itself on whole matrices."""
    if optimizer_class == "sinkhorn_muon":
        for each in parameters:
            each.whole = SinkhornMapper()(each.whole.abs())
            local(each.param.detach()).copy_(each.own(each.whole))
    groups = [{"params": [(f"weight.{i}", x.param)], **x.keys} for i, x in enumerate(parameters)]
    arguments = parameters[0].arguments if parameters else {}
    optimizer = Muon(
        groups,
        lr=0.02,
        weight_decay=0.1,
        optimizer_class=optimizer_class,
        optimizer_options=options,
        **arguments,
    )
    whole_class = optimizer_class
    if isinstance(whole_class, str):
        whole_class = registry.get_optimizer_cls(whole_class)
    options = {**options, "lr": 0.02}
    if optimizer_class != "scion" and not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, Halving)
    ):
        options["weight_decay"] = 0.1
    return optimizer, WholeOptimizer(parameters, partial(whole_class, **options))


def _step(parameters: Sequence[Sharded], optimizers: Sequence[Any], steps: Sequence[int]) -> None:
    for step in steps:
        grads = [drawn(x.whole.shape, 1000 * step + i) for i, x in enumerate(parameters)]
        for each, grad in zip(parameters, grads, strict=True):
            each.set_grad(grad)
        for optimizer in optimizers:
            optimizer.step(*([grads] if isinstance(optimizer, WholeOptimizer) else []))


def _differ(layout: str, size: int, optimizer_class: Any, **options: Any) -> list[str]:
    """Step three times, and return the values that differ from whole matrices."""
    parameters = {**FSDP2[size], **OTHERS[size]}[layout]()
    with without_noise(optimizer_class):
        optimizer, whole = _build(parameters, optimizer_class, options)
        _step(parameters, [optimizer, whole], range(3))
    return whole.differences()


def _refuse(optimizer_class: Any, **options: Any) -> str:
    return error_of(_build, FSDP2[3]["uneven"](), optimizer_class, options)


def _fail() -> list[Any]:
    """Step with a class that raises on one owner, once more, and after a load."""
    parameters = FSDP2[3]["uneven"]()
    optimizer, whole = _build(parameters, Failing, {})
    _step(parameters, [optimizer, whole], [0])
    saved = copy.deepcopy(optimizer.state_dict())
    before = [local(each.param.detach()).clone() for each in parameters]
    Failing.fails = True
    errors = [error_of(_step, parameters, [optimizer], [step]) for step in (1, 2)]
    Failing.fails = False
    for each, value in zip(parameters, before, strict=True):
        local(each.param.detach()).copy_(value)
    optimizer.load_state_dict(saved)
    _step(parameters, [optimizer, whole], [1])
    return [*errors, whole.differences()]


def _resume(optimizer_class: Any, step: int) -> list[bool]:
    """Compare an optimizer after a step with a new one that has loaded its state."""
    parameters, others = FSDP2[3]["uneven"](), FSDP2[3]["uneven"]()
    optimizer, _ = _build(parameters, optimizer_class, {})
    other, _ = _build(others, optimizer_class, {})
    _step(parameters, [optimizer], range(step))
    for each, another in zip(parameters, others, strict=True):
        local(another.param.detach()).copy_(local(each.param.detach()))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _step(parameters, [optimizer], [step])
    _step(others, [other], [step])
    pairs = zip(parameters, others, strict=True)
    return [
        f"weight.{i}"
        for i, (a, b) in enumerate(pairs)
        if not torch.equal(local(a.param), local(b.param))
    ]


def _without_rows(is_given: bool) -> list[str]:
    """Step matrices whose owners have none of their rows, and gradients or none alone."""
    mesh = init_device_mesh(kind(), (dist.get_world_size(),))
    parameters = [shard((1, 4 + seed), seed, mesh) for seed in range(3)]
    optimizer, whole = _build(parameters, torch.optim.AdamW, {})
    grads = [drawn(each.whole.shape, 7) for each in parameters]
    for each, grad in zip(parameters, grads, strict=True):
        each.set_grad(grad)
        if bool(local(each.param).numel()) != is_given:
            each.param.grad = None
    optimizer.step()
    if is_given:
        whole.step(grads)
    return whole.differences()


def _miss() -> bool:
    """Step where a matrix has no gradient; value and state stay."""
    parameters = FSDP2[3]["uneven"]()
    optimizer, _ = _build(parameters, "soap", {})
    _step(parameters, [optimizer], [0])
    param = parameters[0].param

    def kept() -> list[Any]:
        state = optimizer.state_dict()["state"][0].values()
        return [local(each).clone() for each in (param.detach(), *state) if torch.is_tensor(each)]

    before = kept()
    for each in parameters[1:]:
        each.draw_grad(7)
    param.grad = None
    optimizer.step()
    return all(map(torch.equal, before, kept()))


def _hook() -> list[str]:
    """Step with a hook of the user's on all optimizers; return the classes that it sees."""
    seen: list[str] = []
    see = lambda optimizer, *_: seen.append(type(optimizer).__name__)  # noqa: E731
    handle = register_optimizer_step_post_hook(see)
    parameters = FSDP2[3]["uneven"]()
    optimizer, _ = _build(parameters, torch.optim.AdamW, {})
    _step(parameters, [optimizer], [0])
    handle.remove()
    return seen


def _load_full(**arguments: Any) -> str:
    """Load a state that torch has collected on rank 0, where no state of other owners is."""
    state, optimizer = {}, None
    for step in (2, 0):
        parameters = FSDP2[3]["uneven"]()
        model = nn.ParameterList(each.param for each in parameters)
        optimizer = Muon([*model.named_parameters()], lr=0.02, **arguments)
        _step(parameters, [optimizer], range(step))
        if step:
            options = StateDictOptions(full_state_dict=True)
            state = get_optimizer_state_dict(model, optimizer, options=options)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    return error_of(partial(set_optimizer_state_dict, options=options), model, optimizer, state)


def _moments_without_rows() -> bool:
    """Step without a gradient of matrices whose owners have none of their rows; state stays."""
    mesh = init_device_mesh(kind(), (dist.get_world_size(),))
    parameters = [shard((1, 4 + seed), seed, mesh) for seed in range(3)]
    params = [each.param for each in parameters]
    optimizer = Muon(params, lr=0.1, adaptive="normuon")

    def kept() -> list[Any]:
        states = optimizer.state_dict()["state"].values()
        return [value.clone() for each in states for k, value in each.items() if "moment2_" in k]

    _step(parameters, [optimizer], [0])
    before = kept()
    for param in params:
        param.grad = None
    optimizer.step()
    return all(map(torch.equal, before, kept()))


def _reset(optimizer_class: Any) -> list[str]:
    """Remove all state on all ranks after two steps, and go on as a new optimizer."""
    parameters = FSDP2[3]["fused"]()
    optimizer, whole = _build(parameters, optimizer_class, {})
    _step(parameters, [optimizer, whole], range(2))
    optimizer.state.clear()
    for each, value in zip(parameters, whole.wholes(), strict=True):
        each.whole = value
    optimizer.state_dict()
    whole = WholeOptimizer(parameters, whole.build)
    _step(parameters, [optimizer, whole], range(2, 4))
    return whole.differences()


CLASSES: dict[str, Any] = {
    "adamw of torch": torch.optim.AdamW,
    "sgd of torch": torch.optim.SGD,
    "state of a constructor": Early,
}
SOAP = {"soap": "soap", **CLASSES}
LAYOUTS = {
    2: ("plain_replicas", "plain_blocks", "cpu_memory", "wrapped"),
    3: ("uneven", "columns", "experts", "fused", "transposed", "convolutions"),
    4: (*FSDP2[4], *OTHERS[4]),
}
EQUAL: dict[int, dict[str, Callable[[], Any]]] = {
    size: {
        f"soap {layout}": partial(_differ, layout, size, "soap", max_update_rms=0.5)
        for layout in layouts
    }
    for size, layouts in LAYOUTS.items()
}
EQUAL[3] |= {name: partial(_differ, "uneven", 3, name, **OPTIONS.get(name, {})) for name in NAMES}
EQUAL[3] |= {"class of a user": partial(_differ, "fused", 3, Halving)}
EQUAL[3] |= {name: partial(_differ, "uneven", 3, each) for name, each in CLASSES.items()}
EQUAL[3] |= {f"reset {name}": partial(_reset, each) for name, each in SOAP.items()}
EQUAL[3] |= {
    f"resume {name} {step}": partial(_resume, each, step)
    for step in (0, 2)
    for name, each in {**SOAP, "psgd_pro": "psgd_pro"}.items()
}
EQUAL[3] |= {f"without rows {given}": partial(_without_rows, given) for given in (True, False)}
REFUSED: dict[str, tuple[Callable[[], str], str]] = {
    "name": (partial(_refuse, "sope"), "optimizer_class: expected a class, or one of"),
    "option": (partial(_refuse, "soap", beta=1), "unexpected keyword argument 'beta'"),
    "state in groups": (partial(_refuse, Counting), "that changes ['num_steps'] of groups"),
    "one rank": (partial(_refuse, OneSided), "rank 1: optimizer_class: AssertionError: no such"),
    "options alone": (partial(_refuse, None, beta=1), "expected an optimizer_class with them"),
    "momentum": (
        partial(error_of, partial(Muon, [], momentum=0.5, optimizer_class="soap")),
        "momentum: expected no argument of Muon with optimizer_class, got 0.5",
    ),
    "key of a group": (
        partial(error_of, partial(Muon, [{"params": [], "momentum": 0.5}], optimizer_class="soap")),
        "momentum: expected a key of optimizer_class, got 0.5",
    ),
    "matrix": (partial(_refuse, Fussy), "weight.1: ValueError: no five rows"),
}
FAULTS = {
    "fail": _fail,
    "miss": _miss,
    "full soap": partial(_load_full, optimizer_class="soap"),
    "full normuon": partial(_load_full, adaptive="normuon"),
    "full namo": partial(_load_full, adaptive="namo"),
    "moments without rows": _moments_without_rows,
    "hook": _hook,
    **{name: case for name, (case, _) in REFUSED.items()},
}
results = cached_cases({**EQUAL, 3: {**EQUAL[3], **FAULTS}})


@pytest.mark.parametrize(
    ("size", "case"), [(size, case) for size, cases in EQUAL.items() for case in cases]
)
def test_equals_the_class_on_whole_matrices(size, case):
    """Values equal the class on whole matrices, to the bit."""
    assert results(size)[case] == [[]] * size


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_all_ranks(name):
    """A class that cannot be built is refused on all ranks, though one of them sees it."""
    for error in results(3)[name]:
        assert REFUSED[name][1] in error and "No optimizer was built" in error


def test_class_that_raises_on_one_owner():
    """A step whose class raises on one rank ends with an error on all, until a state is loaded."""
    for first, second, differences in results(3)["fail"]:
        assert (
            "weight.1: ValueError: no convergence" in first
            and "Load weights and optimizer" in first
        )
        assert "step: expected weights and state of a complete step" in second
        assert differences == []


@pytest.mark.parametrize("name", ["soap", "normuon", "namo"])
def test_state_that_one_rank_has_collected_is_refused(name):
    """A state without the matrices of other owners is refused, though torch fills it up."""
    for error in results(3)[f"full {name}"]:
        assert "step_of_owner of the step that saved, got another" in error


def test_hooks_of_all_optimizers_see_one():
    """Hooks of a user on all optimizers see the user's optimizer, and none of single matrices."""
    assert results(3)["hook"] == [["Muon"]] * 3


def test_matrix_without_a_gradient():
    """A matrix without a gradient keeps its value and state."""
    assert results(3)["miss"] == [True] * 3


def test_second_moments_of_a_matrix_without_a_gradient():
    """Second moments without a gradient stay; an owner without rows of the matrix averaged them."""
    assert results(3)["moments without rows"] == [True] * 3


def _train(folder: str, first: int, layout: str) -> None:
    """Go on from a checkpoint, and compare with whole matrices; the first run saves."""
    init_group()
    for name in ("soap", "oblique_adam"):
        parameters = FSDP2[dist.get_world_size()][layout]()
        model = nn.ParameterList(each.param for each in parameters)
        optimizer, whole = _build(parameters, name, {})
        for step in range(first):
            whole.step([drawn(x.whole.shape, 1000 * step + i) for i, x in enumerate(parameters)])
        if first:
            load_state(f"{folder}/{name}", model, optimizer)
            assert whole.differences() == []
        _step(parameters, [optimizer, whole], range(first, first + 2))
        assert whole.differences() == [], (name, first)
        if not first:
            save_state(f"{folder}/{name}", model, optimizer)


@pytest.mark.parametrize("layout", ["experts", "fused"])
def test_goes_on_with_other_owners(tmp_path, layout):
    """State that was saved on two ranks goes on to the bit on two and on three."""
    for first, size in ((0, 2), (2, 2), (2, 3)):
        run_ranks(size, _train, str(tmp_path), first, layout).check()


def _train_beside_adamw(folder: str, first: int) -> None:
    """Step a model whose other parameters AdamW steps, beside both on the unsharded model."""
    init_group()
    whole, model = mixed_model(), mixed_model()
    fully_shard(model, mesh=init_device_mesh(kind(), (dist.get_world_size(),)))
    options = {"shampoo_beta": 0.9}
    optimizer = MuonAdamW.from_model(
        model, lr=0.03, weight_decay=0.1, optimizer_class="soap", optimizer_options=options
    )
    chosen: dict[str, list[Any]] = {"muon": [], "adamw": []}
    for group in parameter_groups(whole):
        chosen[group["algorithm"]] += group["params"]
    common = {"lr": 0.03, "weight_decay": 0.1}
    references = [
        registered_class("soap")(chosen["muon"], **common, **options),
        torch.optim.AdamW(chosen["adamw"], **common),
    ]
    for step in range(first + 2):
        draw_grads(whole.parameters(), step)
        for each in references:
            each.step()
        if step == first and first:
            load_state(folder, model, optimizer)
        if step >= first:
            draw_grads(model.parameters(), step)
            optimizer.step()
    for own, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(own.full_tensor(), other)
    if not first:
        save_state(folder, model, optimizer)


def test_beside_adamw(tmp_path):
    """One optimizer steps matrices by another class and the rest by AdamW, and is resumed."""
    for first, size in ((0, 2), (2, 3)):
        run_ranks(size, _train_beside_adamw, str(tmp_path), first).check()
