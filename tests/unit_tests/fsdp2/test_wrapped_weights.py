# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Weights of a class without storage, which FSDP2 gathers in another form, as torchao's float8."""

from typing import Any

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import Muon as WholeMatrixMuon
from helpers.device import init_group, kind
from helpers.fsdp2_models import drawn
from helpers.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

from megatron_muon.fsdp2 import ExchangeSettings, Muon, MuonAdamW

OPTIONS: dict[str, Any] = {"lr": 0.1, "nesterov": True, "scale_mode": "spectral"}
OPTIONS |= {"fp32_matmul_prec": "high"}


_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.view.default)


class Wrapper(torch.Tensor):
    """A tensor that keeps its elements in another one."""

    names = ("elements",)

    @staticmethod
    def __new__(cls, elements: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, elements.shape, dtype=elements.dtype, device=elements.device
        )

    def __init__(self, elements: Any) -> None:
        self.elements = elements

    def __tensor_flatten__(self) -> tuple[list[str], None]:  # noqa: D105
        return list(self.names), None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, *_: Any) -> Any:  # noqa: D105
        return cls(inner["elements"])

    @classmethod
    def __torch_dispatch__(  # noqa: D105
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        bare = tree_map_only(Wrapper, lambda each: each.elements, (args, kwargs or {}))
        result = func(*bare[0], **bare[1])
        return cls(result) if func in _VIEWS else result


class Quantized(Wrapper):
    """It also has a scale."""

    names = ("elements", "scale")

    def __init__(self, elements: Any) -> None:
        super().__init__(elements)
        self.scale = torch.ones(1)


def _step_wrapped() -> None:
    """Step shards that wrap others, beside whole matrices."""
    init_group()
    mesh = init_device_mesh(kind(), (2,))
    whole = torch.nn.Parameter(drawn((7, 6), 0))
    rows = distribute_tensor(whole.detach().clone(), mesh, [Shard(0)], src_data_rank=None)
    shape = {"shape": rows.shape, "stride": rows.stride()}

    def parameter(wrap: Any) -> Any:
        local = wrap(rows.to_local().clone())
        return torch.nn.Parameter(
            DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **shape)
        )

    param = parameter(Wrapper)
    exchange = ExchangeSettings(comm_dtype="fp32", max_owners=1)
    muon = Muon([("w", param)], exchange=exchange, **OPTIONS)
    reference = WholeMatrixMuon([whole], **OPTIONS)
    for step in range(3):
        whole.grad = drawn(whole.shape, 1 + step)
        param.grad = distribute_tensor(whole.grad, mesh, [Shard(0)], src_data_rank=None)
        muon.step()
        reference.step()
        expected = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
        assert torch.equal(param._local_tensor.elements, expected.to_local())
    assert type(param._local_tensor) is Wrapper
    for make in (Muon, MuonAdamW):
        with pytest.raises(
            RuntimeError, match="w: expected a tensor with memory .*, got Quantized"
        ):
            make([("w", parameter(Quantized))]).step()


@pytest.mark.ranks
def test_wrapped_tensor_is_stepped_or_refused_by_class():
    """Weights of a class without storage are stepped, or refused before the step."""
    run_ranks(2, _step_wrapped).check()
