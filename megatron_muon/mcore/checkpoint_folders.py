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
    """A checkpoint cannot be read, or does not fit the run; every argument is one sentence."""

    def __str__(self) -> str:
        """Return one line per argument."""
        return "\n".join(self.args)


@contextmanager
def expecting(what: str, where: object) -> Iterator[None]:
    """Turn any error raised inside into a CheckpointError.

    Args:
        what: The expectation.
        where: Key or path to name.
    """
    try:
        yield
    except CheckpointError:
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
    paths = folder.glob(f"iter_{'[0-9]' * 7}/{METADATA}")
    return sorted(int(path.parent.name.removeprefix("iter_")) for path in paths)


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
    finished = finished_iterations(folder)
    advice = f"No checkpoint in {folder} is finished."
    if finished:
        numbers = ", ".join(map(str, finished))
        advice = f"Finished in {folder}: {numbers}; load one with --ckpt-step {finished[-1]}."
    checkpoint, tracker = folder, folder / TRACKER
    if iteration is None and not (folder / METADATA).is_file():
        if not tracker.is_file():
            raise CheckpointError(
                f"{tracker}: expected the tracker of a --save folder, got no such file. {advice}"
            )
        text = tracker.read_text(errors="replace").strip()
        if text != "release" and not text.isdecimal():
            raise CheckpointError(
                f"{tracker}: expected an iteration or 'release', got {text[:99]!r}. {advice}"
            )
        checkpoint = folder / text
        iteration = None if text == "release" else int(text)
    if iteration is not None:
        checkpoint = iteration_folder(folder, iteration)
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: expected a checkpoint, got no such folder. {advice}")
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
            f"was cut short. {advice}"
        )
    return checkpoint
