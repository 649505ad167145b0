# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks fail together: what one of them knows, all of them raise."""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.device import device, init_group
from helpers.ranks import run_ranks

from megatron_muon.runtime.agreement import raise_where_any_rank_fails, raise_where_ranks_differ

pytestmark = pytest.mark.ranks


def _error_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


def _agree() -> dict[str, str]:
    """Agree on several things in turn; ranks that one of them kept apart would hang."""
    init_group()
    rank, cpu, world = dist.get_rank(), device(), dist.group.WORLD

    def fails(problems: list[str], group: Any = None, **options: Any) -> str:
        return _error_of(
            lambda: raise_where_any_rank_fails(problems, group, cpu, "Stop.", **options)
        )

    def differs(entries: list[str]) -> str:
        return _error_of(lambda: raise_where_ranks_differ(entries, world, cpu, "lists", "Stop."))

    found = torch.tensor(int(rank == 1), dtype=torch.int32, device=cpu)
    pair = [dist.new_group([0, 1]), dist.new_group([2])][rank == 2]
    return {
        "sound": fails([]),
        "one": fails(["broken"] if rank == 1 else []),
        "shared": fails(["broken"] if rank else ["other"]),
        "many": fails([f"problem {number}" for number in range(25)]),
        "suspect": fails(
            [], num_device_problems=found, describe=lambda: ["NaN"] if rank == 1 else []
        ),
        "group": fails(["broken"] if rank == 2 else [], pair),
        "same": differs(["a", "b"]),
        "other": differs(["a", "c" if rank == 2 else "b"]),
        "longer": differs(["a", "b"][: 2 if rank == 1 else 1]),
        "after": fails([]),
    }


@functools.cache
def verdicts() -> list[dict[str, str]]:
    """Return what each of three ranks raised."""
    return run_ranks(3, _agree).check().results


def test_ranks_without_problems_go_on():
    """Ranks without problems go on, also after they failed together."""
    for found in verdicts():
        assert (found["sound"], found["same"], found["after"]) == ("no error",) * 3


SAME = "lists: expected the same on all ranks"


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("one", ["rank 1: broken"]),
        # A thousand ranks with the same problem make one line.
        ("shared", ["ranks 1, 2: broken", "rank 0: other"]),
        # The count comes from a tensor of the device, the sentence from the rank that counted.
        ("suspect", ["rank 1: NaN"]),
        ("other", [SAME, "rank 2 has 'c' where rank 0 has 'b'"]),
        ("longer", [SAME, "rank 1 has 'b' where rank 0 has 'nothing'"]),
    ],
)
def test_problems_are_raised_on_all_ranks(case, texts):
    """The error on all ranks names the ranks, their problems, and the remedy."""
    for found in verdicts():
        assert all(text in found[case] for text in texts)
        assert found[case].endswith("Stop.")


def test_long_lists_of_problems_are_cut():
    """An error lists twenty problems, and says how many more there are."""
    for found in verdicts():
        assert found["many"].count("problem ") == 20 and "... and 5 more" in found["many"]


def test_other_groups_are_left_alone():
    """Ranks outside of the group neither take part nor fail."""
    assert [found["group"][:8] for found in verdicts()] == ["no error", "no error", "Stopping"]
    assert "rank 2: broken" in verdicts()[2]["group"]
