# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Load a checkpoint; all ranks refuse it together.

A load::

    find_before_loading       wraps _load_base_checkpoint, which a load calls twice
        1. find_together      the same checkpoint on all ranks
        2. load_compared      random states, and group settings that the checkpoint lacks
    rename_and_compare        names and shapes of tensors, in the second call
    upstream                  torch.distributed.checkpoint loads into the tensors of the run
    load_state_dict           of the optimizer adopts group settings, and installs main weights
"""

import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.fsdp_dtensor_checkpoint import flatten_state_dict
from megatron.core.utils import log_single_rank
from torch.distributed.checkpoint.api import CheckpointException

from megatron_muon.mcore.checkpoint_folders import (
    METADATA,
    TRACKER,
    CheckpointError,
    find_checkpoint,
    finished_iterations,
)
from megatron_muon.mcore.checkpoint_reading import StoredCheckpoint, read_checkpoint
from megatron_muon.mcore.checkpoint_repairs import JoinedChunks
from megatron_muon.mcore.checkpoint_state import describe_differences, rename_layers
from megatron_muon.mcore.fsdp_model import bare_name, current_device, is_copy, is_v2
from megatron_muon.mcore.torch_fsdp2 import is_ours
from megatron_muon.runtime.agreement import raise_where_any_rank_fails, raise_where_ranks_differ

logger = logging.getLogger(__name__)

_NOTHING_LOADED = "Nothing was loaded."
_DAMAGED = (
    "If a file is damaged, `python -m megatron_muon.checkpoint verify {}` names it: restore it, or "
    "load an earlier checkpoint with --ckpt-step."
)
_MEAN_OF_TWO = (
    "loaded %s; Megatron prints the mean loss of the first two iterations in the second one, which "
    "therefore differs from that of an uninterrupted run; weights and state do not"
)
# Entry of a state dict on load, like upstream's ``_model``, with a Comparison; absent on save.
_COMPARISON = "_megatron_muon_comparison"
# Entry with the chunks of a rank, by the entries that hold their weights; absent if it has one.
_CHUNKS = "_megatron_muon_chunks"
_OUTPUT_LAYER = ".output_layer.weight"
_GENERATOR = re.compile(r"rng_state\.(\([^)]*\))")


class Comparison(NamedTuple):
    """Comparison of a checkpoint with the run that loads it.

    Args:
        checkpoint: The checkpoint.
        strict_parts: Parts of the state dict (``model``, ``optimizer``) whose differences are
            errors; elsewhere they are warnings.
        advice: End of the error.
        is_tied: Whether the saved model's output layer is its embedding. Versions before 0.1.0
            saved the last stage's copy under a name of its own.
    """

    checkpoint: StoredCheckpoint
    strict_parts: tuple[str, ...]
    advice: str
    is_tied: bool = False


def find_before_loading(
    original: Any,
    load_dir: str | None,
    args: Any,
    rank0: bool = False,
    sharded_state_dict: dict[str, Any] | None = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Wrap ``_load_base_checkpoint`` to refuse anything but a finished checkpoint of this format.

    Upstream exits with status 0 if the tracker cannot be read, and trains from random weights if it
    is missing beside finished checkpoints. Without any checkpoint it still does: that is how a
    first run with ``--load`` and ``--save`` on one folder begins.

    Communication: see ``find_together()`` and ``rename_and_compare()``.
    """
    load = functools.partial(original, load_dir, args, rank0, sharded_state_dict, *rest, **kwargs)
    # Upstream checks the formats of other strategies.
    if load_dir is None or not is_ours(args):
        return load()
    # load_checkpoint calls this first with rank0, for the arguments of the saved run.
    checkpoint = find_together(lambda: _locate(Path(load_dir), args.ckpt_step))
    # Upstream can load a GPT's layers into a hybrid model, and translates the names later.
    is_translated = kwargs.get("gpt_compat_layer_maps") is not None
    if checkpoint is None:
        return load()
    if sharded_state_dict is None or is_translated:
        return _load(load, checkpoint)
    if args.use_megatron_fsdp:
        comparison = _comparison(original, load_dir, args, checkpoint)
        result = load_compared(load, sharded_state_dict, comparison)
    else:
        # Of FSDP2's shards torch itself refuses other names and shapes.
        result = _load(load, checkpoint)
    if args.log_interval == 1:
        log_single_rank(logger, logging.INFO, _MEAN_OF_TWO, checkpoint.folder)
    return result


