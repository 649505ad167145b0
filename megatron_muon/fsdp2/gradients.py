# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Agreement of ranks before a step: on gradients, fresh state and values of parameter groups."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_muon.fsdp2.parameters import ranks_with
from megatron_muon.rows.megatron_fsdp import is_of_fsdp_v2, names_that_block_gradients
from megatron_muon.rows.parameters import PlannedParameter, ranks_of_mesh
from megatron_muon.runtime.agreement import (
    gather_objects,
    own_rank,
    raise_where_any_rank_fails,
    signed_checksum,
)
from megatron_muon.runtime.tensors import NotFinite, find_not_finite, local_tensor, sharding_of
from megatron_muon.step.plan_inputs import PlanInputs

_ADVICE = "Nothing was updated."
_DIVERGED = (
    "This was found a step later: rows of a parameter are of different steps since then. Load a "
    "checkpoint of before, weights and optimizer."
)
# When gradients that are not finite are refused; see ``Agreement``.
CHECKS = ("sync", "next_step", "off")


class GradientKey(NamedTuple):
    """Identifies a parameter on the ranks that hold it.

    Args:
        name: Its name. Pipeline stages may share names.
        ranks: Its holders. Ranks of other domains hold other matrices of a batch, maybe without
            gradients.
        is_of_muon: Whether Muon steps it. Parameters without names are numbered by optimizer.
    """

    name: str
    ranks: tuple[int, ...]
    is_of_muon: bool


def by_holders(
    plan_inputs: PlanInputs,
    others: Sequence[PlannedParameter],
    copies: dist.ProcessGroup | None,
) -> dict[GradientKey, PlannedParameter]:
    """Return this rank's parameters.

    Args:
        plan_inputs: Plans of Muon's parameters.
        others: Parameters that AdamW or Lion steps.
        copies: Ranks with copies of plain tensors; None for this one alone.
    """
    holders = {
        GradientKey(parameter.name, plan.domain.ranks, True): parameter
        for plan, parameters in zip(plan_inputs.inputs, plan_inputs.parameters, strict=True)
        for parameter in parameters
    }
    for parameter in others:
        mesh = getattr(parameter.param, "device_mesh", None)
        ranks = ranks_with(copies) if mesh is None else ranks_of_mesh(mesh)
        holders[GradientKey(parameter.name, ranks, False)] = parameter
    return holders


