# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous collectives at the worst time that is allowed, so that races show without a GPU.

Between the launch of an asynchronous collective and ``wait()``, nobody may write what it sends, nor
read or write what it receives. gloo on one machine forgives most breaches: messages arrive within
microseconds. Here none is forgiven:

==============  ==================================================================================
``at_wait``     a message is read from the send buffer as late as possible: who wrote to it since
                the launch is caught
``at_launch``   a message is read and has arrived at once: what came too early would be seen
both            receive buffers hold NaN from the launch to ``wait()``, and again whenever another
                collective that shares them ends: who reads early, or lets two collectives share
                memory, gets NaN
both            at ``wait()`` send buffers are compared with what they held at the launch, and
                receive buffers must still hold NaN; ``Timing.breaches`` lists what was not so
==============  ==================================================================================

Late collectives run in the order in which they were launched, which is the same on all ranks, and
all of them run before a synchronous one starts: a peer may wait for any of them before it comes to
the synchronous one, and would wait forever. The comparison at ``wait()`` still finds what is
written in between.

A chained collective (``Chain`` of ``megatron_muon/runtime/exchange.py``) starts at the worst time
too: with ``at_launch`` at once, with ``at_wait`` when it is waited for. A GPU may do either. The
chain is that of a GPU: its second stream waits, not the step.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from megatron_muon.runtime.exchange import Chain

type When = Literal["at_wait", "at_launch"]

# Names of the arguments that a collective sends and receives. Others, if they are asynchronous,
# are refused here: unwrapped they would hide races.
_ASYNCHRONOUS = {
    "all_to_all_single": ("input", "output"),
    "all_gather_into_tensor": ("input_tensor", "output_tensor"),
}
_SYNCHRONOUS = (
    *("all_reduce", "broadcast", "all_gather", "all_to_all", "reduce_scatter_tensor"),
    *("all_gather_object", "broadcast_object_list", "gather_object", "barrier", "new_group"),
)
_REFUSED = ("isend", "irecv", "batch_isend_irecv", "send", "recv")


class Timing:
    """What happened under ``collectives_run()``.

    Args:
        when: When a message is read from the send buffer.
        forgotten: Number of a collective, in the order of launches, whose ``wait()`` does nothing:
            as if the caller had left it out.
    """

    def __init__(self, when: When, forgotten: int | None = None) -> None:
        self.when = when
        self.breaches: list[str] = []  # a sentence each
        self.num_launched = 0
        self._forgotten = forgotten
        self._under_way: list[_Late] = []  # launched and not waited for, in order

    def launch(self, name: str, original: Callable[..., Any], arguments: dict[str, Any]) -> "_Late":
        work = _Late(self, name, original, arguments)
        self.num_launched += 1
        self._under_way.append(work)
        if self.when == "at_launch":
            work.run()
        work.poison()
        return work

    def wait(self, work: "_Late") -> None:
        """End a collective; those that were launched before it run first."""
        if work not in self._under_way or work.number == self._forgotten:
            return
        if not work.shares_memory and not _same_bits(work.sent, work.before):
            self.breaches.append(f"{work.label}: its send buffer was written before wait()")
        self.wait_beside(work)
        self._under_way.remove(work)

    def wait_beside(self, work: "_Late") -> None:
        """Let another stream wait: it may use what arrived. The step may not touch what is sent."""
        if work.is_delivered or work.number == self._forgotten:
            return
        self.run_until(work)
        if not _same_bits(work.received, torch.full_like(work.received, torch.nan)):
            self.breaches.append(f"{work.label}: its receive buffer was written before wait()")
        work.deliver()
        for other in self._under_way:
            if not other.is_delivered:
                other.poison()

    def after(
        self, after: Callable[..., Any], work: "_Late | None", start: Callable[[], Any]
    ) -> Any:
        """Start a collective behind another one, now or when it is waited for."""

        def chained() -> Any:
            # A second stream waits first, and from then on the step.
            waits = itertools.chain([self.wait_beside], itertools.repeat(self.wait))
            beside = work and SimpleNamespace(wait=lambda: next(waits)(work))
            chain = Chain(torch.device("cpu"))
            # CPU ranks take every device for theirs, and would chain as gloo does.
            chain._stream = mock.Mock()
            with mock.patch.multiple(
                torch.cuda, stream=mock.MagicMock(), current_stream=mock.Mock()
            ):
                second = after(chain, beside, start)
            # Who waits for the second one has waited for the first one.
            return second if second in (None, beside) else _handle_of(second, beside)

        if self.when == "at_launch":
            return chained()
        return SimpleNamespace(wait=lambda: _handle_of(chained()).wait())

    def run_until(self, last: "_Late | None" = None) -> None:
        """Run what has not run, in order, up to one collective or all."""
        for work in self._under_way:
            work.run()
            if work is last:
                return

    def end(self) -> None:
        """Run what nobody waited for: ranks must stay in step."""
        self.run_until()
        self.breaches += [f"{work.label}: nobody waited for it" for work in self._under_way]
        self._under_way = []


