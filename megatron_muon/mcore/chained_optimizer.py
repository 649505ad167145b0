# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One step over Muon and the scalar optimizer under Megatron-FSDP."""

import functools
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import SEPARATE_GRAD_NORM_GROUPS, ChainedOptimizer

from megatron_muon.mcore.arguments import takes_schedule_of_checkpoint
from megatron_muon.mcore.fsdp_dtensor import state as optimizer_state
from megatron_muon.mcore.fsdp_model import FSDPModel, check_model_chunks
from megatron_muon.mcore.gradient_check import missing_gradients, raise_where_gradients_fail
from megatron_muon.mcore.gradient_norm import (
    GradientNorm,
    clip,
    count_problems,
    norm_on_host,
    norm_stays_on_device,
)
from megatron_muon.mcore.muon import FSDPZeROTensorParallelMuon
from megatron_muon.mcore.qk_clip import clip_row_shards
from megatron_muon.runtime.dtensor_layout import local_tensor

logger = logging.getLogger(__name__)


class FSDPMuonChainedOptimizer(ChainedOptimizer):
    """Step several optimizers of one Megatron-FSDP model as one.

    A step: gradients are reduced and attached (``finish_grad_sync``, unless the training loop has
    done it), the norm and the clipping span all optimizers, every inner optimizer steps, QK-clip
    shrinks main weights where it is on, they are installed (``install_optimized_model_weights``),
    and the parameter gather starts.
    The last two happen once. ``DistributedOptimizer.step_with_ready_grads`` of each child would do
    them after its own step, and gather weights that the next child has not stepped yet.

    Optimizer state exists for every parameter on every rank from construction.

    Args:
        chained_optimizers: Wrapped Muon and scalar optimizers over the same model chunks.
        model_chunks: The Megatron-FSDP model.
        fqns: Name of each parameter, for errors.

    Raises:
        TypeError: A model chunk is not a Megatron-FSDP ``FullyShardedDataParallel``.

    Communication: each step one flag over all ranks, the norm and zero count over the optimizers'
        gradient-statistics groups, and what the inner optimizers and Megatron-FSDP exchange.
    """

    _problems: list[str]  # of this rank's gradients, in this step, as far as the host knows
    _gradient_norm: GradientNorm | None  # of this step; None until it has been taken

    def __init__(
        self,
        chained_optimizers: Sequence[DistributedOptimizer],
        model_chunks: Sequence[FSDPModel],
        fqns: Mapping[torch.Tensor, str],
    ) -> None:
        check_model_chunks(model_chunks)
        super().__init__(list(chained_optimizers))
        self.model_chunks = list(model_chunks)
        self._fqns = fqns
        self._problems, self._gradient_norm = [], None
        self._outer_reductions = [
            _OuterReductions(chunk)
            for chunk in self.model_chunks
            if chunk.module.dist_index.use_hybrid_fsdp
        ]
        # Named while the model still holds its DTensor parameters.
        self._state_names = {
            param: child._param_name(param)
            for child in self.chained_optimizers
            for param in child.get_parameters()
        }
        main_weights = {
            param: chunk.param_and_grad_buffer.dist_main_weight[name]
            for chunk in self.model_chunks
            for name, param in chunk.param_and_grad_buffer.optimizer_named_parameters
        }
        # Before anything can be saved: ranks that hold different sets of state hang the save.
        for child in self.chained_optimizers:
            optimizer_state.complete_state(child)
            optimizer_state.record_offsets(child, main_weights)
            if isinstance(child.optimizer, FSDPZeROTensorParallelMuon):
                child.optimizer.checks_gradients = False

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Reduce and attach gradients, and note what this rank knows to be wrong with them.

        Returns:
            Whether an overflow was found: always False, without loss scaling.
        """
        for chunk in self.model_chunks:
            # Megatron's loop has called it already; a loop of the user's own may not have.
            if not chunk.module.is_param_fsdp_distributed:
                chunk.finish_grad_sync()
        self._problems = []
        for child in self.chained_optimizers:
            if isinstance(child.optimizer, FSDPZeROTensorParallelMuon):
                self._problems += child.optimizer.parameter_changes()
        for reduction in self._outer_reductions:
            self._problems += reduction.problems()
        self._gradient_norm = None
        return super().prepare_grads()

    @torch.no_grad()
    def get_grad_norm(self) -> float | torch.Tensor:
        """Return the norm of all gradients, and find out whether all of them are finite.

        Raises:
            RuntimeError: As :meth:`step_with_ready_grads`, where the host reads the norm anyway.
        """
        counted = [child.get_grads_for_grad_norm() for child in self.chained_optimizers]
        ids = {id(grad) for grads in counted for grad in grads}
        others = [grad for grad in self._local_gradients() if id(grad) not in ids]
        num_problems = len(self._problems) + len(missing_gradients(self._fqns))
        device = self.model_chunks[0].module.device
        if norm_stays_on_device():
            norm = super().get_grad_norm()
            if isinstance(norm, torch.Tensor):
                # Clipping by NaN would make all gradients NaN, and hide which one was. By Inf it
                # makes those that are finite zero.
                norm = norm.nan_to_num(nan=math.inf, posinf=math.inf)
            norms = [torch.as_tensor(norm, device=device)]
            all_problems = count_problems(norms, others, num_problems, device)
            self._gradient_norm = GradientNorm(norm, all_problems)
            return norm
        if self.grads_states_parallel_group_is_shared():
            group = self.get_grad_stats_parallel_group()
            gradients = [(group, [grad for grads in counted for grad in grads])]
        else:
            groups = [child.get_grad_stats_parallel_group() for child in self.chained_optimizers]
            gradients = list(zip(groups, counted, strict=True))
        self._gradient_norm = norm_on_host(gradients, others, num_problems, device)
        self._raise_where_gradients_fail()
        return self._gradient_norm.norm

    def _local_gradients(self) -> list[torch.Tensor]:
        return [
            local_tensor(param.grad)
            for child in self.chained_optimizers
            for param in child.get_parameters()
            if param.grad is not None
        ]

    def _raise_where_gradients_fail(self) -> None:
        """Raise on all ranks where one has a problem; see :meth:`step_with_ready_grads`."""
        found = self._gradient_norm
        if found is not None and int(found.num_problems) == 0:
            return
        device = self.model_chunks[0].module.device
        raise_where_gradients_fail(self._fqns, self._problems, device)
        if found is not None:
            raise RuntimeError(
                f"gradient norm: expected a finite one, got {float(found.norm)}, though every "
                "gradient is finite: they are so large that their squares overflow. Lower the "
                "learning rate, or scale the loss down. Nothing was updated."
            )

    @torch.no_grad()
    def step(self) -> tuple[bool, float | torch.Tensor | None, int | None]:
        """Clip gradients and step; upstream's step where its kernels need no read by the host.

        Returns:
            Whether weights were updated, the gradient norm before clipping, and the number of zeros
            in gradients where ``log_num_zeros_in_grad`` is set.

        Raises:
            RuntimeError: As :meth:`step_with_ready_grads`.
        """
        clips = self.config.clip_grad > 0.0
        # Upstream clips such groups, those of multi-token prediction, by norms of their own.
        has_groups = clips and any(map(self.has_grad_norm_group, SEPARATE_GRAD_NORM_GROUPS))
        if norm_stays_on_device() or has_groups:
            return super().step()
        self.prepare_grads()
        norm = float(self.get_grad_norm())
        if clips:
            clip(self._local_gradients(), norm, self.config.clip_grad)
        num_zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None
        if norm > self.config.grad_norm_skip_threshold:
            logger.info("step skipped: gradient norm %s above its threshold", norm)
            return False, norm, num_zeros
        return self.step_with_ready_grads(), norm, num_zeros

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step every inner optimizer, then install the weights and start the parameter gather.

        Returns:
            True; an inner optimizer that fails raises before any weight is installed.

        Raises:
            RuntimeError: On all ranks, when a non-empty shard of one has no gradient or one that
                is not finite, when parameters have changed since construction, or when HSDP left
                gradients unreduced over the outer ranks. Nothing was updated.
        """
        self._raise_where_gradients_fail()
        with _timed(self.config, "optimizer-inner-step"):
            # The inner step alone: the wrapper's would install weights, see above.
            inner = [c.optimizer for c in self.chained_optimizers if not c.is_stub_optimizer]
            for optimizer in sorted(inner, key=_comes_later):
                optimizer.step()
                optimizer_state.count_step_of_empty_shards(optimizer)
        with _timed(self.config, "optimizer-copy-main-to-model-params"):
            for chunk in self.model_chunks:
                clip_row_shards(chunk.module)
                chunk.module.install_optimized_model_weights()
        with _timed(self.config, "params-all-gather"):
            for chunk in self.model_chunks:
                chunk.start_param_sync()
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradient buffers of the model, which hold the gradients of all optimizers."""
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()
        for reduction in self._outer_reductions:
            reduction.clear()

    @torch.no_grad()
    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Bring main weights in line with the model's weights, as after loading a model alone.

        A main weight that rounds to the model's weight stays: ``fsdp_dtensor`` checkpoints hold
        main weights, and Megatron calls this after loading one without its optimizer state.

        Args:
            state_dict: Unsupported; must be None.

        Raises:
            ValueError: A state dict was passed.
        """
        if state_dict is not None:
            raise ValueError(
                "reload_model_params: expected no state_dict, got one. Load main weights with the "
                "fsdp_dtensor checkpoint instead of --load-main-params-from-ckpt."
            )
        for chunk in self.model_chunks:
            for parameter_group in chunk.param_and_grad_buffer.parameter_groups:
                _copy_model_weights_to_main_weights(parameter_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state and group settings of all parameters by name.

        The tensors are the optimizers' own, and know their rows: ``torch.distributed.checkpoint``
        saves them on any ranks, and loads them in place on others.
        """
        return optimizer_state.pack(self.chained_optimizers, self._state_names)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Fill the optimizers from :meth:`state_dict` of a run on the same ranks.

        Of the group settings learning rate, weight decay and step count are taken; the rest, such
        as the momentum coefficient, is this run's, with a warning where the two differ. ``max_lr``
        and ``min_lr`` are taken with ``--use-checkpoint-opt_param-scheduler``.

        Args:
            state_dict: State with DTensors sharded as here; not changed.

        Raises:
            RuntimeError: On all ranks, when one of them misses state or has another shape. Nothing
                was loaded.

        Communication: one all-reduce of a single int32 over all ranks of the job.
        """
        device = self.model_chunks[0].module.device
        optimizer_state.raise_where_state_does_not_fit(
            self.chained_optimizers, self._state_names, state_dict, device
        )
        optimizer_state.unpack(
            self.chained_optimizers,
            self._state_names,
            state_dict,
            with_schedule=takes_schedule_of_checkpoint(),
        )

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any] | None = None,
        is_loading: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return :meth:`state_dict`, for saving and, to be filled in place, for loading.

        Nothing is stepped to create state, as upstream does: it exists from construction.

        Args:
            model_sharded_state_dict: Unused.
            is_loading: Unused.
            **kwargs: ``metadata``, of which ``distrib_optim_sharding_type`` is checked.

        Raises:
            ValueError: Another sharding type than ``fsdp_dtensor``.
        """
        metadata = kwargs.get("metadata") or {}
        sharding_type = metadata.get("distrib_optim_sharding_type", "fsdp_dtensor")
        if sharding_type != "fsdp_dtensor":
            raise ValueError(
                f"distrib_optim_sharding_type: expected fsdp_dtensor, got {sharding_type}. Use "
                "--ckpt-format fsdp_dtensor."
            )
        return self.state_dict()


def _comes_later(optimizer: Any) -> bool:
    """Return whether an optimizer is stepped after Muon's of the experts.

    The dense matrices' Muon completes the step of that one. Of others the order does not matter.
    """
    return not (isinstance(optimizer, FSDPZeROTensorParallelMuon) and optimizer.is_stepped_first)


@contextmanager
def _timed(config: Any, name: str) -> Iterator[None]:
    """Run a block under one of Megatron's timers, where the configuration has them."""
    if config.timers is None:
        yield
        return
    timer = config.timers(name, log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    yield
    timer.stop()


class _OuterReductions:
    """Watch that HSDP reduces each gradient bucket over the outer ranks once a step.

    Megatron-FSDP does it only in the backward pass of a microbatch marked as the last, which
    ``config.no_sync_func`` marks. Unmarked, replicas drift; marked twice, gradients are summed
    twice. Nothing upstream notices either.
    """

    def __init__(self, chunk: FSDPModel) -> None:
        self._buffers = chunk.param_and_grad_buffer
        self._counts: Counter[int] = Counter()
        pipeline = chunk.module.grad_reduce_pipeline
        reduce_buckets = pipeline._bucket_group_gradient_reduce

        @functools.wraps(reduce_buckets)
        def counted(bucket_group: list[int], *args: Any, **kwargs: Any) -> Any:
            """Count the buckets that are reduced over the outer ranks, and reduce them."""
            if kwargs.get("outer_fsdp_group_grad_reduce"):
                self._counts.update(bucket_group)
            return reduce_buckets(bucket_group, *args, **kwargs)

        pipeline._bucket_group_gradient_reduce = counted

    def clear(self) -> None:
        """Start to count anew, as Megatron does when it runs the microbatches of a step again."""
        self._counts.clear()

    def problems(self) -> list[str]:
        """List what went wrong since the gradients were zeroed, and start to count anew."""
        counts = {
            self._counts[index]
            for index, group in enumerate(self._buffers.parameter_groups)
            if group.main_grad_buffer is not None
        }
        self.clear()
        # No count at all is a model without trainable gradients here.
        if counts <= {1}:
            return []
        return [
            "HSDP: expected each gradient bucket reduced once over the outer ranks, got "
            f"{sorted(counts)} times. Set ddp_config.overlap_grad_reduce, and run all microbatches "
            "but the last under the model's no_sync() (config.no_sync_func)"
        ]


def _copy_model_weights_to_main_weights(parameter_group: Any) -> None:
    """Copy one Megatron-FSDP parameter group's model weights into its fp32 main weights."""
    main, model = parameter_group.main_weight_buffer, parameter_group.model_weight_buffer
    if main is None:
        return
    if parameter_group.dtype == "float8":
        raise ValueError(
            "reload_model_params: expected bf16 or fp32 model weights, got float8. Load main "
            "weights with the fsdp_dtensor checkpoint; float8 weights have lost their bits."
        )
    for param in parameter_group.params:
        item_id = main.param_idx[param]
        if model is not None and (model.is_data_distributed or main.is_data_distributed):
            source = model.get_item(item_id, only_shard=True)
        elif model is not None:
            source = model.get_item(item_id)
        else:
            source = param.detach().flatten()
        target = main.get_item(item_id, only_shard=main.is_data_distributed)
        if target.numel() > 0:
            source = source.view(target.shape)
            # Where rounding gives the model's weight, the main weight has bits that it lost.
            differs = target.to(source.dtype) != source
            target.copy_(torch.where(differs, source.to(target.dtype), target))
