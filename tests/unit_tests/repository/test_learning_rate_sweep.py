# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The sweep of rates and settings trains, goes on where it stopped, and draws."""

import sys

import learning_rate_sweep as sweep
import pytest


@pytest.mark.slow
def test_sweep_goes_on_and_draws(tmp_path, monkeypatch, capsys):
    """A sweep that goes on trains only what is missing, and draws all optimizers."""
    monkeypatch.setattr(sweep, "RATES", {name: rates[2:4] for name, rates in sweep.RATES.items()})
    monkeypatch.setattr(sweep, "SETTINGS", {"warm_up": (0.0, 0.1)})
    monkeypatch.setattr(sweep, "MUON_SETTINGS", {"momentum": (0.9, 0.95)})
    flags = f"--output {tmp_path} --steps 10 --widths 32 --seeds 0 --workers 1"
    monkeypatch.setattr(sys, "argv", ["learning_rate_sweep.py", *flags.split()])
    sweep.main()
    printed = capsys.readouterr().out
    for name in (*sweep.RATES, sweep.SWITCH):
        assert f"| {name}, 32 |" in printed
    picture = (tmp_path / "learning_rates.svg").read_text()
    assert all(color in picture for color in sweep.COLORS.values())
    file = tmp_path / "runs.jsonl"
    results = sweep.finished(file)
    # The second part trains 7 and 10 more runs.
    assert len(results) == 7 + 17
    assert all(len(results[run]["losses"]) == run.steps for run in results)
    assert {run.steps * run.batch for run in results} == {10 * sweep.BATCH, 40 * sweep.BATCH}
    # The switch changes the second half alone.
    (switch,) = (run for run in results if run.optimizer == sweep.SWITCH)
    switched, adamw = results[switch], results[switch._replace(optimizer="AdamW")]
    same = [one == other for one, other in zip(switched["losses"], adamw["losses"], strict=True)]
    assert all(same[:6]) and not any(same[6:])

    file.write_text("\n".join(file.read_text().splitlines()[1:]) + "\n")
    sweep.main()
    again = capsys.readouterr().out
    assert again.count("min: ") == 1

    # The second part alone, at the same rates, prints the same table.
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--settings"])
    monkeypatch.setattr(sweep, "BEST_AT_64", {"AdamW": 2e-3, "Muon, match_adamw": 4e-3})
    sweep.main()
    table = capsys.readouterr().out
    assert again.endswith(table) and "| momentum |  | 0.9: " in table
