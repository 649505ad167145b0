# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A torch that lacks what is relied on is refused with the name, whatever its version."""

import pytest
import torch
from helpers.ranks import run_ranks
from torch.distributed.tensor import placement_types

from megatron_muon import enable, is_enabled
from megatron_muon.patching import IncompatibleMegatronError
from megatron_muon.runtime.torch_symbols import torch_problems


def test_this_torch_has_everything():
    """Symbols exist, and calls have the results that a step relies on; under any default."""
    assert torch_problems() == []
    with torch.device("meta"):
        assert torch_problems() == []


@pytest.mark.parametrize(
    ("owner", "name", "value", "said"),
    [
        (
            placement_types,
            "_StridedShard",
            None,
            "placement_types._StridedShard: expected it for FSDP2 beside tensor parallelism, got "
            "none in torch ",
        ),
        (torch, "_foreach_lerp_", None, "got module 'torch' has no attribute '_foreach_lerp_'"),
        (torch, "_foreach_copy_", lambda copies, _: copies, "got another result. Install"),
    ],
)
def test_what_is_missing_or_other_is_named(owner, name, value, said, monkeypatch):
    """Also by enable(), which then changes nothing."""
    if value is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, value)
    (problem,) = torch_problems()
    assert said in problem and torch.__version__ in problem
    with pytest.raises(IncompatibleMegatronError, match="nothing was changed") as caught:
        enable()
    assert problem in str(caught.value) and not is_enabled()


def _build_on_a_torch_without(name: str) -> str:
    from megatron_muon.fsdp2 import Muon

    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank() == 1:
        delattr(placement_types, name)
    try:
        Muon([torch.nn.Parameter(torch.ones(2, 2))])
    except RuntimeError as error:
        return str(error)
    return "built"


@pytest.mark.ranks
def test_construction_is_refused_on_all_ranks():
    """Even if one node alone has another torch."""
    for said in run_ranks(2, _build_on_a_torch_without, "_StridedShard").check().results:
        assert "rank 1: torch.distributed.tensor.placement_types._StridedShard: expected" in said
        assert "No optimizer was built." in said
