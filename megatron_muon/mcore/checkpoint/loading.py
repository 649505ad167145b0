# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is compared with the run, byte by byte, before anything is loaded from it."""

import functools
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.fsdp_dtensor_checkpoint import flatten_state_dict
from megatron.core.utils import log_single_rank

from megatron_muon.checkpoint.folders import (
    METADATA,
    TRACKER,
    CheckpointError,
    find_checkpoint,
    finished_iterations,
)
from megatron_muon.checkpoint.storage import StoredCheckpoint, read_checkpoint
from megatron_muon.checkpoint.verify import find_problems
from megatron_muon.mcore.checkpoint.steps import as_in_run, as_stored
from megatron_muon.mcore.fsdp_model import current_device
from megatron_muon.runtime.agreement import raise_where_any_rank_fails, raise_where_ranks_differ

logger = logging.getLogger(__name__)

_NOTHING_LOADED = "Nothing was loaded."
# Names of experts hold their number among all ranks.
_EXPERT = re.compile(r"(experts\.(?:local_experts\.|linear_fc\d\.(?:weight|bias)))(\d+)")
# Of moments of blocks that each tensor-parallel rank has for itself (FSDPBlockMuon).
_TENSOR_RANK = re.compile(r"(_tensor_rank_)\d+(_of_\d+)$")
_STATE = re.compile(r"^(optimizer\.state\..+)\.([^.]+)$")


@dataclass
class _Load:
    """What ``_load_base_checkpoint`` loads, while it runs.

    Args:
        checkpoint: What is stored.
        optimizer: What is loaded of the optimizer's state dict; None for nothing.
    """

    checkpoint: StoredCheckpoint
    optimizer: dict[str, Any] | None = None


# Upstream calls the second wrapper from within the first, and passes nothing through.
_being_loaded: _Load | None = None


