# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers that a trainer builds from parameters alone, as verl, NeMo-RL and others do."""

import itertools

import torch
from helpers.device import kind
from helpers.fsdp2_models import draw_grads, local, mixed_model
from helpers.ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_muon.fsdp2 import MuonAdamW, from_parameters

COMMON = {"lr": 0.02, "weight_decay": 0.1}
# The calls of optimizers, by trainer or form.
CALLS = {
    "verl": lambda model: from_parameters(model.parameters(), **COMMON, momentum=0.9),
    "NeMo-RL": lambda model: from_parameters(
        (param for param in model.parameters() if param.requires_grad),
        **COMMON,
        betas=[0.9, 0.95],
        eps=1e-6,
        foreach=False,
        fused=False,
    ),
    "AutoModel": lambda model: from_parameters(
        params=[param for param in model.parameters() if param.requires_grad], **COMMON
    ),
    "prime-rl": lambda model: from_parameters(list(model.named_parameters()), **COMMON),
    "torchtitan": lambda model: from_parameters(
        [
            {"params": [pair], **COMMON, "fused": False, "betas": [0.8, 0.9]}
            for pair in model.named_parameters()
        ]
    ),
    "names": lambda model: from_parameters(model.named_parameters(), **COMMON),
    "filter": lambda model: from_parameters(
        filter(lambda param: param.requires_grad, model.parameters()), **COMMON
    ),
    "chain": lambda model: from_parameters(
        itertools.chain(*(child.parameters() for child in model.children())), **COMMON
    ),
    "choice": lambda model: from_parameters(
        [*model.parameters()], **COMMON, flatten=True, elementwise_options={"lr": 0.3}
    ),
}
# Other arguments of from_model() for them.
OPTIONS = {
    "verl": {"momentum": 0.9},
    "NeMo-RL": {"betas": [0.9, 0.95], "eps": 1e-6, "foreach": False, "fused": False},
    "torchtitan": {"fused": False, "betas": [0.8, 0.9]},
    "choice": {"flatten": True, "elementwise_options": {"lr": 0.3}},
}


def _routes(optimizer):
    """Return algorithm and other keys of the groups of all parameters."""
    routes = {}
    for algorithm, group in zip(optimizer.algorithms, optimizer.param_groups, strict=True):
        keys = {key: group[key] for key in group if key not in ("params", "param_names")}
        named = zip(group["param_names"], group["params"], strict=True)
        routes |= {param: (name, algorithm, keys) for name, param in named}
    return routes


@on_ranks(2)
def test_calls_of_trainers_step_as_from_model():
    """Calls that pass neither names nor a model choose as from_model, and not Muon for vectors."""
    for name, build in CALLS.items():
        models = [mixed_model() for _ in range(2)]
        for model in models:
            model.gate.weight.requires_grad_(False)
            fully_shard(model, mesh=init_device_mesh(kind(), (2,)))
        theirs = MuonAdamW.from_model(models[0], **COMMON, **OPTIONS.get(name, {}))
        ours = build(models[1])
        for step in range(3):
            for model, optimizer in zip(models, (theirs, ours), strict=True):
                draw_grads([p for p in model.parameters() if p.requires_grad], step)
                optimizer.step()
        for first, second in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(local(first), local(second)), name
        assert all("betas" not in group for group in ours.param_groups if "momentum" in group)
        if name != "torchtitan":
            assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"], name


def test_it_is_a_class_of_optimizers():
    """It is a class, since Hydra's get_class and the Trainer refuse functions."""
    assert isinstance(from_parameters, type)
    assert issubclass(from_parameters, torch.optim.Optimizer)
    assert type(from_parameters(mixed_model().parameters())) is MuonAdamW


def test_groups_keep_their_options():
    """Groups of a trainer keep their options, such as no weight decay."""
    model = mixed_model()
    plain = [model.norm.weight, model.up.bias, model.down.weight]
    decayed = [param for param in model.parameters() if all(param is not each for each in plain)]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}]
    optimizer = from_parameters([*groups, {"params": []}], lr=0.2, elementwise_options={"lr": 0.1})
    assert set(groups[1]) == {"params", "weight_decay"}, "the groups are the caller's"
    routes, expected = _routes(optimizer), _routes(MuonAdamW.from_model(model))
    assert {p: each[:2] for p, each in routes.items()} == {p: e[:2] for p, e in expected.items()}
    for param, (_, algorithm, keys) in routes.items():
        is_plain = any(param is each for each in plain)
        assert keys["weight_decay"] == (0.0 if is_plain else 0.3)
        assert keys["lr"] == (0.2 if algorithm == "muon" else 0.1)
    assert optimizer.algorithms == ("muon", "muon", "adamw", "adamw")
    assert "down.weight  (8, 12)  muon  linear" in optimizer.summary()


def test_parts_of_a_model_have_the_names_of_all_of_it():
    """Parameters of one tower are chosen by their names in the whole model."""
    model = nn.ModuleDict({"head": nn.Sequential(nn.Linear(4, 4)), "body": mixed_model()})
    # A loss may have the weight of a head, under another name.
    loss = nn.ParameterDict({"weight_proj": model["head"][0].weight})
    listed = from_parameters([*model["head"].parameters()])
    assert listed.algorithms == ("adamw",), loss


class _Holder(nn.Module):
    """Yields parameters of a module that is none of its own, or builds before it is a module."""

    def __init__(self, model=None):
        if model is not None:
            self.__dict__["optimizer"] = from_parameters([*model.parameters()])
        super().__init__()

    def chosen(self, model):
        yield from model.parameters()


def test_modules_are_found_whatever_else_there_is():
    """The model is found beside modules under construction, deleted ones and generators."""
    model = mixed_model()
    expected = [each[:2] for each in _routes(MuonAdamW.from_model(model)).values()]
    wrapper = nn.ModuleDict({"router": model})
    wrapper.cycle = [wrapper]
    del wrapper
    for optimizer in (_Holder(model).optimizer, from_parameters(_Holder().chosen(model))):
        assert [each[:2] for each in _routes(optimizer).values()] == expected


def test_parts_of_a_pipeline_have_one_optimizer():
    """Parameters of several parts of a model have one optimizer."""
    parts = [mixed_model() for _ in range(2)]
    optimizer = from_parameters(param for part in parts for param in part.parameters())
    routes = _routes(optimizer)
    for number, part in enumerate(parts):
        for param, (name, algorithm, _) in _routes(MuonAdamW.from_model(part)).items():
            assert routes[param][:2] == (f"{number}.{name}", algorithm)
