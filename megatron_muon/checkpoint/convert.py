# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Convert checkpoints of Megatron-LM between DDP (``torch_dist``) and Megatron-FSDP.

:mod:`.torch_dist` and :mod:`.to_torch_dist` translate. Nothing of a checkpoint is executed, and
nothing is left of a conversion that fails.
"""

from pathlib import Path

from megatron_muon.checkpoint.folders import CheckpointError, expecting, find_checkpoint
from megatron_muon.checkpoint.storage import read_checkpoint, unchanged
from megatron_muon.checkpoint.to_torch_dist import to_torch_dist
from megatron_muon.checkpoint.torch_dist import to_fsdp_dtensor
from megatron_muon.checkpoint.verify import find_misfits
from megatron_muon.checkpoint.writing import replacing

FORMATS = ("torch_dist", "fsdp_dtensor")


def convert(
    path: Path, target: Path, source: str, destination: str, *, iteration: int | None = None
) -> str:
    """Convert a checkpoint.

    Args:
        path: A ``--save`` folder of Megatron, or the folder of one checkpoint in it.
        target: Path of the result, a ``--save`` folder; must not exist.
        source: Format of the checkpoint, ``torch_dist`` or ``fsdp_dtensor``.
        destination: The other one.
        iteration: Of a ``--save`` folder; None for the tracker's.

    Returns:
        A line that says what was converted.

    Raises:
        CheckpointError: Something is missing, unknown or damaged, ``target`` exists, or another
            process saves the checkpoint meanwhile.

    Memory: the largest chunk, three times.
    """
    if {source, destination} != {*FORMATS}:
        raise CheckpointError(
            f"--from {source} --to {destination}: expected torch_dist and fsdp_dtensor, or the "
            "reverse. Choose the format of the checkpoint and the one that will be read."
        )
    with expecting(f"to convert it for {destination}", path):
        path = find_checkpoint(path, iteration, source)
        with replacing(target) as temporary, unchanged(path):
            stored = read_checkpoint(path)
            for problem in find_misfits(stored):
                raise CheckpointError(problem)
            write = to_fsdp_dtensor if source == "torch_dist" else to_torch_dist
            return write(stored, temporary)
