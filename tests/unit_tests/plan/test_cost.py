# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Costs of a plan, and its settings."""

import pytest
from helpers.layouts import CPU_RANKS
from hypothesis import given
from hypothesis import strategies as st

from megatron_muon.plan.cost import CostModel, gpu_rates
from megatron_muon.plan.settings import CommDtypes, ExchangeSettings

# Nothing but products, at 1 TFLOP/s for every shape: 1,000 operations a nanosecond.
PRODUCTS = CostModel(tflops=1, half_rate_side=0, kernel_us=0, all_reduce_us=0, gbps=1e9)


def test_text_changes_the_rates_that_it_names():
    """A text changes the rates that it names, and no others."""
    cost = CostModel.parse("tflops=700,ranks_per_node=4", CPU_RANKS)
    assert (cost.tflops, cost.ranks_per_node, cost.gbps) == (700.0, 4, CPU_RANKS.gbps)
    assert CostModel.parse("") == CostModel()


def test_newton_schulz_time_follows_operations_and_parts():
    """A split divides the products with the longer side, and adds all-reduces."""
    m, n = 4096, 1024
    assert PRODUCTS.newton_schulz_ns(m, n) == round(5 * (4 * m * n * n + 2 * n**3) / 1000)
    assert PRODUCTS.newton_schulz_ns(m, n) == PRODUCTS.newton_schulz_ns(n, m)
    quarter = 5 * (m * n * n + 2 * n**3) / 1000
    assert PRODUCTS.newton_schulz_ns(m, n, 4) == pytest.approx(quarter, rel=1e-4)
    cost = CostModel()
    assert cost.newton_schulz_ns(m, n, 4) < cost.newton_schulz_ns(m, n, 4, on_node=False)


def test_small_matrices_run_at_a_lower_rate():
    """Rates fall with the size of a matrix."""
    cost = CostModel(kernel_us=0)
    for side in (512, 1350, 8192):
        rate = cost.work(side, side).flops / cost.newton_schulz_ns(side, side) / 1000
        expected = cost.tflops * side / (side + cost.half_rate_side)
        assert rate == pytest.approx(expected, rel=1e-4)


def test_stacks_fill_a_gpu_and_are_powers_of_two():
    """A stack has about 1024 tiles of 128 x 128 and a power of two of matrices."""
    sides = {64: 32, 512: 32, 1024: 16, 1536: 8, 2048: 4, 3072: 2, 4096: 1, 8192: 1}
    assert {n: CostModel().stack_size(n, 8192) for n in sides} == sides
    assert [CPU_RANKS.stack_size(n, n) for n in (8, 128, 256, 512, 1024)] == [32, 32, 8, 2, 1]
    # Memory bounds stacks, but a single matrix may be larger.
    assert CostModel().stack_size(512, 32768) == 8
    assert CostModel().stack_size(512, 2**20) == 1


def test_links_within_a_node_are_those_of_consecutive_ranks():
    """Consecutive ranks share a node and its links."""
    cost = CostModel(gbps=450, gbps_between_nodes=45)
    assert cost.is_on_one_node([0, 3, 7]) and not cost.is_on_one_node([7, 8])
    assert [cost.collective_ns(ranks) for ranks in ([0, 7], [7, 8])] == [170_000, 190_000]


@given(st.integers(1, 10**5), st.integers(1, 10**5), st.sampled_from([1, 2, 8]), st.booleans())
def test_every_estimate_is_an_integer(rows, cols, num_parts, on_node):
    """Every estimate is an integer, so that ranks agree whatever the order of sums."""
    time_ns = CostModel().newton_schulz_ns(rows, cols, num_parts, on_node=on_node)
    assert isinstance(time_ns, int) and time_ns >= 0


def test_gpus_that_are_not_known_count_as_the_nearest():
    """A GPU has the rates of the nearest known compute capability."""
    rates = [gpu_rates(major).tflops for major in (7, 8, 9, 10, 12)]
    assert rates == sorted(rates) and len(set(rates)) == 3
    assert gpu_rates(9) == CostModel()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"comm_dtype": "fp8"}, "exchange.comm_dtype: expected one of .* got 'fp8'"),
        ({"newton_schulz": "svd"}, "exchange.newton_schulz: expected one of .*'gram'.*, got 'svd'"),
        ({"staging_bytes": 0}, "exchange.staging_bytes: expected a positive .*, got 0"),
        ({"num_buckets": 0}, "exchange.num_buckets: expected a positive number, got 0"),
        ({"max_owners": 6}, "exchange.max_owners: expected a power of two, got 6"),
        ({"cost_model": "speed=3"}, "cost model: expected name=value with .*, got 'speed=3'"),
        ({"cost_model": "tflops=fast"}, "got 'tflops=fast'"),
        ({"cost_model": "num_ns_steps=7"}, "expected name=value .*, got 'num_ns_steps=7'"),
        ({"cost_model": "gbps=0"}, "cost model: expected a positive, finite gbps, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    """A refused setting is named, with the expected value and the actual one."""
    with pytest.raises(ValueError, match=message):
        ExchangeSettings(**settings)


@pytest.mark.parametrize(
    ("comm_dtype", "is_bf16", "dtypes", "num_bytes"),
    [
        ("auto", True, ("bfloat16", "bfloat16"), (2, 2)),
        ("auto", False, ("float32", "float32"), (4, 4)),
        ("fp32", True, ("float32", "bfloat16"), (4, 2)),
        ("bf16", True, ("bfloat16", "bfloat16"), (2, 2)),
    ],
)
def test_messages_follow_the_precision_of_newton_schulz(comm_dtype, is_bf16, dtypes, num_bytes):
    """Messages have the dtype in which Newton-Schulz computes."""
    found = ExchangeSettings(comm_dtype=comm_dtype).comm_dtypes(is_bf16)
    assert found == CommDtypes(*dtypes)
    assert (found.gather_bytes, found.scatter_bytes) == num_bytes
    assert found.normalizes == (dtypes[0] == "bfloat16")


@pytest.mark.parametrize(("limit", "expected"), [(None, 2_750_000_000), (901, 450)])
def test_plans_share_the_staging_memory_equally(limit, expected):
    """Plans share the staging limit equally; the last one also gets what the others left."""
    settings = ExchangeSettings(staging_bytes=limit).plan_settings(CostModel(), is_bf16=True)
    assert settings.staging_budget(2).staging_bytes == expected


@pytest.mark.megatron
def test_errors_name_flags_to_who_set_flags():
    """Errors name flags under Megatron, and arguments elsewhere."""
    from megatron_muon.user_errors import naming_flags

    text = "^--muon-fsdp-comm-dtype: .* --muon-fp32-matmul-prec medium.$"
    with pytest.raises(ValueError, match=text), naming_flags():
        ExchangeSettings(comm_dtype="bf16").comm_dtypes(is_bf16=False)
    text = "^use --muon-fsdp-comm-dtype, --muon-fsdp-staging-bytes$"
    with pytest.raises(RuntimeError, match=text), naming_flags():
        raise RuntimeError("use exchange.comm_dtype, exchange.staging_bytes")
    with pytest.raises(RuntimeError, match="^nothing to name$"), naming_flags():
        raise RuntimeError("nothing to name")
