# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The chained optimizer of a Megatron-FSDP model: Muon and scalar optimizers in one step.

Gradients are checked on all ranks before anything is updated. Their norm is not finite if one of
them is not, so the norm that clipping needs also finds NaN and Inf, without a second pass. With
Transformer Engine it stays on the device, and clipping is launched before the host reads the flag.
"""

import copy
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from megatron_muon.mcore.checkpoint_state import OptimizerState
from megatron_muon.mcore.chunks import sharded_chunk
from megatron_muon.mcore.fsdp_model import FSDPModel, current_device
from megatron_muon.mcore.metrics_log import MetricsLog
from megatron_muon.mcore.muon import build_muon_step
from megatron_muon.mcore.sharded_matrices import ShardedMatrices
from megatron_muon.mcore.torch_fsdp2 import is_torch_fsdp2
from megatron_muon.mcore.unsupported import alignment_problems
from megatron_muon.plan.settings import ExchangeSettings
from megatron_muon.runtime.agreement import (
    INTERRUPTED,
    raise_where_any_rank_fails,
    raise_where_ranks_differ,
    signed_checksum,
)
from megatron_muon.runtime.tensors import find_not_finite
from megatron_muon.step.elementwise import elementwise_bytes
from megatron_muon.step.lion import FSDPLion
from megatron_muon.step.offload import Offload


class FSDPMuonChainedOptimizer(ChainedOptimizer):
    """Step the optimizers of a model of Megatron-FSDP or FSDP2 together.

    A step::

        finish_grad_sync()                     reduce and attach gradients, if the loop has not
        norm of all gradients, clipping, and a check of all gradients
        muon_step.step()                       all Muon optimizers, through one exchange
        step() of the scalar optimizers
        QK-clip of main weights, if it is on
        install_optimized_model_weights()
        start_param_sync()                     start the parameter gather

    State and main weights that are in CPU memory between steps are on the device meanwhile.
    The last two run once. ``step_with_ready_grads`` of a child would run them after its own step,
    and gather weights that the next child has not updated yet. Megatron-FSDP v2 does the first and
    the last by itself, and refreshes compute weights in place of installing them. FSDP2 does all
    three.

    Optimizer state exists for every parameter on every rank from construction.

    Args:
        chained_optimizers: Wrapped Muon and scalar optimizers over the same model chunks.
        model_chunks: The model.
        fqns: Names of the parameters, for errors.
        exchange: How Muon's matrices are exchanged; None for the defaults.
        log_metrics: Whether metrics are written to the writers of a trainer.
        offload_fraction: Share of state and main weights that is in CPU memory between steps.

    Raises:
        ValueError: Settings of the exchange, or of groups, cannot work (``MuonStep``).
        RuntimeError: Ranks disagree about parameters, or lack memory for the exchange.

    Communication: at construction see ``MuonStep``. Each step one flag over all ranks, the norm and
        zero count over the optimizers' gradient-statistics groups, and what Muon and Megatron-FSDP
        exchange.
    """

    # True from the first change of a step to its end. After an error in between it is unknown which
    # weights and state have changed.
    _is_changing: bool = False
    _problems: list[str]  # of this rank's gradients, in this step
    _norm: float | torch.Tensor | None  # of this step's gradients; None until it is known

    def __init__(
        self,
        chained_optimizers: Sequence[MegatronOptimizer],
        model_chunks: Sequence[FSDPModel],
        fqns: Mapping[torch.Tensor, str],
        exchange: ExchangeSettings | None = None,
        *,
        log_metrics: bool = False,
        offload_fraction: float = 0.0,
    ) -> None:
        super().__init__(list(chained_optimizers))
        self.model_chunks = list(model_chunks)
        self._is_of_fsdp2 = is_torch_fsdp2(model_chunks[0])
        self._fqns: Mapping[Any, str] = fqns
        # Lion has no matrices.
        muons = [child.optimizer for child in self.chained_optimizers if _is_muon(child)]
        self._chunks = [sharded_chunk(chunk) for chunk in self.model_chunks]
        stay = all(chunk.gradients_stay() for chunk in self._chunks)
        self.muon_step = build_muon_step(muons, exchange, gradients_stay=stay) if muons else None
        has_log = self.muon_step is not None and log_metrics
        self.metrics_log = MetricsLog(self.muon_step) if has_log else None  # type: ignore[arg-type]
        self.stored_state = OptimizerState(self.chained_optimizers, self.model_chunks)
        self._offload = Offload(self._offloaded, current_device(), offload_fraction)
        self._offload.to_cpu()

    def _offloaded(self) -> Iterator[torch.Tensor]:
        for child in self.chained_optimizers:
            for values in child.optimizer.state.values():
                yield from (value for value in values.values() if isinstance(value, torch.Tensor))
        for chunk in self._chunks:
            yield from chunk.main_weights()

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Reduce and attach gradients, reserve the memory of a step, and record problems.

        Returns:
            Whether an overflow was found: always False, without loss scaling.
        """
        problems = [problem for chunk in self._chunks for problem in chunk.finish_gradients()]
        self._offload.to_device()
        problems += self._offload.problems
        if self.muon_step is not None:
            elementwise = (torch.optim.Adam, torch.optim.AdamW, FSDPLion)
            # Not Transformer Engine's Adam: its fused kernel allocates nothing.
            others = [
                c.optimizer for c in self.chained_optimizers if isinstance(c.optimizer, elementwise)
            ]
            problems += self.muon_step.reserve(elementwise_bytes(others, current_device()))
        problems += alignment_problems(self.model_chunks[0].config)
        if self._is_changing:
            problems.append(INTERRUPTED)
        problems += [
            f"{fqn}: expected a gradient on a shard of shape {tuple(param._local_tensor.shape)}, "
            "got None"
            for param, fqn in self._fqns.items()
            if param.grad is None and param._local_tensor.numel()
        ]
        self._problems, self._norm = problems, None
        # Upstream reads main_grad of every parameter, which Megatron-FSDP does not set.
        return False

    @torch.no_grad()
    def get_grad_norm(self) -> float | torch.Tensor:
        """Return the norm of all gradients, which tells if one of them is not finite."""
        norm: float | torch.Tensor = super().get_grad_norm()
        if isinstance(norm, torch.Tensor):
            # Clipping by NaN would turn all gradients into NaN, and hide which one was. Clipping by
            # Inf turns finite gradients into zero.
            norm = norm.nan_to_num(nan=math.inf, posinf=math.inf)
        self._norm = norm
        return norm

    def _raise_where_gradients_fail(self) -> None:
        """Raise on all ranks where one has a problem.

        Raises:
            RuntimeError: On all ranks, when a non-empty shard of one has no gradient or one that
                is not finite, when parameters have changed since construction, when HSDP left
                gradients unreduced over the outer ranks, or when the last step failed in the
                middle, or when ranks have other values in parameter groups. Nothing was updated.

        Communication: one all-reduce of a single float64 over all ranks of the job.
        """
        norm: float | torch.Tensor = 0.0
        grads, device = [], current_device()
        if self._norm is None:
            # Without clipping or logging nobody asks for the norm.
            grads = self._gradients(self._fqns)
        elif not self._problems:
            norm, grads = self._norm, self._gradients(self._uncounted)
        # Zero times Inf or NaN is NaN, and so is every sum with it. Not torch.tensor, for whose
        # copy the host would wait.
        # All pipeline stages have the same groups, and the sum is exact for 2 million ranks.
        values = self._group_values()
        checksum = signed_checksum(values, range(dist.get_world_size()))
        start = math.nan if self._problems else checksum
        total = torch.full((1,), start, dtype=torch.float64, device=device)
        total += norm * 0.0
        if grads:
            total += torch.stack(torch._foreach_norm([grad for _, grad in grads])).mul_(0.0).sum()
        dist.all_reduce(total)
        if total.item() == 0.0:
            return
        advice = "Nothing was updated. Set the same values on all ranks."
        raise_where_ranks_differ(values, None, device, "param_groups", advice)
        not_finite = find_not_finite(self._gradients(self._fqns), device)
        raise_where_any_rank_fails(
            self._problems,
            None,
            device,
            "Every trainable parameter needs a finite, reduced gradient before step(): call "
            "finish_grad_sync() after the backward pass, and look for NaN or Inf in the loss. "
            "Nothing was updated.",
            num_device_problems=not_finite.number,
            describe=not_finite.explain,
        )
        raise RuntimeError(
            "gradient norm: expected a finite one, got inf, though every gradient is finite: they "
            "are so large that their squares overflow. Lower the learning rate, or scale the loss "
            "down. Nothing was updated."
        )

    def _group_values(self) -> list[str]:
        """Describe the values of parameter groups, such as learning rates, a line for each."""
        return [
            ", ".join(f"{k} {v}" for k, v in sorted(group.items()) if k not in ("params", "step"))
            for group in self.param_groups
        ]

    @functools.cached_property
    def _uncounted(self) -> list[Any]:
        """Parameters whose gradients the norm leaves out; asked for once all gradients exist.

        Cached: upstream's rule reads attributes of parameters, a few microseconds for each.
        """
        children = self.chained_optimizers
        counted = {id(grad) for child in children for grad in child.get_grads_for_grad_norm()}
        held = [param for param in self._fqns if param.grad is not None]
        return [param for param in held if id(param.grad._local_tensor) not in counted]

    def _gradients(self, params: Iterable[Any]) -> list[tuple[str, torch.Tensor]]:
        """Return names and local gradients of parameters with rows on this rank."""
        return [
            (self._fqns[param], param.grad._local_tensor)
            for param in params
            if param.grad is not None and param._local_tensor.numel()
        ]

    @torch.no_grad()
    def step(self) -> tuple[bool, float | torch.Tensor | None, int | None]:
        """Clip gradients and step.

        Returns:
            Whether weights were updated, the gradient norm before clipping, and the number of zeros
            in gradients where ``log_num_zeros_in_grad`` is set.

        Raises:
            RuntimeError: As ``step_with_ready_grads()``.
        """
        try:
            result = super().step()
            if not result[0]:
                # Upstream skips a norm above its threshold, and one that is not finite with it.
                self._raise_where_gradients_fail()
            return result
        finally:
            # After a step that upstream skips too, as its norm is above the threshold. A step that
            # failed in the middle may have left collectives that use the memory.
            if not self._is_changing:
                if self.muon_step is not None:
                    self.muon_step.release()
                self._offload.to_cpu()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step all optimizers, then install the weights and start the parameter gather.

        Returns:
            True; an optimizer that fails raises before any weight is installed.

        Raises:
            RuntimeError: See ``_raise_where_gradients_fail()``.
        """
        self._raise_where_gradients_fail()
        self._is_changing = True
        if self.muon_step is not None:
            self.muon_step.step()
        for child in self.chained_optimizers:
            if not child.is_stub_optimizer and not _is_muon(child):
                # The inner step alone: the wrapper's would install weights, see above.
                child.optimizer.step()
        self._is_changing = False
        for chunk in self._chunks:
            chunk.install_weights()
        for model_chunk in self.model_chunks if not self._is_of_fsdp2 else ():
            model_chunk.start_param_sync()
        if self.metrics_log is not None:
            self.metrics_log.write()
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradient buffers of the model, which hold all gradients."""
        for chunk in self._chunks:
            chunk.zero_gradients()

    @torch.no_grad()
    def reload_model_params(self, state_dict: object = None) -> None:
        """Update the compute weights from the main weights, which checkpoints hold.

        Megatron calls this after loading a checkpoint without its optimizer state.

        Args:
            state_dict: Ignored: the main weights were loaded in place.
        """
        self._offload.to_device()
        for chunk in self._chunks:
            chunk.update_compute_weights()
        self._offload.to_cpu()

    def state_dict(self, is_loading: bool = False) -> dict[str, Any]:
        """Return the state and group settings of all parameters by name, for any trainer.

        The tensors belong to the optimizers, and carry their row offsets, without which torch
        silently assumes even shards: ``torch.distributed.checkpoint`` saves them, and loads them in
        place on any number of ranks.

        Args:
            is_loading: Whether a trainer loads into the result; under FSDP2 it then is a copy.
                Megatron's also loads state that ``load_state_dict()`` is not given.

        Communication: see ``OptimizerState.pack()``, and ``chunk_offsets.place_together()``.
        """
        whole = self.sharded_state_dict()
        if not self._is_of_fsdp2:
            return uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(whole)
        return copy.deepcopy(whole) if is_loading else whole

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Fill the optimizers from ``state_dict()`` of a run on the same ranks.

        Learning rate, weight decay and step count are loaded from the group settings, and where the
        trainer takes the schedule of the checkpoint also ``max_lr`` and ``min_lr``. The rest, as
        the momentum coefficient, comes from this run, with a warning if it differs.

        Args:
            state_dict: State with DTensors sharded as here; not changed.

        Raises:
            RuntimeError: On all ranks, if state is missing on one of them or has another shape.
                Nothing was loaded.

        Communication: one all-reduce of a single int32 over all ranks of the job.
        """
        name = "use_checkpoint_opt_param_scheduler"
        self.stored_state.unpack(state_dict, loads_schedule=getattr(self.config, name, False))
        if self.muon_step is not None:
            self.muon_step.use_loaded()
        self._is_changing = False
        self.reload_model_params()

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return ``state_dict()`` without row offsets, which Megatron's trainer adds by itself.

        It is saved, or filled in place when loading. Unlike upstream, no step creates the state: it
        exists from construction.
        """
        return self.stored_state.pack()


def _is_muon(child: MegatronOptimizer) -> bool:
    return isinstance(child.optimizer, ShardedMatrices)