def _handle_of(*works: Any) -> Any:
    """Return a handle that waits for all of some, of which None is done."""
    return SimpleNamespace(wait=lambda: [work.wait() for work in works if work is not None])


class _Late:
    """Stands in for ``dist.Work``."""

    def __init__(
        self, timing: Timing, name: str, original: Callable[..., Any], arguments: dict[str, Any]
    ) -> None:
        self.number = timing.num_launched
        self.label = f"{name} {self.number}"
        self.is_delivered = False
        self._timing = timing
        self._original = original
        self._arguments = {**arguments, "async_op": False}
        self._names = _ASYNCHRONOUS[name]
        self.sent, self.received = (arguments[each] for each in self._names)
        self.before = self.sent.clone()
        self._arrived: torch.Tensor | None = None
        # As an in-place all-gather does: its own part lies in what it receives.
        self.shares_memory = _overlap(self.sent, self.received)

    def wait(self, _timeout: object = None) -> bool:
        """Wait for what was received."""
        self._timing.wait(self)
        return True

    def run(self) -> None:
        """Move the data into memory of our own."""
        if self._arrived is None:
            self._arrived = self.received.clone()
            # Shared memory is poisoned with what it receives.
            sent = self.before if self.shares_memory else self.sent
            buffers = dict(zip(self._names, (sent, self._arrived), strict=True))
            self._original(**self._arguments | buffers)

    def poison(self) -> None:
        """Fill the receive buffer with what nobody expects."""
        self.received.fill_(torch.nan)

    def deliver(self) -> None:
        """Write what arrived to where it was asked for."""
        assert self._arrived is not None
        self.is_delivered = True
        self.received.copy_(self._arrived)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    first, second = sorted((a, b), key=torch.Tensor.data_ptr)
    return second.data_ptr() < first.data_ptr() + first.nbytes


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (a, b)))


@contextmanager
def collectives_run(when: When, *, forgotten: int | None = None) -> Iterator[Timing]:
    """Replace the collectives of ``torch.distributed``; all ranks together."""
    timing = Timing(when, forgotten)
    names = (*_ASYNCHRONOUS, *_SYNCHRONOUS, *_REFUSED)
    replaced = {name: _replacement(timing, name, getattr(dist, name)) for name in names}
    original_after = Chain.after
    chained = mock.patch.object(
        Chain, "after", lambda _, *args: timing.after(original_after, *args)
    )
    with mock.patch.multiple(dist, **replaced), chained:
        yield timing
        timing.end()


def _replacement(timing: Timing, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        """Launch, or run everything that was launched before."""
        arguments = signature.bind(*args, **kwargs).arguments
        is_asynchronous = name in _REFUSED or arguments.get("async_op")
        if is_asynchronous and name not in _ASYNCHRONOUS:
            raise NotImplementedError(f"{name}: expected a known collective. Add it here.")
        if is_asynchronous:
            return timing.launch(name, original, dict(arguments))
        timing.run_until()
        return original(*args, **kwargs)

    return call


def equal_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(_same_bits, found, expected))
