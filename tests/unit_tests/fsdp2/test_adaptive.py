# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Methods of adaptive Muon; ``test_layouts.py`` has their bits beside upstream's."""

import copy
import textwrap
from typing import Any

import pytest
import torch
from helpers.device import device, init_group, kind
from helpers.fsdp2_models import drawn
from helpers.ranks import ROOT, run_ranks

METHODS = ("normuon", "namo", "adamuon")


def _model() -> tuple[Any, Any]:
    """Shard query, key and value, a tall matrix, experts and a bias over all ranks."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = torch.nn.Module()
    shapes = {"qkv": (16, 6), "tall": (9, 4), "experts": (4, 3, 5), "bias": (7,)}
    for i, (name, shape) in enumerate(shapes.items()):
        module.register_parameter(name, torch.nn.Parameter(drawn(shape, i)))
    fully_shard(module, mesh=init_device_mesh(kind(), (dist.get_world_size(),)))
    return module, dict(module.named_parameters())


def _optimizer(method: Any, params: dict[str, Any]) -> Any:
    from megatron_muon.fsdp2 import ExchangeSettings, MuonAdamW

    return MuonAdamW(
        [
            {"params": [("qkv", params["qkv"])], "split_sizes": (4, 2, 2)},
            {"params": [(name, params[name]) for name in ("tall", "experts")]},
            {"params": [("bias", params["bias"])], "algorithm": "adamw"},
        ],
        lr=0.05,
        adaptive=method,
        exchange=ExchangeSettings(comm_dtype="fp32"),
    )


def _train(params: dict[str, Any], optimizer: Any, steps: range) -> list[Any]:
    from torch.distributed.tensor import distribute_tensor

    for step in steps:
        for i, param in enumerate(params.values()):
            grad = drawn(param.shape, 100 * step + i)
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
        optimizer.step()
    moments = [_moment(optimizer, params[name]) for name in ("qkv", "tall", "experts")]
    return [param.full_tensor() for param in params.values()] + moments


def _states(module: Any, optimizer: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    of_model, of_optimizer = get_state_dict(module, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def _save(folder: str) -> list[str]:
    """Save in the middle of a run; return what a step without a gradient does wrong after it."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    init_group()
    different = []
    for method in METHODS:
        module, params = _model()
        optimizer = _optimizer(method, params)
        _train(params, optimizer, range(2))
        dcp.save(_states(module, optimizer), checkpoint_id=f"{folder}/{method}")
        expected = _train(params, optimizer, range(2, 4))
        if dist.get_rank() == 0:
            torch.save(expected, f"{folder}/{method}.pt")
        different += _step_without_gradient(method, params, optimizer)
    return different


def _step_without_gradient(method: str, params: dict[str, Any], optimizer: Any) -> list[str]:
    before = _moment(optimizer, params["tall"]).clone()
    for param in params.values():
        param.grad = param.detach().clone()
    params["tall"].grad = None
    optimizer.step()
    problems = []
    if not torch.equal(before, _moment(optimizer, params["tall"])):
        problems.append(f"{method}: moments have changed")
    if not _moment(optimizer, params["qkv"]).all():
        problems.append(f"{method}: no moments")
    return problems


def _load(folder: str) -> list[str]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    init_group()
    different = []
    for method in METHODS:
        module, params = _model()
        with torch.no_grad():
            for param in params.values():
                param.zero_()
        optimizer = _optimizer(method, params)
        # Its state exists, with other values.
        _train(params, optimizer, range(7, 8))
        state = _states(module, optimizer)
        dcp.load(state, checkpoint_id=f"{folder}/{method}")
        set_state_dict(
            module,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        # In other memory, as torch.load has it.
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        expected = torch.load(f"{folder}/{method}.pt", map_location=device())
        found = _train(params, optimizer, range(2, 4))
        different += [
            f"{method}: {name}"
            for name, a, b in zip([*params, *"qte"], found, expected, strict=True)
            if not torch.equal(a, b)
        ]
    return different


def _moment(optimizer: Any, param: Any) -> Any:
    """Return the second moments of a parameter, as they are saved."""
    params = [each for group in optimizer.param_groups for each in group["params"]]
    number = next(i for i, each in enumerate(params) if each is param)
    value = optimizer.state_dict()["state"][number]["moment2_buffer"]
    return getattr(value, "full_tensor", lambda: value)()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[str]]]:
    """Return the folder of checkpoints, and what each rank has found."""
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, run_ranks(2, _save, folder).check().results