def open_before_loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_load_base_checkpoint`` to refuse what is no finished checkpoint of this format.

    Upstream ends the process with status 0 where the tracker cannot be read, and trains from random
    weights where it is missing beside finished checkpoints. It still does so where there are none:
    that is how a first run with ``--load`` and ``--save`` on one folder begins.

    Communication: all-reduces of an int32 and an all-gather of an int64 over all ranks; each rank
    reads its share of the checkpoint once.
    """

    @functools.wraps(original)
    def _load_base_checkpoint(
        load_dir: str | None, args: Any, rank0: bool = False, *rest: Any, **kwargs: Any
    ) -> Any:
        global _being_loaded
        # Other strategies have formats of their own, and upstream looks after them.
        if not getattr(args, "use_megatron_fsdp", False) or load_dir is None:
            return original(load_dir, args, rank0, *rest, **kwargs)
        checkpoint, problems = _attempt(
            lambda: _open(Path(load_dir), getattr(args, "ckpt_step", None))
        )
        _raise_together(problems, _NOTHING_LOADED)
        if dist.is_initialized():
            raise_where_ranks_differ(
                [_identity(checkpoint)],
                dist.group.WORLD,  # type: ignore[arg-type]
                current_device(),
                "checkpoint to load",
                "Save to and load from a file system that all nodes mount. " + _NOTHING_LOADED,
            )
        # A first run with --load and --save on one folder finds nothing there.
        if checkpoint is None:
            return original(load_dir, args, rank0, *rest, **kwargs)
        # load_checkpoint calls this twice: first for the arguments of the run that saved.
        if rank0 and dist.is_initialized() and not getattr(args, "muon_fsdp_no_checksums", False):
            _raise_where_damaged(checkpoint)
        if kwargs.get("gpt_compat_layer_maps") is not None:
            # Upstream loads a GPT's layers into a hybrid model, under names it translates later.
            return original(load_dir, args, rank0, *rest, **kwargs)
        _being_loaded = load = _Load(checkpoint)
        try:
            result = original(load_dir, args, rank0, *rest, **kwargs)
        finally:
            # A save prepares its state dict by the same function, and must not be compared.
            _being_loaded = None
        # DCP has filled the tensors in place, in the form that the checkpoint has.
        if load.optimizer is not None:
            as_in_run(load.optimizer, result[0]["optimizer"])
        return result

    return _load_base_checkpoint


def _attempt[T](call: Callable[[], T]) -> tuple[T | None, list[str]]:
    """Call, and turn any error into a problem, for ranks to raise together."""
    try:
        return call(), []
    except CheckpointError as error:
        return None, [str(error)]
    except Exception as error:  # what one rank raises alone, others wait for
        return None, [f"{type(error).__name__}: {error}"]


def _identity(checkpoint: StoredCheckpoint | None) -> str:
    """Return a text that differs between any two saves: each save uses new file names."""
    if checkpoint is None:
        return "none"
    return f"{checkpoint.folder.name}, {next(iter(checkpoint.items_by_file()), 'empty')}"


def _open(folder: Path, iteration: int | None) -> StoredCheckpoint | None:
    """Open the checkpoint that upstream would take; None where it starts from random weights."""
    tracker = folder / TRACKER
    if (folder / METADATA).is_file():
        raise CheckpointError(
            f"{folder}: expected a --save folder, got that of one checkpoint. Pass the folder that "
            "holds it, and --ckpt-step for its iteration."
        )
    # Upstream takes 0 for "not given", and so does this.
    if not iteration and not tracker.is_file():
        finished = finished_iterations(folder)
        if finished:
            raise CheckpointError(
                f"{tracker}: expected it beside the finished checkpoints "
                f"{', '.join(map(str, finished))}, got no such file. Write the iteration to load "
                f"into it, or pass --ckpt-step {finished[-1]}."
            )
        return None
    if iteration and tracker.is_file() and tracker.read_text().strip() == "release":
        raise CheckpointError(
            f"{tracker}: expected an iteration beside --ckpt-step {iteration}, got 'release', "
            "which Megatron loads instead. Drop --ckpt-step, or write the iteration into it."
        )
    return read_checkpoint(find_checkpoint(folder, iteration or None))


def check_before_loading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``preprocess_fsdp_dtensor_state_dict``, whose result is loaded into or saved next.

    Communication: where it is loaded into, one all-reduce of an int32 over all ranks.
    """

    @functools.wraps(original)
    def preprocess_fsdp_dtensor_state_dict(
        args: Any, raw_state_dict: dict[str, Any], model: Any
    ) -> dict[str, Any]:
        """Prepare a state dict; compare it with the checkpoint that is being loaded."""
        state_dict = original(args, raw_state_dict, model)
        if _being_loaded is None:
            return state_dict
        checkpoint = _being_loaded.checkpoint
        if "optimizer" in state_dict:
            state_dict["optimizer"] = as_stored(checkpoint, state_dict["optimizer"])
            _being_loaded.optimizer = state_dict["optimizer"]
        else:
            log_single_rank(
                logger,
                logging.WARNING,
                "%s: loading weights without optimizer state (--no-load-optim or --finetune); "
                "momentum starts at zero",
                checkpoint.folder,
            )
        differences, problems = _attempt(
            functools.partial(find_differences, checkpoint, state_dict, args.num_experts)
        )
        problems += differences or []
        # Collective in both cases or in none: the flag is the same on all ranks.
        if args.strict_fsdp_dtensor_load:
            _raise_together(problems, _advice(checkpoint, args))
        elif problems:
            logger.warning(
                "--no-strict-fsdp-dtensor-load: these stay as they are: %s", "; ".join(problems)
            )
        return state_dict

    return preprocess_fsdp_dtensor_state_dict


