# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon on every layout of FSDP2, against emerging-optimizers' Muon on whole matrices."""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
from helpers import fsdp2_models
from helpers.device import init_group
from helpers.fsdp2_models import CASES, Sharded
from helpers.ranks import run_ranks

pytestmark = pytest.mark.ranks

# CommDtypes, and precision of Newton-Schulz.
SETTINGS = (("fp32", "high"), ("bf16", "medium"))
# This scale tells outputs from inputs.
MUON = {"lr": 0.02, "weight_decay": 0.1, "nesterov": True, "scale_mode": "unit_rms_norm"}


class Reference:
    """Emerging-optimizers' Muon, with each matrix of a parameter as a parameter of its own."""

    def __init__(self, parameters: Sequence[Sharded], precision: str) -> None:
        import torch
        from emerging_optimizers.orthogonalized_optimizers import Muon

        self._parameters = parameters
        self._matrices = [
            [torch.nn.Parameter(part.clone()) for part in _parts(each, each.whole)]
            for each in parameters
        ]
        self._muons = [
            Muon(matrices, fp32_matmul_prec=precision, **MUON) for matrices in self._matrices
        ]

    def step(self, grads: Sequence[Any], comm_dtype: str) -> None:
        """Step with whole gradients; with bf16 messages norms are summed in float64."""
        from emerging_optimizers.orthogonalized_optimizers import muon
        from helpers.whole_matrices import float64_normalize

        for each, matrices, grad in zip(self._parameters, self._matrices, grads, strict=True):
            for matrix, part in zip(matrices, _parts(each, grad), strict=True):
                matrix.grad = part.clone()
        norm: Any = nullcontext()
        if comm_dtype == "bf16":
            norm = mock.patch("torch.nn.functional.normalize", float64_normalize)
        original = muon.get_muon_scale_factor
        for each, optimizer in zip(self._parameters, self._muons, strict=True):
            scale: Any = nullcontext()
            if each.keys.get("transposed"):
                scale = mock.patch.object(
                    muon,
                    "get_muon_scale_factor",
                    lambda rows, cols, mode: original(cols, rows, mode),
                )
            with norm, scale:
                optimizer.step()

    def whole(self, index: int) -> tuple[Any, Any]:
        """Return the whole value and momentum of a parameter."""
        each, matrices = self._parameters[index], self._matrices[index]
        state = self._muons[index].state
        momentum = [state[matrix]["momentum_buffer"] for matrix in matrices]
        return _joined(each, matrices), _joined(each, momentum)


def _pieces(each: Sharded) -> list[tuple[Any, Any, Any]]:
    """Return the indices of what Newton-Schulz sees: other code than the package's."""
    import torch

    matrices: list[Any] = [...] if each.whole.ndim == 2 else list(range(len(each.whole)))
    is_transposed = each.keys.get("transposed", False)
    num_rows, num_cols = each.whole.shape[-2:]
    rows, cols = torch.arange(num_rows)[:, None], torch.arange(num_cols)[None, :]
    outputs = (cols if is_transposed else rows).flatten()
    of_output = _block_of_output(each, outputs)
    found = []
    for matrix in matrices:
        for block in of_output.unique():
            chosen = outputs[of_output == block]
            found.append(
                (matrix, rows, chosen[None, :])
                if is_transposed
                else (matrix, chosen[:, None], cols)
            )
    return found


