# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Find the finished checkpoint that ``--load`` would load.

========  ======================================================================================
tracker   ``latest_checkpointed_iteration.txt`` of a ``--save`` folder: iteration that ``--load``
          loads, or ``release``; written last
finished  a checkpoint whose ``.metadata`` exists: it is written after all other files
========  ======================================================================================
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
METADATA = ".metadata"
_WHAT_TO_DO = {
    "fsdp_dtensor": "Megatron-FSDP reads no other; load it in a run without --use-megatron-fsdp, "
    "or convert torch_dist by python -m megatron_muon.checkpoint convert.",
    "torch_dist": "Load a checkpoint of torch in the run that saved it, with "
    "--ckpt-convert-format torch_dist --ckpt-convert-save DIR, which saves it anew.",
}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or does not fit the run.

    Every argument is one line of the text, also with control characters in names.
    """

    def __str__(self) -> str:
        """Return one line per argument."""
        return "\n".join(escaped(str(line)) for line in self.args)


def escaped(text: str) -> str:
    """Return a text with its control characters escaped, as ``repr`` does."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


@contextmanager
def expecting(what: str, where: object) -> Iterator[None]:
    """Turn any error raised inside into a CheckpointError.

    Args:
        what: The expectation.
        where: Key or path to name.
    """
    try:
        yield
    except (CheckpointError, BrokenPipeError):
        raise
    except Exception as error:  # crafted or damaged files raise anything
        # Torch adds paragraphs of advice.
        text = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        raise CheckpointError(f"{where}: expected {what}, got {text}.") from error


def iteration_folder(folder: Path, iteration: int) -> Path:
    """Return the folder of an iteration, as Megatron names it."""
    return folder / f"iter_{iteration:07d}"


def finished_iterations(folder: Path) -> list[int]:
    """List the iterations whose checkpoint is finished, in order."""
    return sorted(
        int(path.parent.name.removeprefix("iter_"))
        for path in folder.glob(f"iter_*/{METADATA}")
        if path.parent.name.removeprefix("iter_").isdecimal()
    )


def find_checkpoint(
    folder: Path, iteration: int | None = None, expected: str = "fsdp_dtensor"
) -> Path:
    """Choose the checkpoint that ``--load`` would load, and check that it is finished.

    Args:
        folder: A ``--save`` folder of Megatron, or the folder of one checkpoint.
        iteration: Iteration asked for (``--ckpt-step``); None for the tracker's.
        expected: Format, ``fsdp_dtensor`` or ``torch_dist``.

    Returns:
        The folder that holds ``.metadata``.

    Raises:
        CheckpointError: There is no checkpoint, it is unfinished or of another format, or the
            tracker cannot be read.
    """
    if iteration is not None:
        checkpoint = iteration_folder(folder, iteration)
    elif (folder / METADATA).is_file():
        checkpoint = folder
    else:
        checkpoint = _tracked_folder(folder)
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"{checkpoint}: expected a checkpoint, got no such folder. {_what_to_load(folder)}"
        )
    # Megatron's file names tell the format; torch_dist has .metadata too.
    stored = "torch" if any(checkpoint.glob("mp_rank_*")) else "fsdp_dtensor"
    if (checkpoint / "metadata.json").exists():
        stored = "torch_dist"
    if stored != expected:
        raise CheckpointError(
            f"{checkpoint}: expected the format {expected}, got {stored}. {_WHAT_TO_DO[expected]}"
        )
    if not (checkpoint / METADATA).is_file():
        raise CheckpointError(
            f"{checkpoint}: expected a finished checkpoint, got one without {METADATA}: its save "
            f"was cut short. {_what_to_load(folder)}"
        )
    return checkpoint


def _tracked_folder(folder: Path) -> Path:
    tracker = folder / TRACKER
    if not tracker.is_file():
        raise CheckpointError(
            f"{tracker}: expected the tracker of a --save folder, got no such file. "
            f"{_what_to_load(folder)}"
        )
    with open(tracker, errors="replace") as file:
        text = file.read(99).strip()
    if text == "release":
        return folder / text
    if not text.isdecimal():
        raise CheckpointError(
            f"{tracker}: expected an iteration or 'release', got {text!r}. {_what_to_load(folder)}"
        )
    return iteration_folder(folder, int(text))


def _what_to_load(folder: Path) -> str:
    finished = finished_iterations(folder)
    if not finished:
        return f"No checkpoint in {folder} is finished."
    return (
        f"Finished in {folder}: {', '.join(map(str, finished))}; load one with --ckpt-step "
        f"{finished[-1]}."
    )