def find_differences(
    checkpoint: StoredCheckpoint, state_dict: Mapping[str, Any], num_experts: int | None
) -> list[str]:
    """Compare tensors of the model and of the optimizer's state by name and shape.

    Args:
        checkpoint: What is stored.
        state_dict: What is wanted, nested, tensors whole or as DTensors.
        num_experts: Experts of the model among all ranks.

    Returns:
        One sentence for each parameter or state that is missing or of another shape, and for each
        that is stored and not wanted: loading would drop it.
    """
    parts = [part for part in ("model", "optimizer") if part in state_dict]
    wanted = {
        key: tuple(value.shape)
        for part in parts
        for key, value in flatten_state_dict({part: state_dict[part]}).items()
        if isinstance(value, torch.Tensor)
    }
    problems = [
        f"{key}: expected shape {shape}, got {checkpoint.tensors[key].shape}"
        for key, shape in wanted.items()
        if key in checkpoint.tensors and checkpoint.tensors[key].shape != shape
    ]
    # A rank wants its own experts alone; another's have the same names but for the number.
    patterns = {_pattern(key) for key in wanted}
    unwanted = [
        key
        for key in checkpoint.tensors
        if key.partition(".")[0] in parts
        and (_pattern(key) not in patterns or not _is_expert_of(key, num_experts))
    ]
    # DCP ignores both without a word: what is missing keeps its random or zero values.
    missing = [key for key in wanted if key not in checkpoint.tensors]
    return problems + _group_states(missing, unwanted)


def _pattern(key: str) -> str:
    """Return a name without the numbers by which ranks tell theirs apart."""
    return _TENSOR_RANK.sub(r"\1*\2", _EXPERT.sub(r"\1*", key))


def _is_expert_of(key: str, num_experts: int | None) -> bool:
    expert = _EXPERT.search(key)
    return expert is None or int(expert[2]) < (num_experts or 0)


def _group_states(missing: list[str], unwanted: list[str]) -> list[str]:
    """Describe what is missing and what is there instead, states of one parameter together."""
    found: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for index, keys in enumerate((missing, unwanted)):
        for key in keys:
            match = _STATE.match(key)
            parent, kind = (match[1], match[2]) if match else (key, "a tensor")
            found[parent][index].append(kind)
    return [
        f"{parent}: expected {', '.join(sorted(expected)) or 'nothing'}, "
        f"got {', '.join(sorted(got)) or 'nothing'}"
        for parent, (expected, got) in found.items()
    ]


def _advice(checkpoint: StoredCheckpoint, args: Any) -> str:
    # Best effort: this text goes beside an error, and must not end in one of its own.
    saved, _ = _attempt(lambda: checkpoint.read_object("args"))
    return (
        f"{checkpoint.folder} was saved with --optimizer {getattr(saved, 'optimizer', 'unknown')}, "
        f"this run has --optimizer {args.optimizer}. Load it with the model and optimizer that "
        "saved it; where only the optimizer differs, --no-load-optim or --finetune loads the "
        f"weights and starts momentum at zero. {_NOTHING_LOADED}"
    )


def _raise_where_damaged(checkpoint: StoredCheckpoint) -> None:
    """Read every byte of a checkpoint, a share of about as many on each rank."""
    # Together the ranks read it once: each reading all of it would take the file system down.
    found, problems = _attempt(
        lambda: list(find_problems(checkpoint, dist.get_rank(), dist.get_world_size()))
    )
    problems += found or []
    _raise_together(
        problems,
        "The checkpoint is damaged; load an earlier one with --ckpt-step, or restore the files. "
        + _NOTHING_LOADED,
    )


def _raise_together(problems: list[str], advice: str) -> None:
    """Raise on all ranks where one has a problem; alone where there is no process group yet."""
    if dist.is_initialized():
        raise_where_any_rank_fails(problems, None, current_device(), advice)
    elif problems:
        raise CheckpointError("\n  ".join([*problems, advice]))


def find_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_load_checkpoint_path_by_args``, which fails for --pretrained-checkpoint alone."""

    @functools.wraps(original)
    def get_load_checkpoint_path_by_args(args: Any, load_arg: str = "load") -> str:
        """Look where --pretrained-checkpoint says when there is no --load."""
        if getattr(args, load_arg) is None and args.pretrained_checkpoint is not None:
            load_arg = "pretrained_checkpoint"
        return original(args, load_arg)

    return get_load_checkpoint_path_by_args
