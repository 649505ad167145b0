# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A stack that arrives and leaves portion by portion, beside the same stack as a whole."""

import pytest
import torch

from megatron_muon.newton_schulz.call import Call
from megatron_muon.newton_schulz.registry import BACKENDS
from megatron_muon.newton_schulz.settings import NewtonSchulzSettings
from megatron_muon.newton_schulz.stack_run import PortionedRun, WholeRun
from megatron_muon.plan.portions import borders

TAKES_PORTIONS = ["standard", "gram"]
# Of elements of the result, which are below 1: bf16 keeps 8 bits. The Gram form multiplies in fp32
# on a CPU, and rounds once at the end. The standard steps multiply in bf16, one after the other.
ATOL = {"standard": 2e-2, "gram": 4e-3}


def _call(shape: tuple[int, int], steps: int = 5) -> Call:
    settings = NewtonSchulzSettings(steps, "quintic", True, lambda rows, cols: (1.0,))
    return Call(settings, shape, is_normalized=True)


def _stack(shape: tuple[int, int], count: int) -> torch.Tensor:
    drawn = torch.randn(count, *shape, generator=torch.Generator().manual_seed(sum(shape)))
    return (drawn / drawn.norm(dim=(1, 2), keepdim=True)).bfloat16()


def _portioned(name: str, stack: torch.Tensor, call: Call, num_portions: int) -> torch.Tensor:
    """Run a stack in portions; lines that have not arrived are NaN."""
    starts = borders(max(call.whole_shape), num_portions)
    memory = torch.full_like(stack, float("nan"))
    run = BACKENDS[name].start(memory, call, starts)
    dim = 1 if call.is_tall else 2
    for portion, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
        memory.narrow(dim, start, stop - start).copy_(stack.narrow(dim, start, stop - start))
        run.add(portion)
    run.iterate()
    # Rows that have been orthogonalized are written over by what arrives next.
    memory.fill_(float("nan"))
    for portion in range(num_portions):
        run.finish(portion)
    return run.result


@pytest.mark.parametrize("name", TAKES_PORTIONS)
@pytest.mark.parametrize("shape", [(80, 24), (24, 80), (32, 32), (8, 20)], ids=str)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_portions_have_the_result_of_the_whole_stack(name, shape, count, steps):
    """Tall, wide and square; also where a portion is empty, and where a segment has one step."""
    call, stack = _call(shape, steps), _stack(shape, count)
    expected = BACKENDS[name].run(stack, call)
    for num_portions in (1, 3, 8):
        found = _portioned(name, stack, call, num_portions)
        assert found.dtype == torch.bfloat16 and found.is_contiguous()
        torch.testing.assert_close(found, expected, atol=ATOL[name], rtol=0)


@pytest.mark.parametrize("name", TAKES_PORTIONS)
def test_lines_may_arrive_in_any_order(name):
    """What makes it possible to deal them out: the result has the same order."""
    call, stack = _call((80, 24)), _stack((80, 24), 2)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    expected = BACKENDS[name].run(stack, call)[:, order]
    found = _portioned(name, stack[:, order], call, 4)
    torch.testing.assert_close(found, expected, atol=ATOL[name], rtol=0)


@pytest.mark.parametrize("name", TAKES_PORTIONS)
def test_zeros_stay_zeros_and_nan_stays_in_its_matrix(name):
    """As without portions."""
    call, stack = _call((24, 80)), _stack((24, 80), 3)
    stack[0], stack[1, 3, 70] = 0, float("nan")
    found = _portioned(name, stack, call, 4)
    assert (found[0] == 0).all() and found[1].isnan().any() and not found[2].isnan().any()


def test_backends_that_take_portions():
    """Others are refused: the engine gives them whole stacks."""
    stack = _stack((24, 80), 1)
    for name, backend in BACKENDS.items():
        assert backend.takes_portions == (name in TAKES_PORTIONS)
        if backend.takes_portions:
            run = backend.start(stack, _call((24, 80)), borders(80, 2))
            assert isinstance(run, PortionedRun)
    with pytest.raises(ValueError, match=r"symmetric: expected a backend that takes portions"):
        BACKENDS["symmetric"].start(stack, _call((24, 80)), borders(80, 2))


def test_whole_run_waits_for_all_lines_and_has_a_dense_result():
    """Results of tall matrices are views that are transposed in memory."""
    stack, call = _stack((80, 24), 1), _call((80, 24))

    def copied(stack: torch.Tensor, _call: Call) -> torch.Tensor:
        return stack.mT.contiguous().mT

    memory = torch.zeros_like(stack)
    run = WholeRun(copied, memory, call)
    run.add(0)
    memory.copy_(stack)
    run.add(1)
    run.iterate()
    run.finish(0)
    assert torch.equal(run.result, stack) and run.result.is_contiguous()
