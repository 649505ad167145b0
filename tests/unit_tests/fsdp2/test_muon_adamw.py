# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One optimizer for all parameters, beside Muon and torch's AdamW as two."""

import copy
import functools
import io
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import fsdp2_models
from helpers.device import device, init_group
from helpers.fsdp2_models import CASES, draw_grads, load_state, local, mixed_model, save_state
from helpers.ranks import run_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_muon.fsdp2 import Muon, MuonAdamW, parameter_groups

NUM_STEPS = 3
# By number of ranks: every placement, and Muon's keys of a group. test_layouts.py has all layouts.
LAYOUTS = {
    3: ("uneven", "columns", "experts", "fused_columns", "tensor_parallel_alone"),
    4: tuple(case.__name__ for case in CASES[4]),
}
ADAMW = {"lr": 0.03, "weight_decay": 0.2, "betas": (0.8, 0.95), "eps": 1e-6}
MUON = {"lr": 0.02, "weight_decay": 0.1}


def _step_cases(cases: Sequence[str]) -> dict[str, list[int]]:
    """Step each layout twice: half by Muon and half by AdamW, in one optimizer and in two."""
    init_group()
    different = {}
    for case in cases:
        make = getattr(fsdp2_models, case)
        (ours, our_rest), (theirs, their_rest) = (make(), make()), (make(), make())
        one = MuonAdamW(
            [
                *({"params": [each.param], **MUON, **each.keys} for each in ours),
                # Torch steps parameters of one mesh at a time.
                *({"params": [x.param], "algorithm": "adamw", **ADAMW} for x in our_rest),
            ]
        )
        muon = Muon(
            [{"params": [each.param], **MUON, **each.keys} for each in theirs],
            nesterov=True,
            scale_mode="match_adamw",
        )
        adamw = torch.optim.AdamW(
            [{"params": [x.param]} for x in their_rest] or [{"params": []}], **ADAMW
        )
        for step in range(NUM_STEPS):
            for parameters in ([*ours, *our_rest], [*theirs, *their_rest]):
                for number, each in enumerate(parameters):
                    each.draw_grad(1000 * step + number)
            for optimizer in (one, muon, adamw):
                optimizer.step()
        pairs = zip([*ours, *our_rest], [*theirs, *their_rest], strict=True)
        different[case] = [
            number
            for number, (own, other) in enumerate(pairs)
            if not torch.equal(local(own.param), local(other.param))
            or any(
                not torch.equal(local(one.state[own.param][key]), local(value))
                for key, value in (muon.state.get(other.param) or adamw.state[other.param]).items()
            )
        ]
    return different


@functools.cache
def differences(world_size: int) -> list[dict[str, list[int]]]:
    """Return what differs, by rank and case."""
    return run_ranks(world_size, _step_cases, LAYOUTS[world_size]).check().results


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world_size", "case"), [(size, case) for size, cases in LAYOUTS.items() for case in cases]
)
def test_one_optimizer_steps_as_muon_and_adamw_do(world_size, case):
    """Parameters and state, on every layout; test_layouts.py compares Muon with whole matrices."""
    for found in differences(world_size):
        assert found[case] == []


def _of_groups(model: Any, adamw: str, *muon: str, **options: Any) -> MuonAdamW:
    groups = [{"params": [model.get_parameter(adamw)], "algorithm": "adamw"}]
    groups += [{"params": [model.get_parameter(name)], "algorithm": "muon"} for name in muon]
    return MuonAdamW(groups, **options)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda m: parameter_groups(m, elementwise_names=["zz"]), "got ['zz'], which find none"),
        (lambda m: parameter_groups(m.requires_grad_(False)), "expected trainable parameters"),
        (lambda m: MuonAdamW([{"params": [m["up"].weight], "algorithm": "sgd"}]), "got 'sgd'"),
        (lambda m: MuonAdamW([m["up"].weight], mu=0.9), "expected arguments of Muon, got ['mu']"),
        (lambda m: MuonAdamW([m["up"].weight], scale_mode="rms"), "scale_mode: expected one of"),
        (lambda m: MuonAdamW([m["up"].weight], coefficient_type="cubic"), "coefficient_type: exp"),
        (lambda m: MuonAdamW([m["up"].weight], num_ns_steps=0), "num_ns_steps: expected at least"),
        (lambda m: MuonAdamW([m["up"].weight], fp32_matmul_prec="bf16"), "fp32_matmul_prec: exp"),
        (lambda m: _of_groups(m, "norm.bias", betas=(2.0, 0.9)), "Invalid beta parameter"),
        (lambda m: _of_groups(m, "up.weight", "up.weight"), "in more than one parameter group"),
    ],
)  # fmt: skip
def test_construction_that_cannot_work_is_refused(build: Callable[[Any], Any], said: str):
    """Muon's arguments count always, AdamW's where there is a group of AdamW; not in a step."""
    with pytest.raises((TypeError, ValueError)) as error:
        build(mixed_model())
    assert said in str(error.value)
    MuonAdamW([mixed_model()["up"].weight], betas=(2.0, 0.9))


