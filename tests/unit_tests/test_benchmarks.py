# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, and what they count is right; how fast anything is, they say, not a test."""

import json

import pytest
from ranks import ROOT, launch


def test_optimizer_step_measures_every_peer_and_writes_json(tmp_path):
    """One run, all peers; owner moves fewer bytes than gathering everything to everyone."""
    path = tmp_path / "step.json"
    flags = ["--hidden", "32", "--layers", "2", "--rounds", "2", "--json", str(path)]
    run = launch(2, flags, script=ROOT / "benchmarks" / "optimizer_step.py").check()
    data = json.loads(path.read_text())
    peers = data["peers"]
    assert set(peers) | set(data["skipped"]) == {
        "adam", "owner", "owner, wire fp32", "all_gather", "layer_wise", "torch.optim.Muon",
        "muonium",
    }  # fmt: skip
    assert "needs a GPU" in data["skipped"]["muonium"]
    assert peers["adam"]["bytes_a_rank"] == 0
    assert peers["owner"]["bytes_a_rank"] < peers["owner, wire fp32"]["bytes_a_rank"]
    assert peers["owner, wire fp32"]["bytes_a_rank"] < peers["all_gather"]["bytes_a_rank"]
    for name, peer in peers.items():
        assert peer["step_ms"] > 0
        assert peer["over_adam"] == pytest.approx(peer["step_ms"] / peers["adam"]["step_ms"])
        assert (0 < peer["efficiency"] < 1) == (name != "adam")
    assert "| owner |" in run.outputs[0]
