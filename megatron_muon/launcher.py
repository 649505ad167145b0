# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run a training script with Muon under Megatron-FSDP enabled."""

import logging
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

_USAGE = "usage: torchrun [TORCHRUN OPTIONS] -m megatron_muon SCRIPT [SCRIPT ARGUMENTS]"
_DEVICES = ("cpu", "cuda")

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Enable the patches, then run a script as ``__main__``.

    Args:
        argv: Path of the script, then its own arguments.

    Returns:
        Exit status: 0, or 2 when no script was named. A script that raises ends the process.

    Raises:
        FileNotFoundError: The script does not exist.
        ValueError: ``MEGATRON_MUON_DEVICE`` names neither cpu nor cuda.
        RuntimeError: ``MEGATRON_MUON_DEVICE=cuda`` without a usable GPU.
        IncompatibleMegatronError: The installed megatron-core is not one the patches were
            written for.
    """
    if not argv or argv[0] in ("-h", "--help"):
        sys.stderr.write(_USAGE + "\n")
        return 0 if argv else 2
    script = Path(argv[0])
    if not script.is_file():
        raise FileNotFoundError(
            f"SCRIPT: expected the path of a Python file, got {argv[0]}. {_USAGE}"
        )
    # First on the path as for `python SCRIPT`, and before megatron is imported: a Megatron-LM
    # checkout's own pretrain_gpt.py brings the megatron package beside it.
    sys.path.insert(0, str(script.resolve().parent))
    _log_to_stdout_on_rank_0()
    from megatron_muon import enable
    from megatron_muon.patching import check_packages

    # Before CPU ranks, which import megatron.
    check_packages()
    device = choose_device()
    if device == "cpu":
        from megatron_muon import cpu_ranks

        cpu_ranks.enable(force=os.environ.get("MEGATRON_MUON_DEVICE") == "cpu")
    enable()
    _report(device)
    sys.argv = list(argv)
    runpy.run_path(str(script), run_name="__main__")
    return 0


def choose_device() -> str:
    """Choose where to train.

    Returns:
        ``MEGATRON_MUON_DEVICE`` where it is set; else ``"cuda"`` where CUDA has a device and
        ``"cpu"`` (gloo ranks) where not.

    Raises:
        ValueError: ``MEGATRON_MUON_DEVICE`` is neither cpu nor cuda.
        RuntimeError: It is cuda, and there is no usable GPU.
    """
    import torch

    requested = os.environ.get("MEGATRON_MUON_DEVICE", "")
    if requested not in ("", *_DEVICES):
        raise ValueError(
            f"MEGATRON_MUON_DEVICE: expected one of {_DEVICES}, got {requested!r}. Unset it to use "
            "GPUs where there are any."
        )
    has_gpu = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if requested == "cuda" and not has_gpu:
        raise RuntimeError(
            "MEGATRON_MUON_DEVICE: expected a usable GPU for cuda, got none. Check the driver, or "
            "use MEGATRON_MUON_DEVICE=cpu."
        )
    return requested or ("cuda" if has_gpu else "cpu")


def _log_to_stdout_on_rank_0() -> None:
    """Show this package's log lines; Megatron's own configuration hides INFO."""
    package_logger = logging.getLogger("megatron_muon")
    if os.environ.get("RANK", "0") != "0" or package_logger.handlers:
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("[megatron_muon] %(message)s"))
    package_logger.addHandler(handler)
    package_logger.setLevel(logging.INFO)
    package_logger.propagate = False


def _report(device: str) -> None:
    """Log one line for the versions and one for each patch."""
    from megatron_muon.mcore.enable import applied_patches, carried_patches
    from megatron_muon.patching.versions import installed_versions

    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    logger.info("%s, device %s", versions, device)
    for patch in applied_patches():
        logger.info("patched %s: %s", patch.target.symbol, patch.purpose)
    for patch in carried_patches():
        logger.info("in megatron's source, %s: %s", patch.target.symbol, patch.purpose)
