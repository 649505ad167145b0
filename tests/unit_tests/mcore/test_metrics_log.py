# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Metrics of Muon's steps in the log of Megatron's trainer."""

import pytest
from helpers.ranks import launch
from helpers.toy_gpt import ZERO, fsdp_toy_gpt
from metrics import read_events

pytestmark = pytest.mark.ranks


def test_metrics_are_written_at_the_interval_of_the_trainer(tmp_path):
    """Metrics are written by the last rank at the trainer's interval."""
    flags = ("--muon-extra-scale-factor", "0.2", "--tensorboard-dir", str(tmp_path))
    flags += ("--tensorboard-log-interval", "3", "--muon-fsdp-log-metrics")
    run = launch(2, fsdp_toy_gpt(ZERO[3], *flags)).check()
    events = read_events(tmp_path, 0)
    names = {"gradient_norms", "momentum_norms", "update_rms"}
    ours = {name: values for name, values in events.items() if name.startswith("muon/")}
    assert ours.keys() == {f"muon/{name}" for name in names}
    assert len(run.losses) == 8
    for name, values in ours.items():
        assert list(values) == [3, 6] == list(events["lm loss"]), name
        assert all(value > 0 for value in values.values())
    assert all(0.1 < value < 0.3 for value in ours["muon/update_rms"].values())
