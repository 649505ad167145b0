# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A step of Muon on the shards of this rank, for Megatron-FSDP and for plain FSDP2.

An optimizer lists local tensors by position: weights, gradients and momentum of the parameters with
local rows. A step is then the same for all optimizers::

    reserve()                   memory of the step; ranks agree to step
    step()
        hook.begin              gradients
        decay, momentum         a few launches for each parameter group
        hook.advanced           momentum
        exchange                rows to owners; as results arrive:
            hook.arrived            changes results
            update                  subtracts results from weights

A rank that runs out of memory after ranks have agreed leaves the others in a collective. Therefore
``MatrixStep.reserve()`` allocates results, float32 momentum, messages and stacks, which stay, and a
block of the size of the temporaries, which stays in torch's cache: temporaries of Newton-Schulz, of
hooks, and of optimizers that step meanwhile. Small allocations come later: lists of rectangles,
norms, and state values per block.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from emerging_optimizers.utils import FP32MatmulPrecT, fp32_matmul_precision

from megatron_muon.rows.matrices import RowIndex
from megatron_muon.runtime.arena import NOTHING, Arena, OtherBytes
from megatron_muon.runtime.engine import Engine
from megatron_muon.runtime.local_rows import Rows
from megatron_muon.runtime.plan_runner import profiler_range
from megatron_muon.runtime.tensors import join_adjacent, local_tensor
from megatron_muon.step.elementwise import advance_momentum
from megatron_muon.step.stored_state import CopyBack

# Elements that are copied or computed at once: 64 MB in float32, which a GPU reads in tens of
# microseconds, longer than a launch takes.
PORTION_ELEMENTS = 2**24


class StepSettings(NamedTuple):
    """Settings of a step that never change.

    Args:
        nesterov: Whether the gradient is averaged in once more.
        weight_decay_method: See ``decay_weights()``.
        fp32_matmul_prec: Precision of Newton-Schulz.
        overwrites_gradients: Whether results are written to the memory of gradients, which saves as
            much memory as the momentum has. Otherwise gradients stay as they are, except with
            ``l2``, which adds the decay to them, as in emerging-optimizers.
        gradients_stay: Whether gradients are in the same memory in every step, so that views of it
            may be kept.
        momentum_dtype: Dtype of momentum between steps.
        offload_momentum: Whether momentum is in CPU memory between steps.
    """

    nesterov: bool
    weight_decay_method: str
    fp32_matmul_prec: FP32MatmulPrecT
    overwrites_gradients: bool = False
    gradients_stay: bool = False
    momentum_dtype: torch.dtype = torch.float32
    offload_momentum: bool = False

    @property
    def stages_momentum(self) -> bool:
        """Whether a step copies momentum to float32 memory of the device."""
        return self.momentum_dtype != torch.float32 or self.offload_momentum


class StepHooks:
    """Additions to a step, such as figures and second moments; this base class does nothing.

    Attributes:
        num_bytes: Memory that a call allocates at most.
    """

    num_bytes: int = 0

    def begin(self, grads: Sequence[torch.Tensor | None]) -> None:
        """See gradients by position, before weight decay."""

    def advanced(self, momentum: Sequence[torch.Tensor]) -> None:
        """See the new momentum by position."""

    def arrived(self, positions: Sequence[int], results: Sequence[torch.Tensor]) -> None:
        """Change results of one parameter group, which are subtracted next."""


def portions_of(sizes: Iterable[tuple[int, int]], limit: float) -> Iterator[list[int]]:
    """Yield positions in portions of at most ``limit`` elements, or of one position.

    Args:
        sizes: Positions and their numbers of elements.
        limit: Elements of a portion.
    """
    portion: list[int] = []
    num_elements = 0
    for position, size in sizes:
        if portion and num_elements + size > limit:
            yield portion
            portion, num_elements = [], 0
        portion.append(position)
        num_elements += size
    if portion:
        yield portion


