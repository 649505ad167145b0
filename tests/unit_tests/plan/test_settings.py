# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings of the exchange and the cost model: what they accept, and what they estimate."""

import pytest

from megatron_muon.plan.cost import CPU_RANKS, CostModel
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.plan.wire import Wire
from megatron_muon.user_errors import naming_flags


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "broadcast"}, r"exchange.mode: expected one of \('owner', 'all_gather'\), got"),
        ({"wire": "fp8"}, "exchange.wire: expected one of .* got 'fp8'"),
        (
            {"newton_schulz": "svd"},
            "exchange.newton_schulz: expected one of .*'gram', .*'auto'.*, got 'svd'",
        ),
        (
            {"newton_schulz": "gram", "mode": "all_gather"},
            "newton_schulz: expected standard with exchange.mode all_gather, .* got gram",
        ),
        (
            {"staging_bytes": 0},
            "exchange.staging_bytes: expected a positive number of bytes, got 0",
        ),
        (
            {"overlap_within_matrices": True, "mode": "all_gather"},
            "exchange.overlap_within_matrices: expected exchange.mode owner, got all_gather",
        ),
        (
            {"instance_groups": 0},
            "exchange.instance_groups: expected a positive number of groups, got 0",
        ),
        (
            {"instance_groups": 1, "mode": "all_gather"},
            "exchange.instance_groups: expected exchange.mode owner, got all_gather",
        ),
        (
            {"instance_groups": 2, "newton_schulz": "symmetric"},
            "exchange.instance_groups: expected 1 with exchange.newton_schulz symmetric, got 2",
        ),
        ({"max_parts": 6}, "exchange.max_parts: expected a power of two, got 6"),
        (
            {"cost_model": "speed=3"},
            "cost model: expected name=value with a name of .* got 'speed=3'",
        ),
        ({"cost_model": "tflops=fast"}, "got 'tflops=fast'"),
        ({"cost_model": "num_ns_steps=7"}, "Set num_ns_steps"),
        ({"cost_model": "gbps=0"}, "cost model: expected a positive gbps, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    """Each names the field, what was expected and what came."""
    with pytest.raises(ValueError, match=message):
        ExchangeSettings(**settings)


def test_wire_follows_the_precision_of_newton_schulz():
    """Rounding fp32 input to bf16 would lose what the precision asks for."""
    assert ExchangeSettings().wire_for(is_bf16=True) == Wire("bfloat16", "bfloat16")
    assert ExchangeSettings().wire_for(is_bf16=False) == Wire("float32", "float32")
    assert ExchangeSettings(wire="fp32").wire_for(is_bf16=True) == Wire("float32", "bfloat16")
    with pytest.raises(ValueError, match="wire: expected fp32 for Newton-Schulz in fp32, got bf16"):
        ExchangeSettings(wire="bf16").wire_for(is_bf16=False)


@pytest.mark.parametrize(("wire", "is_bf16"), [("auto", False), ("fp32", True), ("fp32", False)])
def test_portions_take_the_bf16_wire(wire, is_bf16):
    """fp32 rows are for upstream's own function, which takes the whole matrix."""
    settings = ExchangeSettings(overlap_within_matrices=True, wire=wire)
    with pytest.raises(
        ValueError, match="within_matrices: expected exchange.wire bf16, got fp32, on which"
    ):
        settings.wire_for(is_bf16=is_bf16)
    assert ExchangeSettings(overlap_within_matrices=True).wire_for(is_bf16=True).normalizes


@pytest.mark.parametrize(
    ("wire", "is_bf16", "expected"),
    [("bf16", True, (2, 2, 8)), ("fp32", True, (4, 2, 0)), ("fp32", False, (4, 4, 0))],
)
def test_bytes_of_an_element_on_each_wire(wire, is_bf16, expected):
    """bf16-valued results go back as bf16 on either wire, without losing a bit."""
    found = Wire.of(wire, is_bf16=is_bf16)
    assert (found.gather_bytes, found.scatter_bytes, found.norm_bytes) == expected
    assert found.normalizes == (wire == "bf16")


def test_cost_model_text_changes_what_it_names():
    """The rest stays as it is for the machine."""
    cost = CostModel.parse("tflops=700,ranks_per_node=4", CPU_RANKS)
    assert (cost.tflops, cost.ranks_per_node) == (700.0, 4)
    assert cost.gbps == CPU_RANKS.gbps
    assert CostModel.parse("") == CostModel()


def test_newton_schulz_time_follows_flops_parts_and_stacks():
    """5 (4 m n^2 + 2 n^3) operations; a split divides the first term and adds all-reduces."""
    cost = CostModel(tflops=1, kernel_us=0, all_reduce_us=0, gbps=1e9)
    m, n = 4096, 1024
    whole = 5 * (4 * m * n * n + 2 * n**3)
    assert cost.work(n, m).flops == whole
    assert cost.newton_schulz_seconds(m, n) == pytest.approx(whole / 1e12)
    quarter = 5 * (m * n * n + 2 * n**3) / 1e12
    assert cost.newton_schulz_seconds(m, n, 4) == pytest.approx(quarter, rel=1e-4)
    assert CostModel().newton_schulz_seconds(64, 64) < 64 * CostModel().newton_schulz_seconds(1, 64)


def test_stacks_fill_a_gpu_and_are_powers_of_two():
    """About 1024 tiles of 128 x 128; the longer side does not count."""
    sides = {64: 32, 512: 32, 1024: 16, 1536: 8, 2048: 4, 3072: 2, 4096: 1, 8192: 1}
    assert {n: CostModel().stack_size(n, 8192) for n in sides} == sides
    assert CPU_RANKS.stack_size(64, 64) == 1
    # Memory bounds stacks, but a single matrix may be larger.
    assert CostModel().stack_size(512, 32768) == 8
    assert CostModel().stack_size(512, 2**20) == 1


def test_links_within_a_node_are_those_of_consecutive_ranks():
    """Ranks 0 to 7 share a node, rank 8 is in the next."""
    cost = CostModel(gbps=450, gbps_between_nodes=45)
    assert cost.seconds_per_byte(0, 7) == pytest.approx(1e-9 / 450)
    assert cost.seconds_per_byte(7, 8) == pytest.approx(1e-9 / 45)


def test_errors_name_flags_to_who_set_flags():
    """Shared code names arguments; under Megatron each stands for a flag."""
    with (
        pytest.raises(ValueError, match="^--muon-fsdp-wire: .* --muon-fp32-matmul-prec medium.$"),
        naming_flags(),
    ):
        ExchangeSettings(wire="bf16").wire_for(is_bf16=False)
    with (
        pytest.raises(RuntimeError, match="use --muon-fsdp-exchange, --muon-fsdp-staging-bytes$"),
        naming_flags(),
    ):
        raise RuntimeError("use exchange.mode, exchange.staging_bytes")
    with pytest.raises(RuntimeError, match="^nothing to name$"), naming_flags():
        raise RuntimeError("nothing to name")