class _Flags(NamedTuple):
    """Counts that ranks have reduced in a step, and this rank's contribution.

    Args:
        counts: Number of problems; number of parameters without a gradient or with fresh state,
            plus a checksum that is 0 if ranks have the same values in groups.
        copied: Event after the copy of ``counts`` to CPU memory; None without a copy.
        explain: Returns a sentence for each gradient that is not finite.
        missing: Parameters without a gradient.
        fresh: Parameters whose state was fresh.
        values: Values of the groups of parameters, by their holders.
    """

    counts: torch.Tensor
    copied: Any
    explain: Callable[[], list[str]]
    missing: Sequence[GradientKey]
    fresh: Sequence[GradientKey]
    values: Mapping[tuple[int, ...], list[str]]

    def read(self) -> list[int]:
        """Return the counts; the host waits for them."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.counts.tolist()


class Agreement:
    """Agreement of ranks to step, by their gradients and the values of parameter groups.

    Args:
        holders: Parameters of this rank, of ``by_holders()``.
        group: Ranks that step together; None for all of the job.
        device: Where flags are reduced.
        mode: One of ``CHECKS``: the host reads the flags of a step before anything changes
            (``sync``), or in the next step (``next_step``), or there are none (``off``) after the
            first step, which compares presence and values.

    Communication: a step has one all-reduce of two int64 over the group; with ``off`` the first
        one. Where a gradient is missing, state is fresh or values differ: a gather of names over
        the group, and a flag.
    """

    _num_steps: int = 0
    # Flags of the last step, with next_step alone.
    _last: _Flags | None = None

    def __init__(
        self,
        holders: Mapping[GradientKey, PlannedParameter],
        group: dist.ProcessGroup | None,
        device: torch.device,
        mode: str,
    ) -> None:
        self.holders, self._group, self._device, self._mode = holders, group, device, mode
        # Ranks may have the parameters in groups of another order.
        self._params: dict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
        for key in sorted(holders):
            self._params[key.ranks].append(holders[key].param)

    def forget(self) -> None:
        """Forget the last step: weights and state of another one have been loaded."""
        self._last = None

    def refuse_last(self) -> None:
        """Raise on all ranks that call it if gradients of the last step were not finite.

        Raises:
            RuntimeError: Naming the step, and gradients of this rank.
        """
        if self._last is not None and (num_problems := self._last.read()[0]):
            names = self._last.explain() or ["those of other ranks"]
            raise RuntimeError(
                f"step {self._num_steps} of this optimizer: expected finite gradients, got "
                f"{num_problems} on all ranks that are not. Weights and state hold NaN or Inf "
                "since then. Load a checkpoint of before, weights and optimizer. "
                'check_gradients="sync" refuses such steps.\n  ' + "\n  ".join(names)
            )

    def check(
        self,
        known_problems: Sequence[str],
        fresh_params: Collection[torch.Tensor],
        values: Mapping[torch.Tensor, str],
    ) -> set[torch.Tensor]:
        """Agree on all ranks to step, and return the parameters without a gradient.

        With ``sync`` also parameters of which this rank has no elements: it may own a matrix.

        Args:
            known_problems: Other problems of this rank, as sentences.
            fresh_params: Parameters whose state is fresh in this step on this rank.
            values: Values of the group of a parameter that the step reads, as text.

        Raises:
            RuntimeError: On all ranks of the group, when one has a known problem; naming rank and
                parameter, when a gradient is not finite, has another dtype (but bfloat16),
                placement or shape than its parameter, or is missing, or its state is fresh, on some
                holders of the parameter alone, or they have different values. With ``next_step``
                and ``off`` a rank raises alone for problems that its host sees in this step. With
                ``next_step`` all ranks raise for the other problems of the step before.
        """
        self.refuse_last()
        if self._last is not None and self._last.read()[1]:
            self._refuse_one_sided(self._last)
        problems = [*known_problems, *_blocked_problems(self.holders.values())]
        missing, grads = [], []
        # With few calls: the host runs it for every parameter in every step.
        for key, parameter in self.holders.items():
            grad, shard = parameter.param.grad, local_tensor(parameter.param)
            if grad is None:
                if shard.numel():
                    missing.append(key)
            # Gradients with a problem are left out: a sparse one has no norm of this kind.
            elif problem := _problem(parameter.param, grad, is_of_muon=key.is_of_muon):
                problems.append(f"{parameter.name}: {problem}")
            elif shard.numel():
                grads.append((parameter.name, local_tensor(grad)))
        if problems and self._mode != "sync":
            raise RuntimeError("\n".join([*problems, _ADVICE]))
        without = set(missing)
        if self._mode != "off" or self._num_steps == 0:
            fresh = [k for k, held in self.holders.items() if held.param in fresh_params]
            not_finite = find_not_finite(grads if self._mode != "off" else [], self._device)
            runs = {
                # Once for parameters of one group.
                ranks: [text for text, _ in itertools.groupby(values[param] for param in params)]
                for ranks, params in self._params.items()
            }
            without |= self._agree(problems, missing, fresh, not_finite, runs)
        self._num_steps += 1
        return {self.holders[key].param for key in without & self.holders.keys()}

    def _agree(
        self,
        problems: list[str],
        missing: Sequence[GradientKey],
        fresh: Sequence[GradientKey],
        not_finite: NotFinite,
        values: Mapping[tuple[int, ...], list[str]],
    ) -> set[GradientKey]:
        """Reduce the flags of a step, and read them now or later; see ``check()``.

        Returns:
            Parameters without a gradient on other ranks, if they are read now.
        """
        # One tensor for all: an all-reduce costs its latency, and the host waits once. Filled on
        # the device: for a copy of the counts the host would wait for all of the backward pass.
        unusual = len(missing) + len(fresh)
        unusual += sum(signed_checksum(runs, ranks) for ranks, runs in values.items())
        counts = torch.full((2,), unusual, dtype=torch.int64, device=self._device)
        counts[0].copy_(not_finite.number.add_(len(problems)))
        if dist.is_initialized():
            dist.all_reduce(counts, group=self._group)
        copied = None
        if self._mode == "next_step" and self._device.type != "cpu":
            # Into pinned memory, which torch allocates for such copies.
            counts = counts.to("cpu", non_blocking=True)
            copied = torch.get_device_module(self._device.type).Event()
            copied.record()
        flags = _Flags(counts, copied, not_finite.explain, missing, fresh, values)
        if self._mode == "next_step":
            self._last = flags
            return set()
        num_problems, num_unusual = flags.read()
        # Only now, once a rank has a problem: the usual step pays for 16 bytes.
        if num_problems:
            problems += not_finite.explain()
            raise_where_any_rank_fails(problems, self._group, self._device, _ADVICE)
        # All ranks come here together, also without missing gradients: they have the same sum.
        return self._refuse_one_sided(flags) if num_unusual else set()

    def _refuse_one_sided(self, flags: _Flags) -> set[GradientKey]:
        """Raise where holders of a parameter differ in gradients, fresh state or values.

        Returns:
            Parameters without a gradient.
        """
        problems, without = [], set[GradientKey]()
        held = {key for key, own in self.holders.items() if local_tensor(own.param).numel()}
        mine = own_rank(), flags.missing, flags.fresh, flags.values
        for rank, missing, fresh, values in gather_objects(mine, self._group):
            without.update(missing)
            problems += [
                f"{key.name}: expected a gradient on all ranks that hold the parameter or on none, "
                f"got none on rank {rank}. Let all ranks use the parameter in the loss"
                for key in held.intersection(missing).difference(flags.missing)
            ]
            problems += [
                f"{key.name}: expected to reset state on all ranks that hold the parameter or on "
                f"none, got no state on rank {rank}. Reset it on all ranks, or load a state"
                for key in self.holders.keys() & set(fresh) - set(flags.fresh)
                # Empty shards of AdamW may have no state.
                if key.is_of_muon or key in held
            ]
            problems += [
                f"param_groups: expected {own} on all ranks of the parameters, got {other} on rank "
                f"{rank}. Set the same values on all ranks"
                for ranks, runs in flags.values.items()
                for own, other in zip(runs, values.get(ranks, runs), strict=False)
                if own != other
            ]
        advice = _ADVICE if self._mode == "sync" else _DIVERGED
        problems = [*dict.fromkeys(problems)]
        raise_where_any_rank_fails(problems, self._group, self._device, advice)
        return without


def refuse_grad_scaler(optimizer: Any) -> None:  # noqa: ANN401 - with attributes of GradScaler's
    """Raise if a ``GradScaler`` calls the step: it could skip the step of one rank alone.

    It sets two attributes, even if it has unscaled gradients. All ranks have one or none.

    Raises:
        RuntimeError: With advice.
    """
    if hasattr(optimizer, "found_inf"):
        del optimizer.found_inf, optimizer.grad_scale
        raise RuntimeError(
            "step: expected gradients that are not scaled, got a GradScaler. Compute in bfloat16, "
            "which needs none."
        )


def _problem(param: torch.Tensor, grad: torch.Tensor, *, is_of_muon: bool) -> str | None:
    """Return the problem of a gradient, or None."""
    shard, other = local_tensor(param), local_tensor(grad)
    # FSDP2 may leave them in another dtype (reduce_dtype, from torch 2.15 on grad_dtype).
    dtypes = (torch.float32, torch.bfloat16) if is_of_muon else (shard.dtype,)
    # FSDP2 makes empty shards of several shapes.
    has_shape = shard.shape == other.shape or shard.numel() == other.numel() == 0
    if shard.layout != other.layout:
        advice = "Leave sparse=True out of nn.Embedding; SparseAdam alone steps such gradients"
    elif other.dtype not in dtypes:
        advice = "Reduce it in such a dtype; leave precision_aware out of fully_shard_optimizer()"
    # torch's AdamW reduces a partial gradient of a DTensor. A plain tensor has no placements.
    elif is_of_muon and getattr(param, "placements", None) != getattr(grad, "placements", None):
        advice = "Reduce a partial one: grad.redistribute(placements=param.placements)"
    elif is_of_muon and not (has_shape and shard.device == other.device):
        advice = "Leave it as the backward pass of the sharded model writes it"
    else:
        return None
    own, got = (sharding_of(each, "dtype", "layout", "device") for each in (param, grad))
    return f"expected a gradient like the parameter, {own}, got {got}. {advice}"


def _blocked_problems(parameters: Iterable[PlannedParameter]) -> list[str]:
    """Describe missing gradients of version 2 of Megatron-FSDP, a sentence a module."""
    problems: dict[int, str] = {}
    for parameter in parameters:
        if parameter.param.grad is None and is_of_fsdp_v2(parameter.param):
            module, names = names_that_block_gradients(parameter.param)  # type: ignore[arg-type]
            if names:
                problems[id(module)] = (
                    f"{parameter.name}: expected gradients of all parameters of its module, got "
                    f"none of {names}, for which Megatron-FSDP reduces none. Use them in "
                    "the loss, or set requires_grad to False before fully_shard()"
                )
    return list(problems.values())
