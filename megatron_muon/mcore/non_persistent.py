# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Non-persistent checkpoints (``--non-persistent-ckpt-type global``) of Megatron-FSDP.

They are checkpoints as others are, in a folder of their own with a tracker, of which one is kept.
Upstream saves them in the format ``fsdp_dtensor``, and reads them as ``torch_dist``.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from megatron_muon.mcore.checkpoint_folders import TRACKER
from megatron_muon.mcore.torch_fsdp2 import is_ours


def load_newer(original: Any, *values: Any, **kwargs: Any) -> Any:
    """Wrap ``load_checkpoint`` and ``load_args_from_checkpoint`` to load the newer of two.

    They load from ``--load``. For the call it is the folder of non-persistent checkpoints, if its
    tracker has the greater iteration. ``--ckpt-step`` is an iteration of ``--load``.
    """
    args = values[0]
    if not isinstance(args, argparse.Namespace):
        from megatron.training.global_vars import get_args

        args = get_args()
    if not is_ours(args) or args.non_persistent_ckpt_type != "global":
        return original(*values, **kwargs)
    load = args.load
    others = args.non_persistent_global_ckpt_dir or (load and str(Path(load, "non_persistent")))
    if not args.ckpt_step:
        args.load = max((load, others), key=_tracked_iteration)
    args.non_persistent_ckpt_type = None
    try:
        return original(*values, **kwargs)
    finally:
        args.load, args.non_persistent_ckpt_type = load, "global"


def _tracked_iteration(folder: str | None) -> float:
    """Return the iteration of a tracker, -1 without one."""
    tracker = Path(folder or "", TRACKER)
    if folder is None or not tracker.is_file():
        return -1
    text = tracker.read_text().strip()
    # A tracker that cannot be read is chosen, and refused by name when it is loaded.
    return int(text) if text.isdecimal() else 0 if text == "release" else math.inf


def keep_tracked(
    original: Any, save_dir: str, leave_ckpt_num: int = 1, do_async: bool = False
) -> None:
    """Wrap ``cleanup_old_non_persistent_checkpoint``: the tracked one and later ones stay.

    Upstream keeps the last folder alone, which may be that of a killed save.
    """
    tracked = _tracked_iteration(save_dir)
    names = [path.name.removeprefix("iter_") for path in Path(save_dir).glob("iter_*")]
    num_kept = sum(int(name) >= tracked for name in names)
    original(save_dir, max(num_kept, leave_ckpt_num), do_async)


def delete_untracked(
    original: Any, save_path: str, iteration_to_delete: int, *args: Any, **kwargs: Any
) -> None:
    """Wrap ``_async_delete_checkpoint_impl``: what the tracker names stays.

    With ``--save-retain-interval`` a non-persistent save deletes the checkpoint of ``--save`` with
    the iteration of the non-persistent save before it, even if it is the latest of ``--save``.
    """
    if iteration_to_delete != _tracked_iteration(save_path):
        original(save_path, iteration_to_delete, *args, **kwargs)