def _comparison(
    original: Any, load_dir: str, args: Any, checkpoint: StoredCheckpoint
) -> Comparison:
    """Return the comparison of a checkpoint with the run of a command line."""
    # The saved flags are read for checkpoints of tied models with a copy alone.
    is_tied = not args.untie_embeddings_and_output_weights and any(
        _OUTPUT_LAYER in key for key in checkpoint.tensors
    )
    if is_tied:
        saved = original(load_dir, args, rank0=True)[0]["args"]
        is_tied = not saved.untie_embeddings_and_output_weights
    return Comparison(
        checkpoint,
        ("model", "optimizer") if args.strict_fsdp_dtensor_load else (),
        f"Load {checkpoint.folder} with the model and the optimizer that saved it. If only the "
        "optimizer differs, or its state is missing, --no-load-optim or --finetune loads the "
        f"weights and starts momentum at zero. {_NOTHING_LOADED}",
        is_tied,
    )


def find_together(find: Callable[[], StoredCheckpoint | None]) -> StoredCheckpoint | None:
    """Find the checkpoint of a load, the same on all ranks.

    Args:
        find: Reads the table of contents, or returns None if there is no checkpoint.

    Communication: all-reduces of an int32 and an all-gather of an int64 over all ranks, of a
        process group that may not exist yet.
    """
    checkpoint = _on_all_ranks(find, _NOTHING_LOADED)
    if not dist.is_initialized():
        return checkpoint
    raise_where_ranks_differ(
        # Two saves of one iteration differ in their ids, also two of upstream's.
        [f"{checkpoint.folder.name}, {checkpoint.save_id}" if checkpoint else "none"],
        dist.group.WORLD,
        current_device(),
        "checkpoint to load",
        "Save to and load from a file system that all nodes mount. " + _NOTHING_LOADED,
    )
    return checkpoint


