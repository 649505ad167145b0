# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings of the exchange: what they accept, and the dtypes and memory that follow from them."""

import pytest

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.settings import CommDtypes, ExchangeSettings
from megatron_muon.user_errors import naming_flags


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"comm_dtype": "fp8"}, "exchange.comm_dtype: expected one of .* got 'fp8'"),
        ({"newton_schulz": "svd"}, "exchange.newton_schulz: expected one of .*'auto'.*, got 'svd'"),
        ({"staging_bytes": 0}, "exchange.staging_bytes: expected a positive .*, got 0"),
        ({"num_buckets": 0}, "exchange.num_buckets: expected a positive number, got 0"),
        ({"max_owners": 6}, "exchange.max_owners: expected a power of two, got 6"),
        ({"cost_model": "speed=3"}, "cost model: expected name=value with .*, got 'speed=3'"),
        ({"cost_model": "tflops=fast"}, "got 'tflops=fast'"),
        ({"cost_model": "num_ns_steps=7"}, "Set num_ns_steps"),
        ({"cost_model": "gbps=0"}, "cost model: expected a positive, finite gbps, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    """A refused setting names the field, what is expected and what came."""
    with pytest.raises(ValueError, match=message):
        ExchangeSettings(**settings)


@pytest.mark.parametrize(
    ("comm_dtype", "is_bf16", "dtypes", "num_bytes"),
    [
        ("auto", True, ("bfloat16", "bfloat16"), (2, 2, 8)),
        ("auto", False, ("float32", "float32"), (4, 4, 0)),
        ("fp32", True, ("float32", "bfloat16"), (4, 2, 0)),
        ("bf16", True, ("bfloat16", "bfloat16"), (2, 2, 8)),
    ],
)
def test_messages_follow_the_precision_of_newton_schulz(comm_dtype, is_bf16, dtypes, num_bytes):
    """Messages have the dtype in which Newton-Schulz computes."""
    found = ExchangeSettings(comm_dtype=comm_dtype).comm_dtypes(is_bf16)
    assert found == CommDtypes(*dtypes)
    assert (found.gather_bytes, found.scatter_bytes, found.norm_bytes) == num_bytes
    assert found.normalizes == (dtypes[0] == "bfloat16")


@pytest.mark.parametrize(("limit", "expected"), [(None, 2_750_000_000), (901, 450)])
def test_plans_share_the_staging_memory_equally(limit, expected):
    """Plans share the staging limit equally; the last one also gets what the others left."""
    settings = ExchangeSettings(staging_bytes=limit).plan_settings(CostModel(), is_bf16=True)
    assert settings.shared_by(2).staging_bytes == expected


def test_errors_name_flags_to_who_set_flags():
    """Errors name flags under Megatron, and arguments elsewhere."""
    text = "^--muon-fsdp-comm-dtype: .* --muon-fp32-matmul-prec medium.$"
    with pytest.raises(ValueError, match=text), naming_flags():
        ExchangeSettings(comm_dtype="bf16").comm_dtypes(is_bf16=False)
    text = "^use --muon-fsdp-comm-dtype, --muon-fsdp-staging-bytes$"
    with pytest.raises(RuntimeError, match=text), naming_flags():
        raise RuntimeError("use exchange.comm_dtype, exchange.staging_bytes")
    with pytest.raises(RuntimeError, match="^nothing to name$"), naming_flags():
        raise RuntimeError("nothing to name")
