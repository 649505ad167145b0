# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint; all ranks refuse it together.

A load::

    find_before_loading       wraps _load_base_checkpoint, which a load calls twice
        1. locate             the same checkpoint on all ranks; its files have their lengths
        2. locate, adapt      random states, and group settings that the checkpoint lacks
    rename_and_compare    names and shapes of tensors, in the second call
    upstream                  torch.distributed.checkpoint loads into the tensors of the run
    load_state_dict           of the optimizer adopts group settings, and installs main weights
"""

import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer.fsdp_dtensor_checkpoint import flatten_state_dict
from megatron.core.utils import get_model_config, log_single_rank

from megatron_muon.mcore.checkpoint_folders import (
    METADATA,
    TRACKER,
    CheckpointError,
    find_checkpoint,
    finished_iterations,
)
from megatron_muon.mcore.checkpoint_reading import StoredCheckpoint, find_misfits, read_checkpoint
from megatron_muon.mcore.checkpoint_state import (
    LOADS_SCHEDULE,
    describe_differences,
    rename_layers,
)
from megatron_muon.mcore.fsdp_model import current_device, is_v2
from megatron_muon.runtime.agreement import raise_where_any_rank_fails, raise_where_ranks_differ

logger = logging.getLogger(__name__)

_NOTHING_LOADED = "Nothing was loaded."
_MEAN_OF_TWO = (
    "loaded %s; Megatron prints the mean loss of the first two iterations in the second one, which "
    "therefore differs from that of an uninterrupted run; weights and state do not"
)
# Entry of a state dict on load, like upstream's ``_model``, with a Comparison; absent on save.
_COMPARISON = "_megatron_muon_comparison"
# Names of experts contain their global index.
_EXPERT = re.compile(r"(experts\.(?:local_experts\.|linear_fc\d\.(?:weight|bias)))(\d+)")
# Names of states that differ by tensor-parallel rank (muon.py, TensorParallelMoments).
_TENSOR_RANK = re.compile(r"(_tensor_rank_)\d+(_of_\d+)$")
_GENERATOR = re.compile(r"rng_state\.(\([^)]*\))")


class Comparison(NamedTuple):
    """Comparison of a checkpoint with the run that loads it.

    Args:
        checkpoint: The checkpoint.
        strict_parts: Parts of the state dict (``model``, ``optimizer``) whose differences are
            errors; elsewhere they are warnings.
        advice: Returns the end of the error.
    """

    checkpoint: StoredCheckpoint
    strict_parts: tuple[str, ...]
    advice: Callable[[], str]


def find_before_loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_load_base_checkpoint`` to refuse anything but a finished checkpoint of this format.

    Upstream exits with status 0 if the tracker cannot be read, and trains from random weights if it
    is missing beside finished checkpoints. Without any checkpoint it still does: that is how a
    first run with ``--load`` and ``--save`` on one folder begins.

    Communication: all-reduces of an int32 and an all-gather of an int64 over all ranks. Every rank
        reads ``.metadata`` once; the bytes of tensors are read by upstream's load alone.
    """

    def _load_base_checkpoint(
        load_dir: str | None,
        args: Any,
        rank0: bool = False,
        sharded_state_dict: dict[str, Any] | None = None,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        """Find a checkpoint, and load it or, with ``rank0``, the arguments of its run."""
        load = functools.partial(
            original, load_dir, args, rank0, sharded_state_dict, *rest, **kwargs
        )
        # Upstream checks the formats of other strategies.
        if not getattr(args, "use_megatron_fsdp", False) or load_dir is None:
            return load()
        folder, step = Path(load_dir), getattr(args, "ckpt_step", None)
        # load_checkpoint calls this first with rank0, for the arguments of the saved run.
        checkpoint = find_together(lambda: _locate(folder, step), checks_files=rank0)
        if rank0 or checkpoint is None:
            return load()
        read_once.cache_clear()
        # Upstream can load a GPT's layers into a hybrid model, and translates the names later.
        if sharded_state_dict is None or kwargs.get("gpt_compat_layer_maps") is not None:
            return load()
        comparison = Comparison(
            checkpoint,
            ("model", "optimizer") if args.strict_fsdp_dtensor_load else (),
            functools.partial(_advice, checkpoint, args),
        )
        loads_schedule = getattr(args, "use_checkpoint_opt_param_scheduler", False)
        result = load_compared(load, sharded_state_dict, comparison, loads_schedule=loads_schedule)
        if args.log_interval == 1:
            log_single_rank(logger, logging.INFO, _MEAN_OF_TWO, checkpoint.folder)
        return result

    return _load_base_checkpoint


def find_together(
    find: Callable[[], StoredCheckpoint | None], *, checks_files: bool
) -> StoredCheckpoint | None:
    """Find the checkpoint of a load, the same on all ranks.

    Args:
        find: Reads the table of contents, or returns None if there is no checkpoint.
        checks_files: Whether to compare the files with the table, one share per rank.
    """
    checkpoint, problems = _attempt(find)
    _raise_together(problems, _NOTHING_LOADED)
    if not dist.is_initialized():
        return checkpoint
    raise_where_ranks_differ(
        # Two saves of one iteration differ in their ids, also two of upstream's.
        [f"{checkpoint.folder.name}, {checkpoint.save_id}" if checkpoint else "none"],
        dist.group.WORLD,  # type: ignore[arg-type]
        current_device(),
        "checkpoint to load",
        "Save to and load from a file system that all nodes mount. " + _NOTHING_LOADED,
    )
    if checks_files and checkpoint is not None:
        _raise_where_damaged(checkpoint)
    return checkpoint


def load_compared(
    load: Callable[[], Any],
    state_dict: dict[str, Any],
    comparison: Comparison,
    *,
    loads_schedule: bool,
) -> Any:
    """Let a trainer load a checkpoint after ``rename_and_compare()`` has compared it.

    Args:
        load: Loads into the state dict; its result begins with the loaded one.
        state_dict: State dict of the run.
        comparison: What to compare.
        loads_schedule: Whether the schedule comes from the checkpoint.
    """
    set_aside = _adapt(state_dict, comparison)
    result = load()
    for settings, flags in set_aside:
        settings.update(flags)
    if "optimizer" in result[0]:
        result[0]["optimizer"][LOADS_SCHEDULE] = loads_schedule
    return result


def _attempt[T](call: Callable[[], T]) -> tuple[T | None, list[str]]:
    """Call a function; return its error as a problem, for all ranks to raise together."""
    try:
        return call(), []
    except CheckpointError as error:
        return None, str(error).splitlines()
    except Exception as error:  # the other ranks would wait for this one
        return None, [f"{type(error).__name__}: {error}"]


def _locate(folder: Path, iteration: int | None) -> StoredCheckpoint | None:
    """Read the checkpoint of a load; None if upstream starts from random weights."""
    tracker = folder / TRACKER
    if (folder / METADATA).is_file():
        raise CheckpointError(
            f"{folder}: expected a --save folder, got that of one checkpoint. Pass the folder that "
            "holds it, and --ckpt-step for its iteration."
        )
    # As upstream, iteration 0 stands for none.
    if not iteration and not tracker.is_file() and not finished_iterations(folder):
        return None
    if iteration and tracker.is_file() and tracker.read_text().strip() == "release":
        raise CheckpointError(
            f"{tracker}: expected an iteration beside --ckpt-step {iteration}, got 'release', "
            "which Megatron loads instead. Drop --ckpt-step, or write the iteration into it."
        )
    path = find_checkpoint(folder, iteration or None)
    return read_once(path, (path / METADATA).stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def read_once(folder: Path, changed: int) -> StoredCheckpoint:
    """Read a table of contents once for the two calls of a load.

    Args:
        folder: Folder of the checkpoint.
        changed: Time of its last change, so that a new save is read anew.
    """
    return read_checkpoint(folder)


def _adapt(
    state_dict: dict[str, Any], comparison: Comparison
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Adapt a state dict to the entries of a checkpoint.

    Args:
        state_dict: Gets the comparison, for ``rename_and_compare()``, and a stored random
            state: there is one per stage and tensor-parallel rank, and a missing one is replaced by
            another.
        comparison: The checkpoint, and how it is compared.

    Returns:
        Dictionaries of group settings with the settings that are removed, as the checkpoint lacks
        them: they come from flags. The step count stays, so that DCP refuses a checkpoint without.
    """
    checkpoint = comparison.checkpoint
    state_dict[_COMPARISON] = comparison
    generators = {match[1] for key in checkpoint.objects if (match := _GENERATOR.match(key))}
    random = state_dict.get("rng_state")
    if generators and isinstance(random, Mapping) and not random.keys() <= generators:
        state_dict["rng_state"] = dict(zip(sorted(generators), random.values(), strict=False))
    if "optimizer" not in state_dict:
        log_single_rank(
            logger,
            logging.WARNING,
            "%s: loading weights without optimizer state (--no-load-optim or --finetune); "
            "momentum starts at zero",
            checkpoint.folder,
        )
        return []
    stored = checkpoint.metadata.state_dict_metadata
    # Equal on all ranks.
    has_states = any(key.startswith("optimizer.state.") for key in stored)
    if "optimizer" in comparison.strict_parts and not has_states:
        raise CheckpointError(
            f"{checkpoint.folder}: expected optimizer state, got none, as --no-save-optim leaves "
            "it out. Pass --no-load-optim, which loads the weights and starts momentum at zero. "
            + _NOTHING_LOADED
        )
    set_aside = []
    for name, settings in state_dict["optimizer"]["param_to_group_meta"].items():
        prefix = f"optimizer.param_to_group_meta.{name}."
        lacking = [key for key in settings if key != "step" and prefix + key not in stored]
        set_aside.append((settings, {key: settings.pop(key) for key in lacking}))
    return set_aside


def rename_and_compare(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``preprocess_fsdp_dtensor_state_dict``: its result is loaded or saved next.

    Communication: for a load one all-reduce of an int32 over all ranks, and with pipeline stages an
        all-gather of names as objects over the pipeline.
    """

    def preprocess_fsdp_dtensor_state_dict(
        args: Any, raw_state_dict: dict[str, Any], model: Any
    ) -> dict[str, Any]:
        """Rename the state to the keys of the checkpoint, and compare it with the checkpoint."""
        comparison = raw_state_dict.pop(_COMPARISON, None)
        weights = raw_state_dict["model"]
        if is_v2(model):
            # As in checkpoints of v1, with a wrapper of two modules.
            weights = {f"module.{key}": value for key, value in weights.items()}
        weights = rename_layers(model, weights)
        state_dict = original(args, {**raw_state_dict, "model": weights}, model)
        if comparison is None:
            return state_dict
        config = get_model_config(model)
        shapes, stages = _expected_shapes(state_dict), list[set[str]]()
        if config.pipeline_model_parallel_size > 1:
            # Other pipeline stages load other names.
            group = mpu.get_pipeline_model_parallel_group()
            stages = [set()] * group.size()
            dist.all_gather_object(stages, {*shapes}, group=group)
        problems = find_differences(
            comparison.checkpoint, shapes, config.num_moe_experts, set().union(*stages)
        )
        is_strict = [text.startswith(comparison.strict_parts) for text in problems]
        # Collective on all ranks or on none: the parts are the same everywhere.
        if comparison.strict_parts:
            _raise_together(list(itertools.compress(problems, is_strict)), comparison.advice())
        if problems:
            logger.warning("Not loaded, and as they were before: %s", "; ".join(problems))
        return state_dict

    return preprocess_fsdp_dtensor_state_dict


def find_differences(
    checkpoint: StoredCheckpoint,
    shapes: Mapping[str, tuple[int, ...]],
    num_experts: int | None,
    other_stages: Iterable[str] = (),
) -> list[str]:
    """Compare the tensors of the model and of the optimizer's state by name and shape.

    Args:
        checkpoint: The stored tensors.
        shapes: Shapes of the expected tensors by their names in checkpoints.
        num_experts: Global number of experts of the model.
        other_stages: Names of tensors that other pipeline stages expect.

    Returns:
        One sentence per module or parameter with missing weights or states, other shapes, or
        unexpected tensors that a load would drop.
    """
    # A rank expects only its experts; names of the others differ in the index.
    names = {*shapes, *other_stages}
    patterns = {_pattern(key, num_experts) for key in names}
    parts = {key.partition(".")[0] for key in names}
    stored = {
        key: tuple(tensor.size)
        for key, tensor in checkpoint.tensors.items()
        if key in shapes
        or (key.partition(".")[0] in parts and _pattern(key, num_experts) not in patterns)
    }
    # DCP silently ignores both: missing tensors keep their random or zero values.
    return describe_differences(shapes, stored)


def _expected_shapes(state_dict: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the expected tensors by their names in checkpoints."""
    return {
        key: tuple(value.shape)
        for part in ("model", "optimizer")
        for key, value in flatten_state_dict({part: state_dict.get(part, {})}).items()
        if isinstance(value, torch.Tensor)
    }


def _pattern(key: str, num_experts: int | None) -> str:
    """Return a name without the indices of the model's experts, which differ between ranks."""
    key, expert = _TENSOR_RANK.sub(r"\1*\2", key), _EXPERT.search(key)
    is_of_model = expert is not None and int(expert[2]) < (num_experts or 0)
    return _EXPERT.sub(r"\1*", key) if is_of_model else key


def _advice(checkpoint: StoredCheckpoint, args: Any) -> str:
    # Best effort: this text accompanies an error, and must not raise another one.
    saved, _ = _attempt(checkpoint.read_args)
    stages_then, stages_now = (
        getattr(run, "pipeline_model_parallel_size", 1) for run in (saved, args)
    )
    is_tied = not getattr(args, "untie_embeddings_and_output_weights", True)
    if is_tied and stages_then != stages_now:
        return (
            f"{checkpoint.folder} was saved with --pipeline-model-parallel-size {stages_then}, "
            f"this run has {stages_now}: tied embeddings need the same. {_NOTHING_LOADED}"
        )
    return (
        f"{checkpoint.folder} was saved with --optimizer {getattr(saved, 'optimizer', 'unknown')}, "
        f"this run has --optimizer {args.optimizer}. Load it with the model and optimizer that "
        "saved it; if only the optimizer differs, --no-load-optim or --finetune loads the "
        f"weights and starts momentum at zero. {_NOTHING_LOADED}"
    )


def _raise_where_damaged(checkpoint: StoredCheckpoint) -> None:
    """Compare the files of a checkpoint with its table of contents, one share per rank."""
    # All files on every rank would overload the file system of a large job.
    misfits, problems = _attempt(
        lambda: find_misfits(checkpoint, dist.get_rank(), dist.get_world_size())
    )
    problems += misfits or []
    _raise_together(
        problems,
        "The checkpoint is damaged; load an earlier one with --ckpt-step, or restore the files. "
        + _NOTHING_LOADED,
    )


def _raise_together(problems: list[str], advice: str) -> None:
    """Raise on all ranks if one has a problem; on this rank if there is no process group yet."""
    if dist.is_initialized():
        raise_where_any_rank_fails(problems, None, current_device(), advice)
    elif problems:
        raise CheckpointError(*problems, advice)


def find_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_load_checkpoint_path_by_args``: --pretrained-checkpoint works without --load."""

    def get_load_checkpoint_path_by_args(args: Any, load_arg: str = "load") -> str:
        if getattr(args, load_arg) is None and args.pretrained_checkpoint is not None:
            load_arg = "pretrained_checkpoint"
        return original(args, load_arg)

    return get_load_checkpoint_path_by_args