def _block_of_output(each: Sharded, outputs: Any) -> Any:
    import torch

    sizes = each.keys.get("split_sizes") or 1
    if isinstance(sizes, int):
        return outputs // (len(outputs) // sizes)
    if len(sizes) == 1:
        return outputs // sizes[0]
    of_group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return of_group.repeat(len(outputs) // sum(sizes))


def _parts(each: Sharded, whole: Any) -> list[Any]:
    return [whole[piece].contiguous() for piece in _pieces(each)]


def _joined(each: Sharded, parts: Sequence[Any]) -> Any:
    import torch

    joined = torch.full_like(each.whole, float("nan"))
    for piece, part in zip(_pieces(each), parts, strict=True):
        joined[piece] = part.detach()
    return joined


def _step_all(cases: Sequence[str]) -> dict[str, list[str]]:
    """Step each case three times in each setting, and list what differs."""
    import torch

    from megatron_muon.fsdp2 import ExchangeSettings, Muon

    init_group()
    found = {}
    for case in cases:
        found[case] = []
        for comm_dtype, precision in SETTINGS:
            parameters = getattr(fsdp2_models, case)()
            # More parts than one owner round differently; test_engine.py has those.
            exchange = ExchangeSettings(comm_dtype=comm_dtype, max_owners=1)
            groups = [
                {"params": [(f"weight.{i}", each.param)], **each.keys}
                for i, each in enumerate(parameters)
            ]
            muon = Muon(groups, exchange=exchange, fp32_matmul_prec=precision, **MUON)
            reference = Reference(parameters, precision)
            for step in range(3):
                grads = [
                    fsdp2_models.drawn(each.whole.shape, 1000 * step + i)
                    for i, each in enumerate(parameters)
                ]
                for each, grad in zip(parameters, grads, strict=True):
                    each.param.grad = each.like_param(each.own(grad).clone())
                muon.step()
                reference.step(grads, comm_dtype)
            for i, each in enumerate(parameters):
                momentum = muon.state[each.param]["momentum_buffer"]
                for what, ours, whole in zip(
                    ("value", "momentum"), (each.param, momentum), reference.whole(i), strict=True
                ):
                    ours, whole = ours.to_local(), each.own(whole)
                    if not torch.equal(ours, whole):
                        worst = float((ours - whole).abs().max())
                        found[case].append(
                            f"{comm_dtype}, {precision}: weight.{i}, {what}, {worst:.1e}"
                        )
    return found


def _domains() -> list[list[Any]]:
    """Return for each experts' layout how many ranks exchange how many matrices."""
    import os

    import torch.distributed as dist

    from megatron_muon.fsdp2 import Muon

    init_group()
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    found = []
    for each in fsdp2_models.expert_parallel():
        muon = Muon([{"params": [each.param], **each.keys}])
        (found_input,) = muon.muon_step.plan_inputs.inputs
        mesh = each.param.device_mesh
        groups = [None, dist.group.WORLD, *(mesh.get_group(axis) for axis in range(mesh.ndim))]
        is_known = any(found_input.domain.group is group for group in groups)
        (plan,) = muon.compute.plans
        assert plan.cost.ranks_per_node == 2
        found.append([len(found_input.domain.ranks), len(found_input.matrices), is_known])
    return found


def test_axes_that_deal_out_whole_matrices_need_no_exchange():
    """Plans stay small where experts are many, and no group is made that is there already."""
    expected = [
        [1, 2, True],  # two of eight experts on each rank
        [2, 3, True],  # three of six on two ranks
        [2, 2, True],  # two of four, whose rows two ranks share
        [2, 1, True],  # one of two on two ranks
        [4, 4, True],  # fused weights are no batch
        [4, 2, True],
    ]
    assert run_ranks(4, _domains).check().results == [expected] * 4


@functools.cache
def differences(world_size: int) -> list[dict[str, list[str]]]:
    """Return what differs, by rank and case."""
    names = [case.__name__ for case in CASES[world_size]]
    return run_ranks(world_size, _step_all, names).check().results


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        pytest.param(size, case.__name__, marks=[pytest.mark.slow] if size == 2 else [])
        for size, cases in CASES.items()
        for case in cases
    ],
)
def test_step_is_that_of_whole_matrices(world_size, case):
    """Equal bits of parameters and momentum, for both dtypes of messages and both precisions."""
    for rank, found in enumerate(differences(world_size)):
        assert found[case] == [], f"rank {rank}"