@pytest.mark.ranks
def test_second_moments_are_resumed_on_other_ranks(saved):
    """Owners change with the number of ranks, and those of two ranks hold whole experts.

    normuon's moments are on their owners alone while a run goes on. adamuon once went on with the
    tensors of before the load, which nobody saved.
    """
    for world_size in (2, 3):
        assert run_ranks(world_size, _load, saved[0]).check().results == [[]] * world_size


@pytest.mark.ranks
def test_parameter_without_a_gradient_keeps_its_moments(saved):
    """Its momentum is exchanged all the same, and the owner would average its result."""
    assert saved[1] == [[], []]


def test_own_method_is_called_with_results_and_its_state():
    """The example of docs/optimizers.md, beside Muon without a method.

    The gradient is the same in both steps, so results are too: the mean square of a row is averaged
    to 0.05 of it, and then to 0.0975. Newton-Schulz of a multiple in float32 differs by 1e-6.
    """
    text = (ROOT / "docs" / "optimizers.md").read_text()
    code = text.partition("<!-- own method -->\n")[2].partition("\n\n    # end")[0]
    names: dict[str, Any] = {}
    exec(textwrap.dedent(code), names)
    start, grad = drawn((6, 4), 0), drawn((6, 4), 1)
    moved, moments = [], []
    for method in (None, names["RowRMS"]()):
        param = torch.nn.Parameter(start.clone())
        muon = names["Muon"](
            [param],
            lr=0.1,
            weight_decay=0.0,
            fp32_matmul_prec="highest",
            scale_mode="none",
            adaptive=method,
        )
        for _ in range(2):
            param.grad = grad.clone()
            muon.step()
        moved.append(start - param.detach())
        moments.append(muon.state[param].get("moment2_buffer"))
    results = moved[0] / 0.2
    expected = 0.1 * (0.05**0.5 + 0.0975**0.5) * results
    torch.testing.assert_close(moved[1], expected, rtol=1e-4, atol=1e-6)
    means = 0.0975 * results.square().mean(1)
    torch.testing.assert_close(moments[1], means, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"adaptive": "adam"}, "adaptive: expected one of adamuon, normuon, namo, got adam"),
        (
            {"adaptive": torch.clone},
            r"adaptive: expected a name, or an object with state_shape\(\)",
        ),
        (
            {"adaptive": "namo", "weight_decay_method": "l2"},
            "adaptive: expected decoupled weight decay with namo",
        ),
    ],
)
def test_methods_that_cannot_work_are_refused(options, said):
    """When the optimizer is built, by Muon and by MuonAdamW."""
    from megatron_muon.fsdp2 import Muon, MuonAdamW

    for build, error in ((Muon, RuntimeError), (MuonAdamW, ValueError)):
        with pytest.raises(error, match=said):
            build([torch.nn.Parameter(torch.ones(3, 4, device=device()))], **options)


def test_method_that_returns_something_else_is_refused():
    """By its first result, with its name."""
    from megatron_muon.fsdp2 import Muon

    class Wrong:
        def state_shape(self, rows: int, cols: int) -> tuple[int, int]:
            """Return the shape of the state."""
            return 1, 1

        def __call__(self, results: Any, state: Any) -> Any:
            """Return another shape."""
            return results[0]

    param = torch.nn.Parameter(torch.ones(3, 4, device=device()))
    param.grad = torch.ones(3, 4, device=device())
    muon = Muon([param], adaptive=Wrong())
    with pytest.raises(TypeError, match="Wrong: expected a function that returns"):
        muon.step()


def test_state_of_another_method_is_refused():
    """Momentum alone is not the state of normuon, unless fresh state is asked for."""
    from megatron_muon.fsdp2 import Muon

    plain, ours = (
        Muon([torch.nn.Parameter(drawn((3, 4), 0))], adaptive=each) for each in (None, "normuon")
    )
    with pytest.raises(RuntimeError, match="expected .*moment2_buffer.* of muon, got"):
        ours.load_state_dict(plain.state_dict())
    ours.fresh_if_moved = True
    with pytest.warns(UserWarning, match="fresh state"):
        ours.load_state_dict(plain.state_dict())
    (state,) = ours.state.values()
    assert state["moment2_buffer"].shape == (4,)
