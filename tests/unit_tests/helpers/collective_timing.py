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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from megatron_muon.runtime.exchange import Chain

type When = Literal["at_wait", "at_launch"]

# Names of the arguments that a collective sends, and of those that it receives.
_ASYNCHRONOUS: dict[str, tuple[str, str]] = {
    "all_to_all_single": ("input", "output"),
    "all_to_all": ("input_tensor_list", "output_tensor_list"),
    "all_gather_into_tensor": ("input_tensor", "output_tensor"),
    "all_gather": ("tensor", "tensor_list"),
    "reduce_scatter_tensor": ("input", "output"),
    "reduce_scatter": ("input_list", "output"),
    "all_reduce": ("tensor", "tensor"),
    "broadcast": ("tensor", "tensor"),
}
_SYNCHRONOUS = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "barrier",
    "new_group",
)
# Nothing uses them yet; unwrapped they would hide races.
_UNKNOWN = ("isend", "irecv", "batch_isend_irecv", "send", "recv")


class Timing:
    """What happened under ``collectives_run()``.

    Args:
        when: When a message is read from the send buffer.
        forgotten: Number of a collective, in the order of launches, whose ``wait()`` does nothing:
            as if the caller had left it out.
    """

    breaches: list[str]  # a sentence each
    num_launched: int

    def __init__(self, when: When, forgotten: int | None = None) -> None:
        self.when = when
        self.breaches = []
        self.num_launched = 0
        self._forgotten = forgotten
        self._under_way: list[_Late] = []  # launched and not waited for, in order

    def launch(self, name: str, original: Callable[..., Any], arguments: dict[str, Any]) -> "_Late":
        work = _Late(self, f"{name} {self.num_launched}", name, original, arguments)
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
        self.breaches += work.breaches_of_sending()
        self.wait_beside(work)
        self._under_way.remove(work)

    def wait_beside(self, work: "_Late") -> None:
        """Let another stream wait: it may use what arrived. The step may not touch what is sent."""
        if work.is_delivered or work.number == self._forgotten:
            return
        self.run_until(work)
        self.breaches += work.breaches_of_receiving()
        work.deliver()
        for other in self._under_way:
            if not other.is_delivered:
                other.poison()

    def after(
        self, after: Callable[..., Any], work: "_Late | None", start: Callable[[], Any]
    ) -> Any:
        """Start a collective behind another one, now or when it is waited for."""

        def chained() -> Any:
            beside = None if work is None else _Beside(self, work)
            chain = Chain(torch.device("cpu"))
            # CPU ranks take every device for theirs, and would chain as gloo does.
            chain._stream = mock.Mock()
            with mock.patch.multiple(
                torch.cuda, stream=mock.MagicMock(), current_stream=mock.Mock()
            ):
                found = after(chain, beside, start)
            # Who waits for the second one has waited for the first one.
            return found if found is None or found is beside else _Both(found, beside)

        return chained() if self.when == "at_launch" else _Lazy(chained)

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


