# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A step of Muon on the shards of this rank, for Megatron-FSDP and for plain FSDP2.

An optimizer lists local tensors by position: weights, gradients and momentum of the parameters with
local rows. A step is then the same for all optimizers::

    reserve()                   memory of the step; ranks agree to step
    step()
        on_gradients            hooks
        decay, momentum         a few launches for each parameter group
        on_momentum             hooks
        exchange                rows to owners; as results arrive:
            on_results              hooks change results
            update                  subtracts results from weights

If a rank runs out of memory after the agreement, the other ranks hang in a collective. Therefore
``MatrixStep.reserve()`` allocates results, float32 momentum, messages and stacks, which stay, and a
block of the size of the temporaries, which stays in torch's cache: temporaries of Newton-Schulz, of
hooks, and of optimizers that step meanwhile. Small allocations come later: lists of rectangles,
norms, and state values per block.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Self

import torch
from emerging_optimizers.utils import FP32MatmulPrecT, fp32_matmul_precision

from megatron_muon.rows.matrices import RowIndex
from megatron_muon.runtime.arena import NOTHING, Arena, OtherBytes
from megatron_muon.runtime.engine import Engine
from megatron_muon.runtime.plan_runner import profiler_range
from megatron_muon.runtime.row_moves import Rows
from megatron_muon.runtime.tensors import join_adjacent, local_tensor
from megatron_muon.step.elementwise import TensorList, advance_momentum, decay_before_update
from megatron_muon.step.hooks import StepHooks
from megatron_muon.step.stored_state import MomentumStaging, tensors_in

# Elements that are copied or computed at once: 64 MB in float32, which a GPU reads in tens of
# microseconds, longer than a launch takes.
PORTION_ELEMENTS = 2**24


class StepSettings(NamedTuple):
    """Settings of a step that never change.

    Args:
        nesterov: Whether the gradient is averaged in once more.
        weight_decay_method: One of ``WEIGHT_DECAY_METHODS``.
        fp32_matmul_prec: Precision of Newton-Schulz.
        overwrites_gradients: Whether results are written to the memory of gradients, which saves as
            much memory as the momentum has. Otherwise gradients stay as they are, except with
            ``l2``, which adds the decay to them, as in emerging-optimizers.
        gradients_stay: Whether gradients are in the same memory in every step, so that views of it
            may be kept.
        momentum_dtype: Dtype of momentum between steps.
        offload_state: Whether the optimizer keeps state in CPU memory between steps.
    """

    nesterov: bool
    weight_decay_method: str
    fp32_matmul_prec: FP32MatmulPrecT
    overwrites_gradients: bool = False
    gradients_stay: bool = False
    momentum_dtype: torch.dtype = torch.float32
    offload_state: bool = False


def portions_of(
    positions: Iterable[int], sizes: Sequence[int], limit: float = PORTION_ELEMENTS
) -> Iterator[list[int]]:
    """Yield positions in portions of at most ``limit`` elements, or of one position.

    Args:
        positions: Positions in their order.
        sizes: Elements by position.
        limit: Elements of a portion.
    """
    portion: list[int] = []
    num_elements = 0
    for position in positions:
        if portion and num_elements + sizes[position] > limit:
            yield portion
            portion, num_elements = [], 0
        portion.append(position)
        num_elements += sizes[position]
    if portion:
        yield portion


class _StepTensors(NamedTuple):
    """Tensors of the same parameters.

    Args:
        weights: Local weights.
        momentum: Momentum as it is kept.
        results: Results of Newton-Schulz, and its input with Nesterov.
        staged: Momentum in float32, as it is averaged: in staging memory, or the momentum itself.
    """

    weights: TensorList
    momentum: TensorList
    results: TensorList
    staged: TensorList

    def at(self, positions: Sequence[int]) -> Self:
        """Return the tensors of some of the parameters."""
        return self._replace(
            **{key: [tensors[i] for i in positions] for key, tensors in self._asdict().items()}
        )


class _Arrival(NamedTuple):
    """Parameters of one group whose results are complete at the same time; joined tensors."""

    group: int
    positions: list[int]
    weights: TensorList
    results: TensorList


