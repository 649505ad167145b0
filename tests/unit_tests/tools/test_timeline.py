# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The estimated step of one rank has the work and the messages of the report."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from helpers.layouts import plans
from hypothesis import given, settings

from megatron_muon.plan.schedule import PlanOrder
from megatron_muon.tools.plan.command import main
from megatron_muon.tools.plan.rank_report import build_report
from megatron_muon.tools.plan.timeline import Round, timeline


@settings(max_examples=50)
@given(plans())
def test_step_has_the_work_of_the_report_and_one_message_at_a_time(plan):
    """A timeline has all work of the report, one thing at a time on GPU and links."""
    report = build_report(range(1 + max(plan.ranks)), [plan])
    for rank in plan.ranks:
        found = report.ranks[rank]
        spans = found.timeline()
        assert max(found.newton_schulz_ns, found.traffic_ns) - 1 <= found.step_ns <= report.step_ns
        on_gpu = [span for span in spans if span.kind == "Newton-Schulz"]
        on_links = [span for span in spans if span.kind != "Newton-Schulz"]
        # In floats of at most 1e9 ns.
        time_ns = sum(span.end - span.start for span in on_gpu)
        assert time_ns == pytest.approx(found.newton_schulz_ns, rel=1e-9, abs=1e-3)
        time_ns = sum(span.end - span.start for span in on_links)
        assert time_ns == pytest.approx(found.traffic_ns, rel=1e-9, abs=1e-3)
        for lane in (on_gpu, on_links):
            assert all(one.end <= other.start for one, other in pairwise(lane))


def test_rows_come_before_newton_schulz_and_results_after_it():
    """Gathers and scatters of three buckets run beside the products of others."""
    order = PlanOrder(3, has_replicas=False)
    rounds = [
        Round(rows=3, results=30, newton_schulz=10),
        Round(rows=5, results=4, newton_schulz=10),
        Round(rows=1, results=4, newton_schulz=10),
    ]
    spans = timeline(8, [rounds], [order])
    assert [(span.kind, span.start, span.end) for span in spans] == [
        ("rows to owners", 0, 3),
        ("rows to owners", 3, 8),
        ("Newton-Schulz", 0, 2),  # a quarter of the local matrices
        ("rows to owners", 8, 9),
        ("Newton-Schulz", 3, 13),
        ("results", 13, 43),
        ("Newton-Schulz", 13, 15),
        ("Newton-Schulz", 15, 25),
        ("results", 43, 47),
        ("Newton-Schulz", 25, 27),
        ("Newton-Schulz", 27, 37),
        # The GPU waits for the first results before it starts the third.
        ("results", 47, 51),
        ("Newton-Schulz", 43, 45),
    ]


def test_newton_schulz_waits_for_rows_and_results_for_newton_schulz(tmp_path, capsys):
    """Gather, products and scatter of a single bucket follow one another."""
    file = tmp_path / "step.svg"
    assert main(["--preset", "llama3-8b", "--dp", "64", "--svg", str(file)]) == 0
    text = capsys.readouterr().out
    said = "step of Muon: 23.8 ms on the slowest GPU, of which Newton-Schulz 14.0 ms and waits"
    assert said in text
    assert "the step is 0.3%" in text
    root = ElementTree.parse(file).getroot()
    rects = [rect.attrib for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    # Behind the background and the legend: rows, products, results; the GPU is drawn first.
    products, rows, results = rects[-3:]
    ends = [float(rect["x"]) + float(rect["width"]) for rect in (rows, products)]
    begins = [float(rect["x"]) for rect in (products, results)]
    assert all(abs(end - begin) < 0.02 for end, begin in zip(ends, begins, strict=True))