def test_schedulers_copies_and_pickles_before_the_first_step():
    """A trainer may copy an optimizer that it has not stepped; afterwards it has process groups."""
    model = mixed_model()
    optimizer = MuonAdamW.from_model(model, lr=0.1)
    other = copy.deepcopy(model)
    copied = copy.deepcopy(optimizer)
    for group, copies in zip(optimizer.param_groups, copied.param_groups, strict=True):
        by_name = dict(other.named_parameters())
        copies["params"] = [by_name[name] for name in group["param_names"]]
    stream = io.BytesIO()
    torch.save(optimizer, stream)
    stream.seek(0)
    assert torch.load(stream, weights_only=False).algorithms == optimizer.algorithms
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, copied)]
    for step in range(NUM_STEPS):
        for each, scheduled, schedule in (
            (model, optimizer, schedules[0]),
            (other, copied, schedules[1]),
        ):
            draw_grads(each.parameters(), step)
            scheduled.step()
            schedule.step()
    assert {group["lr"] for group in optimizer.param_groups} == {0.1 * 0.5**NUM_STEPS}
    for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(own, theirs)
    with pytest.raises(TypeError, match="expected no copy after the first step"):
        copy.deepcopy(optimizer)


def test_groups_may_be_added_until_the_first_step():
    """They have the defaults of their algorithm."""
    model = mixed_model()
    optimizer = MuonAdamW([model["up"].weight], lr=0.1)
    optimizer.add_param_group({"params": [model["norm"].weight], "algorithm": "lion", "lr": 0.5})
    before = model["norm"].weight.detach().clone()
    draw_grads(model.parameters(), 0)
    optimizer.step()
    # The first update of Lion is the sign of the gradient; weight decay is that of the optimizer.
    expected = before * (1 - 0.5 * 0.01) - 0.5 * model["norm"].weight.grad.sign()
    torch.testing.assert_close(model["norm"].weight.detach(), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match="expected all parameters before the first step"):
        optimizer.add_param_group({"params": [model["down"].weight]})


def test_state_dict_of_one_rank_resumes():
    """The bits of the run that went on, through torch.save's form."""
    models = [mixed_model(), mixed_model()]
    optimizers = [MuonAdamW.from_model(each, lr=0.1) for each in models]
    for step in range(2):
        draw_grads(models[0].parameters(), step)
        optimizers[0].step()
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        draw_grads(model.parameters(), 2)
        optimizer.step()
    assert all(map(torch.equal, *(list(each.parameters()) for each in models)))


def _late() -> None:
    """Build it over plain parameters, swap them as accelerate does, and step."""
    init_group()
    mesh = init_device_mesh(device().type, (torch.distributed.get_world_size(),))
    late, early = mixed_model(), mixed_model()
    optimizer = MuonAdamW.from_model(late, lr=0.1)
    # Nothing is planned by these while parameters are plain.
    optimizer.load_state_dict(optimizer.state_dict())
    names = [group["param_names"] for group in optimizer.param_groups]
    for model in (late, early):
        fully_shard(model, mesh=mesh)
    by_name = dict(late.named_parameters())
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [by_name[name] for name in of_group]
    reference = MuonAdamW.from_model(early, lr=0.1)
    for step in range(NUM_STEPS):
        for model, each in ((late, optimizer), (early, reference)):
            draw_grads(model.parameters(), step)
            each.step()
    # Entries of the plain parameters were left, and named nobody.
    assert len(optimizer.state_dict()["state"]) == len(list(late.parameters())) == 10
    for own, other in zip(late.parameters(), early.parameters(), strict=True):
        assert torch.equal(local(own), local(other))
    # And now they change, on one rank alone.
    if torch.distributed.get_rank() == 1:
        group = optimizer.param_groups[optimizer.algorithms.index("muon")]
        group["params"] = list(reversed(group["params"]))
    draw_grads(late.parameters(), 0)
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    said = "rank 1: param_groups: expected the parameters of the first step"
    assert said in str(error.value)
    for shape, said in (
        ((4, 4), "w: expected a DTensor in a job of 2 ranks"),
        ((4,), "w: expected a matrix"),
    ):
        param = torch.nn.Parameter(torch.ones(shape, device=device()))
        param.grad = torch.ones_like(param)
        with pytest.raises(RuntimeError) as error:
            MuonAdamW([("w", param)]).step()
        assert said in str(error.value)