def load_compared(
    load: Callable[[], Any], state_dict: dict[str, Any], comparison: Comparison
) -> Any:
    """Let a trainer load a checkpoint into a state dict, after a comparison.

    Args:
        load: Loads into the state dict.
        state_dict: State dict of the run. It gets the comparison, for ``rename_and_compare()``,
            whose result upstream loads: upstream passes its model in the same way. It also gets a
            stored random state: there is one per stage and tensor-parallel rank, and a missing one
            is replaced by another.
        comparison: The checkpoint, and how it is compared.
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
    # Group settings that the checkpoint lacks come from flags. The step count stays, so that DCP
    # refuses a checkpoint without.
    stored, set_aside = checkpoint.metadata.state_dict_metadata, []
    groups = state_dict.get("optimizer", {}).get("param_to_group_meta", {})
    for name, settings in groups.items():
        prefix = f"optimizer.param_to_group_meta.{name}."
        lacking = [key for key in settings if key != "step" and prefix + key not in stored]
        set_aside.append((settings, {key: settings.pop(key) for key in lacking}))
    result = _load(load, checkpoint)
    # Upstream installs the weights of several chunks from entries that are no part of a checkpoint.
    result[0].update({key: state_dict[key] for key in state_dict.get(_CHUNKS, ())})
    for settings, flags in set_aside:
        settings.update(flags)
    return result


def _load(load: Callable[[], Any], checkpoint: StoredCheckpoint) -> Any:
    """Load a checkpoint; torch raises on all ranks if one of them cannot read a file."""
    try:
        return load()
    except CheckpointException as error:
        error.add_note(_DAMAGED.format(checkpoint.folder))
        raise


def _on_all_ranks[T](call: Callable[[], T], advice: str) -> T:
    """Call a function, and raise on all ranks where it raises on one."""
    problems = []
    try:
        result = call()
    except Exception as error:  # the other ranks would wait for this one
        is_known = isinstance(error, CheckpointError)
        problems = str(error).splitlines() if is_known else [f"{type(error).__name__}: {error}"]
    raise_where_any_rank_fails(problems, None, current_device(), advice)
    return result


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
    return read_checkpoint(find_checkpoint(folder, iteration or None))


def keep_chunks(
    original: Any, settings: Any, model: Sequence[Any], *rest: Any, **kwargs: Any
) -> dict[str, Any]:
    """Wrap ``generate_state_dict``, whose result is saved or loaded with the first chunk alone."""
    state_dict: dict[str, Any] = original(settings, model, *rest, **kwargs)
    if settings.ckpt_format == "fsdp_dtensor" and len(model) > 1:
        state_dict[_CHUNKS] = {f"model{index}": chunk for index, chunk in enumerate(model)}
    return state_dict


def rename_and_compare(
    original: Any, args: Any, raw_state_dict: dict[str, Any], model: Any
) -> dict[str, Any]:
    """Wrap ``preprocess_fsdp_dtensor_state_dict``: its result is loaded or saved next.

    A save leaves out copies of the embedding, whose rows v2 shards otherwise: chunks would overlap.

    Communication: for a load one all-reduce of an int32 over all ranks, and ``find_differences()``.
    """
    comparison = raw_state_dict.pop(_COMPARISON, None)
    chunks = raw_state_dict.get(_CHUNKS, {"model": model})
    state_dict = {k: v for k, v in raw_state_dict.items() if k not in (_CHUNKS, *chunks)}
    state_dict["model"] = {}
    for entry, chunk in chunks.items():
        # As in checkpoints of v1, with a wrapper of two modules.
        prefix = "module." if is_v2(chunk) else ""
        weights = {prefix + key: value for key, value in raw_state_dict[entry].items()}
        state_dict["model"] |= rename_layers(chunk, weights)
    state_dict = original(args, state_dict, JoinedChunks([*chunks.values()]))
    if comparison is None:
        copies = _names_of_copies(chunks.values())
        for table in (state_dict["model"], state_dict.get("optimizer", {}).get("state", {})):
            for key in [key for key in table if bare_name(key) in copies]:
                del table[key]
        return state_dict
    shapes = {
        key: tuple(value.shape)
        for part in ("model", "optimizer")
        for key, value in flatten_state_dict({part: state_dict.get(part, {})}).items()
        if isinstance(value, torch.Tensor)
    }
    problems = find_differences(comparison.checkpoint, shapes, is_tied=comparison.is_tied)
    is_strict = [text.startswith(comparison.strict_parts) for text in problems]
    # Collective on all ranks or on none: the parts are the same everywhere.
    if comparison.strict_parts:
        raise_where_any_rank_fails(
            list(itertools.compress(problems, is_strict)),
            None,
            current_device(),
            comparison.advice,
        )
    if problems:
        logger.warning("Not loaded, and as they were before: %s", "; ".join(problems))
    return state_dict


def _names_of_copies(chunks: Iterable[Any]) -> set[str]:
    """Return the bare names of parameters that are copies of the first stage's."""
    return {
        bare_name(name)
        for chunk in chunks
        for name, param in rename_layers(chunk, dict(chunk.named_parameters())).items()
        if is_copy(param)
    }


def find_differences(
    checkpoint: StoredCheckpoint, shapes: Mapping[str, tuple[int, ...]], *, is_tied: bool = False
) -> list[str]:
    """Compare the tensors of the model and of the optimizer's state by name and shape.

    Args:
        checkpoint: The stored tensors.
        shapes: Shapes of the tensors that this rank expects, by their names in checkpoints.
        is_tied: See ``Comparison``.

    Returns:
        One sentence per module or parameter with missing weights or states, other shapes, or
        tensors that no rank expects, so that a load would drop them.

    Communication: an all-reduce of a byte per stored tensor over all ranks: other pipeline stages
        and other ranks of experts expect other tensors.
    """
    stored = {key: tuple(tensor.size) for key, tensor in checkpoint.tensors.items()}
    expected = torch.tensor([key in shapes for key in stored], dtype=torch.uint8)
    expected = expected.to(current_device())
    dist.all_reduce(expected, op=dist.ReduceOp.MAX)
    parts = {key.partition(".")[0] for key in shapes}
    ignored = {
        key
        for key, is_expected in zip(stored, expected.tolist(), strict=True)
        if key not in shapes
        and (
            is_expected or key.partition(".")[0] not in parts or (is_tied and _OUTPUT_LAYER in key)
        )
    }
    # DCP silently ignores both: missing tensors keep their random or zero values.
    return describe_differences(
        shapes, {key: shape for key, shape in stored.items() if key not in ignored}
    )
