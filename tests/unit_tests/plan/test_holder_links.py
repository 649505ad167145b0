# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""How long holders send."""

from collections import Counter
from unittest import mock

import pytest
from megatron_muon.plan.holder_links import SentElements, Tiling

from megatron_muon.plan.cost import CostModel

_COST = CostModel(ranks_per_node=2)


def test_holders_of_a_tiling_send_to_owners_near_and_far():
    """Three matrices over ranks 0, 1 and 2; two of the ranks are on a node. By hand."""
    sent = SentElements(_COST)
    sent.add_tilings([Tiling({0: 10, 1: 20, 2: 30}, 1, Counter({0: 2, 2: 1}))])
    near_s, far_s = _COST.seconds_per_byte(0, 1), _COST.seconds_per_byte(0, 2)
    assert sent.one_byte_seconds() == pytest.approx(
        {0: 10 * far_s, 1: 20 * (2 * near_s + far_s), 2: 30 * 2 * far_s}
    )


def test_owners_and_replicas_share_what_a_holder_has():
    """Two owners of one matrix, and two replicas of each shard: a quarter each."""
    sent = SentElements(_COST)
    sent.add_tilings([Tiling({4: 40, 6: 40}, 4, Counter({0: 1, 2: 1}))])
    seconds = 2 * 10 * _COST.seconds_per_byte(4, 0)
    assert sent.one_byte_seconds() == pytest.approx({4: seconds, 6: seconds})


def test_holders_of_a_tiling_are_gone_through_once():
    """Of thousands of matrices over thousands of ranks."""
    sent = SentElements(_COST)
    with mock.patch.object(CostModel, "node", autospec=True, side_effect=CostModel.node) as node:
        sent.add_tilings([Tiling({0: 4, 1: 4}, 1, Counter({0: 50, 1: 50}))])
    assert node.call_count == 4
    assert sent.one_byte_seconds()[0] == pytest.approx(200 * _COST.seconds_per_byte(0, 1))