@pytest.mark.ranks
def test_parameters_may_become_shards_before_the_first_step():
    """As accelerate swaps them. The first step names those that cannot be stepped.

    A change after that is an error on all ranks, and a vector is not given to AdamW in silence.
    """
    run_ranks(2, _late).check()


def _sharded(shape: list[int]) -> torch.nn.Module:
    model = mixed_model()
    names = ("replicate", "shard")[-len(shape) :]
    fully_shard(model, mesh=init_device_mesh(device().type, tuple(shape), mesh_dim_names=names))
    return model


def _optimizers(model: torch.nn.Module, kind: str) -> list[Any]:
    """Return one optimizer, Muon and AdamW, or a Muon without names, torch's or ours, and AdamW."""
    if kind == "one":
        return [MuonAdamW.from_model(model, lr=0.1)]
    by_algorithm: dict[str, list[Any]] = {"muon": [], "adamw": []}
    for group in parameter_groups(model):
        by_algorithm[group.pop("algorithm")].append(group)
    adamw = torch.optim.AdamW(by_algorithm["adamw"], lr=0.1)
    if kind == "two":
        options: dict[str, Any] = {"nesterov": True, "scale_mode": "match_adamw"}
        return [Muon(by_algorithm["muon"], lr=0.1, **options), adamw]
    matrices = [param for group in by_algorithm["muon"] for param in group["params"]]
    # Torch's steps round otherwise: matrices stay, and momentum goes on.
    return [{"torch": torch.optim.Muon, "unnamed": Muon}[kind](matrices, lr=0.0), adamw]


# Kinds of optimizers: how states are saved, and how they are loaded.
WAYS = [("one", "one"), ("two", "one"), ("two", "two"), ("torch", "unnamed")]


def _save(folder: str) -> None:
    """Train two steps with each kind of optimizers; save, and save the step after."""
    init_group()
    for kind in dict(WAYS):
        model = _sharded([torch.distributed.get_world_size()])
        optimizers = _optimizers(model, kind)
        for step in range(3):
            draw_grads(model.parameters(), step)
            for each in optimizers:
                each.step()
            for is_flat in (False, True) if step else ():
                options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
                save_state(f"{folder}/{kind}_{is_flat}_{step}", model, optimizers, options)


def _load(folder: str, shape: list[int]) -> None:
    """Load on other ranks, go on, and compare with the run that did."""
    init_group()
    for (saved, kind), is_flat in itertools.product(WAYS, (False, True)):
        runs = []
        for step in (1, 2):
            model = _sharded(shape)
            for param in model.parameters():
                torch.nn.init.constant_(param, 7.0)
            optimizers = _optimizers(model, kind)
            options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
            load_state(f"{folder}/{saved}_{is_flat}_{step}", model, optimizers, options)
            if step == 1:
                draw_grads(model.parameters(), 2)
                for each in optimizers:
                    each.step()
            tensors = list(model.parameters())
            for param in model.parameters():
                states = (each.state[param] for each in optimizers if param in each.state)
                tensors += [value for of_param in states for value in of_param.values()]
            runs.append([local(each) for each in tensors])
        assert len(runs[0]) == len(runs[1]) > 25
        assert all(map(torch.equal, *runs)), (saved, kind, is_flat)


@pytest.mark.ranks
def test_state_of_one_optimizer_or_two_loads_on_other_ranks(tmp_path: Path):
    """Flat and nested; a separate Muon, torch's too, and AdamW go on in one optimizer or two."""
    run_ranks(2, _save, str(tmp_path)).check()
    for ranks, shape in ((3, [3]), (4, [2, 2])):
        run_ranks(ranks, _load, str(tmp_path), shape).check()
