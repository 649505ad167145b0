# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plans of small models are those of recorded_plans.json: a change of the planner is deliberate.

To record them anew: ``.venv/bin/python tests/unit_tests/plan/test_recorded_plans.py``.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_muon.report.model_shape import ModelShape
from megatron_muon.report.simulation import Parallelism, simulate

_RECORD = Path(__file__).with_name("recorded_plans.json")
_LLAMA = ModelShape(2, 1024, 3584, 16, 4)
_EXPERTS = ModelShape(2, 1024, 3072, 16, 4, num_experts=8, moe_ffn_hidden_size=512)
_CASES = {
    "llama on 4 ranks": (_LLAMA, Parallelism(dp=4)),
    "llama on 16 ranks": (_LLAMA, Parallelism(dp=16)),
    "llama on 8 ranks in 2 instances": (_LLAMA, Parallelism(dp=8, hsdp=2)),
    "mixture of experts on 8 ranks": (_EXPERTS, Parallelism(dp=8, ep=2)),
}


def _planned(name: str) -> list[dict[str, Any]]:
    model, parallel = _CASES[name]
    plans = simulate(model, parallel)
    return [
        {
            "owners": ", ".join(" ".join(map(str, owners)) for owners in plan.owners),
            "buckets": ", ".join(" ".join(map(str, bucket)) for bucket in plan.buckets),
            "order": str(plan.order),
            "staging_bytes": plan.staging_bytes,
        }
        for plan in plans
    ]


@pytest.mark.parametrize("name", _CASES)
def test_plan_is_the_recorded_one(name):
    """Owners, buckets, the order of the step, and memory: exactly."""
    assert _planned(name) == json.loads(_RECORD.read_text())[name]


if __name__ == "__main__":
    text = json.dumps({name: _planned(name) for name in _CASES}, indent=1)
    _RECORD.write_text(text + "\n")
