# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The sweep of learning rates trains, goes on where it stopped, and draws."""

import json
import sys

import learning_rate_sweep as sweep
import pytest


@pytest.mark.slow
def test_sweep_goes_on_and_draws(tmp_path, monkeypatch, capsys):
    """What is finished is not trained again; tables and picture have all optimizers."""
    monkeypatch.setattr(sweep, "RATES", {name: rates[2:4] for name, rates in sweep.RATES.items()})
    flags = f"--output {tmp_path} --steps 10 --widths 32 --seeds 0 --workers 1"
    monkeypatch.setattr(sys, "argv", ["learning_rate_sweep.py", *flags.split()])
    sweep.main()
    printed = capsys.readouterr().out
    for name in (*sweep.RATES, sweep.SWITCH):
        assert f"| {name}, 32 |" in printed
    picture = (tmp_path / "learning_rates.svg").read_text()
    assert all(color in picture for color in sweep.COLORS.values())
    file = tmp_path / "runs.jsonl"
    results = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(results) == 7 and all(len(result["losses"]) == 10 for result in results)
    # The switch changes the second half alone.
    (switched,) = (result for result in results if result["optimizer"] == sweep.SWITCH)
    (adamw,) = (
        result
        for result in results
        if result["optimizer"] == "AdamW" and result["rate"] == switched["rate"]
    )
    same = [one == other for one, other in zip(switched["losses"], adamw["losses"], strict=True)]
    assert all(same[:6]) and not any(same[6:])

    file.write_text("\n".join(file.read_text().splitlines()[1:]) + "\n")
    sweep.main()
    assert capsys.readouterr().out.count("min: ") == 1
