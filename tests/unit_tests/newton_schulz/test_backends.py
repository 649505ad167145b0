# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Backends against the exact polynomial in float64."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from emerging_optimizers.utils import fp32_matmul_precision
from helpers.exact import exact, relative_error, rounded_products
from helpers.ranks import run_ranks
from helpers.sharded_muon import each_of
from helpers.stacks import orthogonalized, settings
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron_muon.newton_schulz import BACKENDS, gram
from megatron_muon.newton_schulz.gram import Gram, segments_of
from megatron_muon.plan.cost import CostModel

TYPES = ["quintic", "simple", "polar_express", "cans", "aol", "deepseekv4"]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def normalized(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm(dim=(-2, -1), keepdim=True)


@pytest.mark.parametrize(
    ("shape", "coefficient_type"),
    [
        *itertools.product([(24, 96), (96, 24), (32, 32), (40, 67)], TYPES),
        # The one singular value is 1.
        *itertools.product([(1, 16), (16, 1), (1, 1)], ["quintic"]),
    ],
)
def test_gram_form_is_the_polynomial(shape, coefficient_type):
    """The Gram form in fp32 is the polynomial to 1e-3 of the norm, as it squares errors."""
    steps = {"deepseekv4": 10, "aol": 4}.get(coefficient_type, 5)
    stack = normalized(torch.randn(3, *shape))
    of = settings(steps, coefficient_type, is_bf16=False)
    found = orthogonalized(stack, "gram", of=of)
    assert found.dtype == torch.float32
    expected = exact(stack, steps, coefficient_type)
    assert relative_error(found, expected) < (1e-5 if 1 in shape else 1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_stays_within_what_bf16_does_to_the_standard_form(backend):
    """Errors of each backend in bf16 stay below the errors of the standard form's five steps."""
    stack = torch.randn(4, 48, 192)
    found = orthogonalized(normalized(stack).bfloat16(), backend)
    assert found.dtype == torch.bfloat16
    # bf16 has 8 bits, five steps add up to about three units; one rounding is a half of one.
    bound = 2.0**-8 if "gram" in backend else 3 * 2.0**-8
    assert relative_error(found, exact(normalized(stack).bfloat16())) < bound
    found = orthogonalized(stack * 1e3, backend, is_normalized=False)
    assert found.dtype == torch.float32
    assert relative_error(found, exact(normalized(stack))) < 3 * 2.0**-8
    if backend != "standard":  # rounds under matmul precision "medium", which is not set here
        assert torch.equal(found, found.bfloat16().float())


@pytest.mark.parametrize("coefficient_type", ["quintic", "simple", "polar_express", "cans"])
def test_fp16_is_closer_than_bf16_and_needs_its_restarts(coefficient_type):
    """The Gram form in fp16 is closer than bf16, but not without its restarts."""
    n = 128
    u, v = (torch.linalg.qr(torch.randn(size, n, dtype=torch.float64))[0] for size in (n, 512))
    s = torch.arange(1, n + 1, dtype=torch.float64) ** -2
    stack = normalized((u * s) @ v.mT).bfloat16().unsqueeze(0)
    of = settings(5, coefficient_type)
    expected = exact(stack, 5, coefficient_type)

    def error_of_half() -> float:
        with rounded_products(torch.float16):
            return relative_error(orthogonalized(stack, "gram", of=of), expected)

    half = error_of_half()
    assert half < 0.05
    assert half < relative_error(orthogonalized(stack, of=of), expected)
    with mock.patch.object(gram, "segments_of", lambda _, n: segments_of("not in the table", n)):
        assert error_of_half() < 0.05
    with mock.patch.object(gram, "segments_of", lambda *_: (5,)):
        assert not error_of_half() < 0.3


@given(
    n=st.integers(1, 24),
    m=st.integers(1, 40),
    # Below 1e-7 the norm is clamped; above 1e19 its square leaves fp32.
    power=st.integers(-8, 50),
    backend=st.sampled_from(["standard", "gram"]),
    seed=st.integers(0, 99),
)
@hypothesis_settings(max_examples=60)
def test_sign_and_powers_of_two_change_nothing_else(n, m, power, backend, seed):
    """Signs and powers of two of a matrix change no other bit of its result."""
    stack = torch.randn(2, n, m, generator=torch.Generator().manual_seed(seed))
    of = settings(is_bf16=False)
    found = orthogonalized(stack, backend, of=of, is_normalized=False)
    for other, expected in ((-stack, -found), (stack * 2.0**power, found)):
        again = orthogonalized(other, backend, of=of, is_normalized=False)
        assert torch.equal(again, expected)


def _assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    # Two units of bf16: a CPU's batched product may add up in another order in another slot.
    torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=2.0**-9)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_zeros_slot_and_neighbours_stay_apart(backend):
    """A result does not depend on the place in a stack, nor on NaN and zeros beside it."""
    stack = normalized(torch.randn(4, 24, 40)).bfloat16()
    expected = orthogonalized(stack, backend)
    _assert_same(orthogonalized(stack.flip(0), backend).flip(0), expected)
    stack[1], stack[2] = torch.nan, 0
    found = orthogonalized(stack, backend)
    _assert_same(found[[0, 3]], expected[[0, 3]])
    assert found[1].isnan().all() and not found[2].any()
    stack[1] = normalized(torch.randn(24, 40))
    stack[1, :6] = 0
    assert not orthogonalized(stack, backend)[1, :6].any(), "rows of zeros stay zero"


def _run_parts(shape: tuple[int, int], is_normalized: bool, coefficients: str) -> list[float]:
    """Split a matrix along its longer side, and return differences to the whole one."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    dim = 0 if shape[0] > shape[1] else 1
    whole = torch.randn(1, *shape) * 3
    if is_normalized:
        whole = normalized(whole).bfloat16()
    of = settings(5, coefficients)
    options = {"is_normalized": is_normalized, "whole_shape": shape, "of": of}
    found = []
    for backend in ("standard", "gram"):
        expected = orthogonalized(whole, backend, **options).chunk(size, dim + 1)[rank]
        part = whole.chunk(size, dim + 1)[rank].contiguous()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduces:
            result = orthogonalized(part, backend, parts_group=dist.group.WORLD, **options)
        assert result.dtype == whole.dtype and result.shape == part.shape
        work = BACKENDS[backend].work(*sorted(shape), segments_of(coefficients, 5), size)
        assert reduces.call_count == work.num_all_reduces + (not is_normalized)
        found.append(relative_error(result, expected))
    return found


@pytest.mark.ranks
def test_parts_of_a_split_matrix_are_those_of_the_whole():
    """Parts of a split matrix have the result of the whole with as many collectives as counted."""
    cases = [
        ((24, 96), True, "quintic"),
        ((96, 24), True, "polar_express"),
        ((96, 24), False, "quintic"),
    ]
    for of_rank in run_ranks(2, each_of, _run_parts, cases).check().results:
        for standard, gram_form in of_rank:
            assert gram_form < 2.0**-7
            # Gram matrices are added in bf16, five times.
            assert standard < 2.0**-5


@pytest.mark.parametrize(
    ("backend", "expected"),
    # 20 a + 10 and 8 a + 28 of the package, a = 4.
    [("standard", 90), ("gram", 60)],
)
def test_operations_are_those_of_the_form(backend, expected):
    """Owners of a split matrix divide only the products with the longer side."""
    cost = CostModel(backend=backend)
    work = cost.work(256, 64)
    assert work.flops == expected * 64**3
    if backend == "gram":
        part = cost.work(256, 64, 4)
        assert part.flops == work.flops - 3 / 4 * 8 * 256 * 64**2


@pytest.mark.parametrize("coefficient_type", ["quintic", "polar_express"])
def test_products_are_as_many_as_counted(coefficient_type):
    """The Gram form has the products that the cost model counts, in fp32 under any precision."""
    precisions = []

    def counted(function):
        def call(*args, **kwargs):
            precisions.append(torch.get_float32_matmul_precision())
            return function(*args, **kwargs)

        return call

    segments = segments_of(coefficient_type, 5)
    with (
        mock.patch.object(torch, "baddbmm", counted(torch.baddbmm)),
        mock.patch.object(torch.Tensor, "__matmul__", counted(torch.Tensor.__matmul__)),
        fp32_matmul_precision("medium"),
    ):
        stack = normalized(torch.randn(1, 16, 32)).bfloat16()
        orthogonalized(stack, "gram", of=settings(5, coefficient_type))
        assert torch.get_float32_matmul_precision() == "medium"
    assert precisions == ["highest"] * Gram().work(16, 32, segments).num_products
    for steps in range(1, 13):
        assert sum(segments_of(coefficient_type, steps)) == steps
        assert sum(segments_of("other", steps)) == steps


def test_sums_of_the_gram_form_are_fp32_on_a_gpu():
    """The Gram form adds in fp32 even if torch may add fp16 products in fp16."""
    flags = torch.backends.cuda.matmul
    names = ("accumulation", "reduced_precision_reduction", "reduced_precision_reduction_split_k")

    def now():
        return [getattr(flags, f"allow_fp16_{name}") for name in names]

    before = now()
    try:
        flags.allow_fp16_reduced_precision_reduction = (True, True)
        flags.allow_fp16_accumulation = True
        with gram._fp32_sums(SimpleNamespace(device=torch.device("cuda"))):
            assert now()[:2] == [False, False]
        assert now() == [True, True, True]
    finally:
        flags.allow_fp16_reduced_precision_reduction = tuple(before[1:])
        flags.allow_fp16_accumulation = before[0]