class MatrixStep:
    """Step matrices: weight decay, momentum, exchange and update.

    Args:
        group_index: Index of the parameter group by parameter.
        engine: Orthogonalizes their matrices.
        settings: Settings.
        device: Of weights and gradients.

    Attributes:
        params: By position, the parameters with local rows.
        group_index: Index of the parameter group by position.
        hooks: Called in their order.
        staging: Float32 momentum.

    Communication: see ``Engine``.
    Memory: while a step runs

        - results, 4 bytes an element, unless they overwrite gradients,
        - ``MomentumStaging``, in portions of 64 MB or the largest parameter,
        - messages and stacks, see ``Engine``.
    """

    def __init__(
        self,
        group_index: Mapping[torch.Tensor, int],
        engine: Engine,
        settings: StepSettings,
        device: torch.device,
    ) -> None:
        self.engine, self.settings = engine, settings
        self.hooks: list[StepHooks] = []
        handles: list[RowIndex] = engine.handles
        self._num_matrices = Counter(handle.param for handle in handles)
        self.params = [param for param in group_index if param in self._num_matrices]
        self.group_index = [group_index[param] for param in self.params]
        position = {param: i for i, param in enumerate(self.params)}
        self._position = {handle: position[handle.param] for handle in handles}
        shapes = [local_tensor(param).shape for param in self.params]
        self._sizes = list(map(math.prod, shapes))
        is_staged = settings.momentum_dtype != torch.float32
        limit = PORTION_ELEMENTS if is_staged else math.inf
        # Parameter group, and positions of parameters that are advanced together; in the order of
        # groups.
        self._portions = [
            (group, portion)
            for group, positions in groupby(range(len(shapes)), self.group_index.__getitem__)
            for portion in portions_of(positions, self._sizes, limit)
        ]
        own_results = [] if settings.overwrites_gradients else shapes
        self._arena = Arena(4 * sum(map(math.prod, own_results)), device, "results")
        self._results = tensors_in(self._arena, 0, own_results)
        self._arena.free()
        self.staging = MomentumStaging(
            [[shapes[i] for i in portion] for _, portion in self._portions],
            settings.momentum_dtype,
            device,
        )
        # The input of Newton-Schulz is in the memory of results, or momentum itself.
        self._is_in_results = settings.nesterov or self.staging.is_needed
        self._forget()

    def reserve(self, others: OtherBytes = NOTHING) -> None:
        """Reserve the memory of a step; arenas stay until ``step()`` ends or ``release()``.

        Args:
            others: Allocations of other optimizers, meanwhile or afterwards.

        Raises:
            MemoryError: The device has too little memory, with sizes.
        """
        self._allocate()
        portion = max(min(PORTION_ELEMENTS, sum(self._sizes)), *self._sizes, 0)
        hook_bytes = (4 * portion * hook.num_copies for hook in self.hooks)
        temporaries = max(others.temporaries, *hook_bytes, 0)
        self.engine.reserve(OtherBytes(others.state, temporaries))

    def release(self) -> None:
        """Return the memory of ``reserve()``, if ranks do not step."""
        self._free()
        self.engine.release()

    def _allocate(self) -> None:
        self.staging.allocate()
        self._arena.allocate()

    def _free(self) -> None:
        self.staging.free()
        self._arena.free()

    @torch.no_grad()
    def step(
        self,
        groups: Sequence[Mapping[str, Any]],
        weights: TensorList,
        grads: Sequence[torch.Tensor | None],
        momentum: TensorList,
        overlap_fn: Callable[[], None] | None = None,
    ) -> None:
        """Update weights and momentum; called by all ranks together.

        Without ``reserve()`` before it, a rank that lacks memory raises alone.

        Args:
            groups: Parameter groups, of which ``lr``, ``momentum`` and ``weight_decay`` are read.
            weights: Float32, by position.
            grads: Float32 or bfloat16, by position. None for a parameter that stays as it is,
                though its momentum is exchanged.
            momentum: In the dtype in which it is kept, by position.
            overlap_fn: Called once, when the first rows are in transit.
        """
        self._allocate()
        results: Any = self._results or grads
        self._find_views(weights, momentum, results)
        for hook in self.hooks:
            hook.on_gradients(weights, grads)
        without_grad = {i for i, grad in enumerate(grads) if grad is None}
        with profiler_range("momentum"):
            for number, (group, _) in enumerate(self._portions):
                self._advance(number, groups[group], grads)
        if self._is_in_results:
            # They are exchanged too, as other ranks may have a gradient; their results are dropped.
            for i in without_grad:
                results[i].copy_(momentum[i])
        for hook in self.hooks:
            hook.on_momentum(weights, momentum)
        with fp32_matmul_precision(self.settings.fp32_matmul_prec):
            arrivals = self.engine.orthogonalize(self._sources, self._targets, overlap_fn)
            for number, done in enumerate(arrivals):
                with profiler_range("update"):
                    self._update(groups, number, done, without_grad)
        self._free()
        settings = self.settings
        if settings.offload_state or (
            settings.overwrites_gradients and not settings.gradients_stay
        ):
            self.forget()

    def forget(self) -> None:
        """Drop the views of the step before, and the memory that they keep."""
        self._forget()
        self.engine.forget()

    def _forget(self) -> None:
        """Drop the views of the step before."""
        self._seen = _StepTensors((), (), (), ())
        self._addresses: list[list[int]] | None = None
        self._sources: Rows = {}
        self._targets: Rows = {}
        # Tensors of each portion, which may be joined.
        self._tensors: list[_StepTensors] = []
        # Arrivals have the same order in every step.
        self._arrivals: list[list[_Arrival]] = []
        self._num_missing = [self._num_matrices[param] for param in self.params]

    def _find_views(self, weights: TensorList, momentum: TensorList, results: TensorList) -> None:
        """View the rows that are exchanged, anew only where their memory has moved."""
        # Addresses are compared, not tensors: storage may have been replaced, as by an offload.
        addresses = [
            [tensor.data_ptr() for tensor in tensors] for tensors in (weights, momentum, results)
        ]
        is_moved = addresses != self._addresses
        if is_moved:
            self._forget()
        self._seen = _StepTensors(weights, momentum, results, momentum)
        if not is_moved:
            return
        self._addresses = addresses
        self._targets = self._rows_of(results)
        self._sources = self._targets if self._is_in_results else self._rows_of(momentum)
        for number, (_, positions) in enumerate(self._portions):
            tensors = self._seen.at(positions)
            if self.staging.is_needed:
                tensors = tensors._replace(staged=self.staging.tensors[number])
            if self.settings.overwrites_gradients:
                # Elsewhere gradients are in other memory in every step.
                tensors = _StepTensors(*join_adjacent(*tensors))
            self._tensors.append(tensors)

    def _rows_of(self, tensors: TensorList) -> Rows:
        return {handle: handle.of(tensors[i]) for handle, i in self._position.items()}

    def _advance(
        self, number: int, group: Mapping[str, Any], all_grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Decay weights, and average gradients into momentum."""
        tensors, settings = self._tensors[number], self.settings
        # Results overwrite gradients: both are the same tensors.
        grads: Any = tensors.results
        if self._results:
            grads = [all_grads[i] for i in self._portions[number][1]]
            chosen = [n for n, grad in enumerate(grads) if grad is not None]
            if len(chosen) < len(grads):
                tensors, grads = tensors.at(chosen), [grads[n] for n in chosen]
            if any(grad.dtype != torch.float32 for grad in grads):
                # bfloat16 gradients are converted in the memory of results.
                torch._foreach_copy_(tensors.results, grads)
                grads = tensors.results
        # torch has no foreach function for an empty list.
        if not grads:
            return
        if self.staging.is_needed:
            torch._foreach_copy_(tensors.staged, tensors.momentum)
        decay_before_update(settings.weight_decay_method, tensors.weights, grads, group)
        updates = tensors.results if settings.nesterov else None
        advance_momentum(group, grads, tensors.staged, updates)
        if self.staging.is_needed:
            if not settings.nesterov:
                torch._foreach_copy_(tensors.results, tensors.staged)
            torch._foreach_copy_(tensors.momentum, tensors.staged)

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
        for group_index, positions, weights, results in self._arrivals[number]:
            group = groups[group_index]
            if not without_grad.isdisjoint(positions):
                positions = [i for i in positions if i not in without_grad]
                weights, _, results, _ = self._seen.at(positions)
            for portion in portions_of(positions, self._sizes) if self.hooks else ():
                own = self._seen.at(portion)
                for hook in self.hooks:
                    hook.on_results(group, portion, own.weights, own.results)
            if positions:
                torch._foreach_add_(weights, results, alpha=-group["lr"])

    def _find_arrivals(self, done: Iterable[Any]) -> Iterator[_Arrival]:
        complete: dict[int, list[int]] = {}
        for handle in done:
            i = self._position[handle]
            self._num_missing[i] -= 1
            if self._num_missing[i] == 0:
                complete.setdefault(self.group_index[i], []).append(i)
        for group, positions in complete.items():
            own = self._seen.at(positions)
            yield _Arrival(group, positions, *join_adjacent(own.weights, own.results))