@dataclass
class _Portion:
    """Parameters of one group that are advanced at once.

    Args:
        group: Position of the group.
        positions: Of the parameters.
        slot: Slot of staging memory.
        staged: Memory of their momentum in float32; none if it is averaged where it is kept.
        lists: Weights, momentum, results and staged momentum, which may be joined tensors.
    """

    group: int
    positions: list[int]
    slot: int
    staged: list[torch.Tensor]
    lists: list[list[torch.Tensor]] = field(default_factory=list)


class _Arrival(NamedTuple):
    """Parameters of one group whose results are complete at the same time; joined tensors."""

    group: int
    positions: list[int]
    weights: list[torch.Tensor]
    results: list[torch.Tensor]


class MatrixStep:
    """Step matrices: weight decay, momentum, exchange and update.

    Args:
        group_index: Index of the parameter group by parameter.
        engine: Orthogonalizes their matrices.
        settings: Settings.
        device: Of weights and gradients.
        rows_elsewhere: Whether weights and gradients are on another device than the exchange.

    Attributes:
        params: By position, the parameters with local rows.
        group_index: Index of the parameter group by position.
        hooks: Called in their order.
        arena: Memory of results, and of momentum that is staged.

    Communication: see ``Engine``.
    Memory: while a step runs

        - results, 4 bytes an element, unless they overwrite gradients,
        - 64 MB or the largest parameter, for momentum that is staged in float32; twice that if it
          is kept in CPU memory,
        - messages and stacks, see ``Engine``.
    """

    def __init__(
        self,
        group_index: Mapping[torch.Tensor, int],
        engine: Engine,
        settings: StepSettings,
        device: torch.device,
        *,
        rows_elsewhere: bool = False,
    ) -> None:
        self.engine, self.settings, self._device = engine, settings, device
        self._rows_elsewhere = rows_elsewhere
        self.hooks: list[StepHooks] = []
        handles: list[RowIndex] = engine.handles
        self._num_matrices = Counter(handle.param for handle in handles)
        self.params = [param for param in group_index if param in self._num_matrices]
        self.group_index = [group_index[param] for param in self.params]
        position = {param: i for i, param in enumerate(self.params)}
        self._position = {handle: position[handle.param] for handle in handles}
        self._shapes = [local_tensor(param).shape for param in self.params]
        sizes = list(map(math.prod, self._shapes))
        stages = settings.stages_momentum
        limit = PORTION_ELEMENTS if stages else math.inf
        by_group: dict[int, list[tuple[int, int]]] = {}
        for i, group in enumerate(self.group_index):
            by_group.setdefault(group, []).append((i, sizes[i]))
        portions = [(group, c) for group, own in by_group.items() for c in portions_of(own, limit)]
        num_results = 0 if settings.overwrites_gradients else sum(sizes)
        largest = max((sum(sizes[i] for i in portion) for _, portion in portions), default=0)
        self._copy_back = CopyBack(device, to_cpu=settings.offload_momentum)
        # A portion may be copied back while the next one is advanced.
        num_slots = self._copy_back.num_slots
        num_staged = stages * num_slots * largest
        # torch converts bfloat16 on the device, into memory of its own, where one side is a CPU's.
        self._is_converted = settings.offload_momentum and settings.momentum_dtype != torch.float32
        self._copied_bytes = 2 * (num_slots + 1) * largest * self._is_converted
        self.arena = Arena(4 * (num_results + num_staged), device, "results and momentum")
        self._results = None if settings.overwrites_gradients else self._views(range(len(sizes)), 0)
        self._portions = [
            _Portion(
                group,
                portion,
                slot := number % num_slots,
                self._views(portion, num_results + slot * largest) if stages else [],
            )
            for number, (group, portion) in enumerate(portions)
        ]
        self.arena.free()
        self._forget()

    def _views(self, positions: Iterable[int], first: int) -> list[torch.Tensor]:
        """View the arena as tensors like parameters, from a float32 on."""
        views = []
        for i in positions:
            shape = self._shapes[i]
            views.append(self.arena.view(4 * first, math.prod(shape), torch.float32).view(shape))
            first += math.prod(shape)
        return views

    def reserve(self, others: OtherBytes = NOTHING) -> None:
        """Reserve the memory of a step; arenas stay until ``step()`` ends or ``release()``.

        Args:
            others: Allocations of other optimizers, meanwhile or afterwards.

        Raises:
            MemoryError: The device has too little memory, with sizes.
        """
        self._copy_back.wait_for_all()
        self.arena.allocate()
        needs = [others.temporaries]
        if not self._rows_elsewhere:
            needs += [self._copied_bytes, *(hook.num_bytes for hook in self.hooks)]
        self.engine.reserve(OtherBytes(others.state, max(needs)))

    def release(self) -> None:
        """Return the memory of ``reserve()``, if ranks do not step."""
        self._copy_back.wait_for_all()
        self.arena.free()
        self.engine.release()

    @torch.no_grad()
    def step(
        self,
        groups: Sequence[Mapping[str, Any]],
        weights: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        momentum: Sequence[torch.Tensor],
        overlap_fn: Callable[[], None] | None = None,
    ) -> None:
        """Update weights and momentum; called by all ranks together.

        Without ``reserve()`` before it, a rank that lacks memory raises alone.

        Args:
            groups: Parameter groups, of which ``lr``, ``momentum`` and ``weight_decay`` are read.
            weights: Float32, by position.
            grads: Float32 or bfloat16, by position. None for a parameter that stays as it is,
                though its momentum is exchanged.
            momentum: In the dtype and the memory where it is kept, by position.
            overlap_fn: Called once, when the first rows are in transit.
        """
        self.arena.allocate()
        results: Any = grads if self._results is None else self._results
        self._find_views(weights, momentum, results)
        for hook in self.hooks:
            hook.begin(grads)
        without_grad = {i for i, grad in enumerate(grads) if grad is None}
        with profiler_range("momentum"):
            for portion in self._portions:
                self._advance(portion, groups[portion.group], grads)
        if self._in_results:
            # Exchanged all the same, as others may have a gradient; results are dropped.
            for i in without_grad:
                results[i].copy_(momentum[i])
        if self.hooks:
            self.wait_for_copies()
        if self._is_converted:
            # Newton-Schulz needs the memory in which it was converted.
            self._copy_back.wait_for_all()
        for hook in self.hooks:
            hook.advanced(momentum)
        with fp32_matmul_precision(self.settings.fp32_matmul_prec):
            arrivals = self.engine.orthogonalize(self._sources, self._targets, overlap_fn)
            for number, done in enumerate(arrivals):
                with profiler_range("update"):
                    self._update(groups, number, done, without_grad)
        self._copy_back.wait_for_all()
        self.arena.free()
        if self.settings.overwrites_gradients and not self.settings.gradients_stay:
            self.forget()

    def forget(self) -> None:
        """Drop the views of the step before, and the memory that they keep."""
        self._forget()
        self.engine.forget()

    def wait_for_copies(self) -> None:
        """Let the host wait until momentum in CPU memory may be read or written."""
        self._copy_back.wait_for_all()
        if self.settings.offload_momentum and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    @property
    def _in_results(self) -> bool:
        """Whether the input of Newton-Schulz is in the memory of results."""
        return self.settings.nesterov or self.settings.stages_momentum

    def _forget(self) -> None:
        """Drop the views of the step before."""
        self._seen: tuple[Sequence[torch.Tensor], ...] = ()  # weights, momentum, results
        self._addresses: list[list[int]] = []
        self._sources: Rows = {}
        self._targets: Rows = {}
        # Arrivals have the same order in every step.
        self._arrivals: list[list[_Arrival]] = []
        self._num_missing = [self._num_matrices[param] for param in self.params]
        for portion in self._portions:
            portion.lists = []

    def _find_views(self, *now: Sequence[torch.Tensor]) -> None:
        """View the rows that are exchanged, anew only where their memory has moved."""
        # Not the tensors: their storage may have been replaced, as by an offload.
        addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in now]
        if self._seen and addresses == self._addresses:
            self._seen = now
            return
        self._forget()
        self._seen, self._addresses = now, addresses
        self._targets = self._rows_of(now[2])
        self._sources = self._targets if self._in_results else self._rows_of(now[1])
        for portion in self._portions:
            lists = [[tensors[i] for i in portion.positions] for tensors in now]
            lists += [portion.staged] if portion.staged else []
            if self.settings.overwrites_gradients:
                # Elsewhere gradients are in other memory in every step.
                lists = join_adjacent(*lists)
            portion.lists = lists if portion.staged else [*lists, []]

    def _rows_of(self, tensors: Sequence[torch.Tensor]) -> Rows:
        return {each: each.of(tensors[i]) for each, i in self._position.items()}

    def _advance(
        self, portion: _Portion, group: Mapping[str, Any], all_grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Decay weights, and average gradients into momentum."""
        weights, kept, results, staged = portion.lists
        # Results overwrite gradients: both are the same tensors.
        grads: Sequence[Any] = results
        if self._results is not None:
            grads = [all_grads[i] for i in portion.positions]
            chosen = [n for n, grad in enumerate(grads) if grad is not None]
            if len(chosen) < len(grads):
                weights, kept, results, staged, grads = (
                    [each[n] for n in chosen] if each else []
                    for each in (weights, kept, results, staged, grads)
                )
            narrow = [n for n, grad in enumerate(grads) if grad.dtype != torch.float32]
            if narrow:
                # bfloat16 gradients are converted in the memory of results.
                torch._foreach_copy_([results[n] for n in narrow], [grads[n] for n in narrow])
                for n in narrow:
                    grads[n] = results[n]
        if staged:
            self._copy_back.wait(portion.slot)
            # Averaged in float32 on the device, and rounded once.
            torch._foreach_copy_(staged, kept, non_blocking=True)
        advance_momentum(
            group,
            weights,
            grads,
            staged or kept,
            weight_decay_method=self.settings.weight_decay_method,
            nesterov=self.settings.nesterov,
            updates=results,
        )
        if staged:
            if not self.settings.nesterov:
                torch._foreach_copy_(results, staged)
            self._copy_back.start(portion.slot, kept, staged)

    def _update(
        self,
        groups: Sequence[Mapping[str, Any]],
        number: int,
        done: Iterable[Any],
        without_grad: set[int],
    ) -> None:
        """Update the parameters whose last matrix has arrived, all of a group at once."""
        if number == len(self._arrivals):
            self._arrivals.append(list(self._find_arrivals(done)))
        for arrival in self._arrivals[number]:
            weights, _, results = self._seen
            positions, targets, updates = arrival.positions, arrival.weights, arrival.results
            if not without_grad.isdisjoint(positions):
                positions = [i for i in positions if i not in without_grad]
                targets, updates = [weights[i] for i in positions], [results[i] for i in positions]
            if not positions:
                continue
            group = groups[arrival.group]
            for hook in self.hooks:
                hook.arrived(positions, [results[i] for i in positions])
            torch._foreach_add_(targets, updates, alpha=-group["lr"])

    def _find_arrivals(self, done: Iterable[Any]) -> Iterator[_Arrival]:
        weights, _, results = self._seen
        complete: dict[int, list[int]] = {}
        for handle in done:
            i = self._position[handle]
            self._num_missing[i] -= 1
            if self._num_missing[i] == 0:
                complete.setdefault(self.group_index[i], []).append(i)
        for group, positions in complete.items():
            own = [weights[i] for i in positions], [results[i] for i in positions]
            yield _Arrival(group, positions, *join_adjacent(*own))