class _Late:
    """Stands in for ``dist.Work``."""

    def __init__(
        self,
        timing: Timing,
        label: str,
        name: str,
        original: Callable[..., Any],
        arguments: dict[str, Any],
    ) -> None:
        self.label = label
        self.number = int(label.split()[-1])
        self.is_delivered = False
        self._timing = timing
        self._original = original
        self._arguments = {**arguments, "async_op": False}
        sent, received = _ASYNCHRONOUS[name]
        self._received_name = received
        self._sent = _tensors(arguments[sent])
        self._received = _tensors(arguments[received])
        self._before = [tensor.clone() for tensor in self._sent]
        self._arrived: list[torch.Tensor] | None = None
        self._sent_name = sent
        self._is_in_place = sent == received
        # As an in-place all-gather does: its own chunk lies in what it receives.
        self._shares_memory = not self._is_in_place and any(
            _overlap(a, b) for a in self._sent for b in self._received
        )

    def wait(self, _timeout: object = None) -> bool:
        """Wait for what was received."""
        self._timing.wait(self)
        return True

    def run(self) -> None:
        """Move the data into memory of our own."""
        if self._arrived is not None:
            return
        # In place, the buffer is poisoned: what it held at the launch is sent.
        source = self._before if self._is_in_place else self._received
        self._arrived = [tensor.clone() for tensor in source]
        is_list = isinstance(self._arguments[self._received_name], list | tuple)
        into = self._arrived if is_list else self._arrived[0]
        arguments = {**self._arguments, self._received_name: into}
        if self._shares_memory:
            # What it sends is poisoned with what it receives.
            arguments[self._sent_name] = self._before[0]
        self._original(**arguments)

    def poison(self) -> None:
        """Fill the receive buffers with what nobody expects."""
        for tensor in self._received:
            tensor.fill_(_poison(tensor.dtype))

    def breaches_of_sending(self) -> list[str]:
        """List what was done to the send buffers since the launch."""
        is_apart = not self._is_in_place and not self._shares_memory
        if is_apart and not all(map(_same_bits, self._sent, self._before)):
            return [f"{self.label}: its send buffer was written before wait()"]
        return []

    def breaches_of_receiving(self) -> list[str]:
        """List what was done to the receive buffers since the launch."""
        poisoned = [torch.full_like(each, _poison(each.dtype)) for each in self._received]
        if not all(map(_same_bits, self._received, poisoned)):
            return [f"{self.label}: its receive buffer was written before wait()"]
        return []

    def deliver(self) -> None:
        """Write what arrived to where it was asked for."""
        assert self._arrived is not None
        self.is_delivered = True
        for target, arrived in zip(self._received, self._arrived, strict=True):
            target.copy_(arrived)


class _Beside:
    """A collective that a second stream waits for first, and the step maybe later."""

    def __init__(self, timing: Timing, work: _Late) -> None:
        self._timing = timing
        self._work = work
        self._wait = timing.wait_beside

    def wait(self) -> None:
        """Wait in the second stream, and from then on in the step."""
        wait, self._wait = self._wait, self._timing.wait
        wait(self._work)


class _Both:
    def __init__(self, second: Any, first: _Beside | None) -> None:
        self._second = second
        self._first = first

    def wait(self) -> None:
        """Wait in the step for what started behind another collective, and so for both."""
        self._second.wait()
        if self._first is not None:
            self._first.wait()


class _Lazy:
    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start

    def wait(self) -> None:
        """Start and wait."""
        work = self._start()
        if work is not None:
            work.wait()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    first, second = sorted((a, b), key=torch.Tensor.data_ptr)
    return second.data_ptr() < first.data_ptr() + first.nbytes


def _poison(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (a, b)))


@contextmanager
def collectives_run(when: When, *, forgotten: int | None = None) -> Iterator[Timing]:
    """Replace the collectives of ``torch.distributed``; all ranks together."""
    timing = Timing(when, forgotten)
    names = (*_ASYNCHRONOUS, *_SYNCHRONOUS, *_UNKNOWN)
    originals = {name: getattr(dist, name) for name in names}
    for name, original in originals.items():
        setattr(dist, name, _replacement(timing, name, original))
    original_after = Chain.after
    chained = mock.patch.object(
        Chain, "after", lambda _, *args: timing.after(original_after, *args)
    )
    try:
        with chained:
            yield timing
        timing.end()
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _replacement(timing: Timing, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        """Launch, or run everything that was launched before."""
        if name in _UNKNOWN:
            raise NotImplementedError(f"{name}: expected a collective. Add it to this helper.")
        arguments = signature.bind(*args, **kwargs).arguments
        if name in _ASYNCHRONOUS and arguments.get("async_op"):
            return timing.launch(name, original, dict(arguments))
        timing.run_until()
        return original(*args, **kwargs)

    return call


def equal_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(_same_bits, found, expected))
