# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run a training script with Muon under Megatron-FSDP enabled."""

import json
import logging
import os
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_muon.user_errors import SettingsError, UserError

_LIST_PATCHES = "--list-patches"
_USAGE = f"""\
usage: torchrun [TORCHRUN OPTIONS] -m megatron_muon SCRIPT [SCRIPT ARGUMENTS]
       python -m megatron_muon {_LIST_PATCHES}
other commands: python -m megatron_muon.plan --help, python -m megatron_muon.checkpoint --help"""
_DEVICES = ("cpu", "cuda")
# How long ranks other than 0 wait after a user's error. torchrun ends all ranks as soon as one
# ends, and rank 0, which alone prints the error, may have started later.
_WAIT_FOR_RANK_0_S = 10.0

logger = logging.getLogger(__name__)


def run(argv: Sequence[str]) -> int:
    """Run :func:`main`; print the message of a :class:`UserError` without its traceback.

    Args:
        argv: See :func:`main`.

    Returns:
        Exit status: that of :func:`main`, or 1 after a user's error. Other errors propagate.
    """
    try:
        return main(argv)
    except UserError as error:
        # As if nothing caught it: cpu_ranks then does not wait for peers that may be gone.
        sys.last_exc = error
        _end_with(f"megatron_muon: {error}")
        return 1


def main(argv: Sequence[str]) -> int:
    """Enable the patches, then run a script as ``__main__``.

    Args:
        argv: Path of the script, then its own arguments; or ``--list-patches``.

    Returns:
        Exit status: 0, or 2 without a script. Errors of the script propagate.

    Raises:
        SettingsError: The script does not exist, :func:`choose_device` raises, or a flag of the
            script cannot work.
        IncompatibleMegatronError: The patches were not written for the installed megatron-core.
    """
    if not argv or argv[0] in ("-h", "--help"):
        sys.stderr.write(_USAGE + "\n")
        return 0 if argv else 2
    if argv[0] == _LIST_PATCHES:
        return _list_patches()
    script = Path(argv[0])
    if not script.is_file():
        raise SettingsError(f"SCRIPT: expected the path of a Python file, got {argv[0]}. {_USAGE}")
    # First on the path as for `python SCRIPT`, and before megatron is imported: the pretrain_gpt.py
    # of a Megatron-LM checkout has its megatron package beside it.
    sys.path.insert(0, str(script.resolve().parent))
    _log_to_stdout_on_rank_0()
    from megatron_muon.mcore.enable import enable
    from megatron_muon.mcore.versions import check_versions

    # Before CPU ranks, which import megatron.
    check_versions()
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
    """Return ``MEGATRON_MUON_DEVICE`` if set, else cuda if there is a GPU, or cpu (gloo ranks).

    Raises:
        SettingsError: ``MEGATRON_MUON_DEVICE`` is neither cpu nor cuda, or it is cuda and there is
            no usable GPU.
    """
    import torch

    requested = os.environ.get("MEGATRON_MUON_DEVICE", "")
    if requested not in ("", *_DEVICES):
        raise SettingsError(
            f"MEGATRON_MUON_DEVICE: expected one of {_DEVICES}, got {requested!r}. Unset it to use "
            "GPUs where there are any."
        )
    has_gpu = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if requested == "cuda" and not has_gpu:
        raise SettingsError(
            "MEGATRON_MUON_DEVICE: expected a usable GPU for cuda, got none. Check the driver, or "
            "use MEGATRON_MUON_DEVICE=cpu."
        )
    return requested or ("cuda" if has_gpu else "cpu")


def _log_to_stdout_on_rank_0() -> None:
    """Print this package's log lines; Megatron's own configuration hides INFO."""
    package_logger = logging.getLogger("megatron_muon")
    if os.environ.get("RANK", "0") != "0" or package_logger.handlers:
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("[megatron_muon] %(message)s"))
    package_logger.addHandler(handler)
    package_logger.setLevel(logging.INFO)
    package_logger.propagate = False


def _list_patches() -> int:
    from megatron_muon.mcore.versions import check_versions

    check_versions()
    from megatron_muon.mcore.patches import LATER_PATCHES, PATCHES, V2_PATCHES
    from megatron_muon.mcore.relied_on import RELIED_ON, V2_RELIED_ON

    patches = (*PATCHES, *LATER_PATCHES, *V2_PATCHES)
    lines = [f"{patch.symbol}: {patch.purpose}" for patch in patches]
    lines += [f"{symbol}: relied on" for symbol in (*RELIED_ON, *V2_RELIED_ON)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _end_with(text: str) -> None:
    """Print on rank 0 why the run ends, and write it to the file that torchrun's summary reads.

    The other ranks wait for torchrun to end them. An error that rank 0 does not share is in
    torchrun's summary only; without torchrun the rank prints it itself.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    if not is_rank_0:
        time.sleep(_WAIT_FOR_RANK_0_S)
    if is_rank_0 or error_file is None:
        sys.stdout.flush()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    if error_file is not None:
        # The format of torch.distributed.elastic's ErrorHandler, without py_callstack.
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(error_file).write_text(json.dumps({"message": message}))


def _report(device: str) -> None:
    """Log one line for the versions and one for the patches."""
    from megatron_muon.mcore.enable import num_patches
    from megatron_muon.mcore.versions import installed_versions

    versions = installed_versions()
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    logger.info("%s, device %s", found, device)
    logger.info(
        "megatron-core %s patched: %s changes (python -m megatron_muon %s shows them)",
        versions["megatron-core"],
        num_patches(),
        _LIST_PATCHES,
    )
