# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run a training script with Muon under Megatron-FSDP enabled."""

import json
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron_muon.user_errors import SettingsError, UserError

_LIST_PATCHES = "--list-patches"
_USAGE = f"""\
usage: torchrun [TORCHRUN OPTIONS] -m megatron_muon SCRIPT [SCRIPT ARGUMENTS]
       python -m megatron_muon {_LIST_PATCHES}
other commands, each with --help: python -m megatron_muon.check, .plan and .checkpoint"""
_WITHOUT_GPU = (
    "Check the driver, or run on CPU ranks over gloo from a clone of megatron-muon: "
    "torchrun --nproc-per-node 2 scripts/cpu_ranks SCRIPT [SCRIPT ARGUMENTS]"
)

logger = logging.getLogger(__name__)


def launch(argv: Sequence[str], enable_cpu_ranks: Callable[[], None] | None = None) -> int:
    """Run ``main()``, with errors in torchrun's summary.

    Args:
        argv: See ``main()``.
        enable_cpu_ranks: See ``main()``.

    Returns:
        Exit status: of ``main()``, 0 if the script exits without one, as Megatron does after
        ``--exit-interval``, or 1 after a ``UserError``, with its message but no traceback. Other
        errors, and other exits of the script, propagate.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        return record(main)(argv, enable_cpu_ranks) or 0
    except UserError as error:
        # As if nothing caught it: handlers at exit then do not wait for peers that may be gone.
        sys.last_exc = error
        _end_with(f"megatron_muon: {error}")
        return 1
    except SystemExit as error:
        if error.code:
            raise
        return 0


def main(argv: Sequence[str], enable_cpu_ranks: Callable[[], None] | None = None) -> int:
    """Enable the patches, then run a script as ``__main__``.

    Args:
        argv: Path of the script, then its arguments; or ``--list-patches``.
        enable_cpu_ranks: Lets Megatron run without a GPU. Called before megatron is imported; by
            default a GPU is needed.

    Returns:
        Exit status: 0, or 2 without a script. Errors of the script propagate.

    Raises:
        SettingsError: The script does not exist, its checkout cannot compile its dataset helpers,
            there is no GPU, or a flag of the script cannot work.
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

    # Before CPU ranks: they import megatron.
    check_versions()
    _check_dataset_helpers()
    if enable_cpu_ranks is not None:
        enable_cpu_ranks()
    elif not _has_gpu():
        raise SettingsError(f"{argv[0]}: expected a usable GPU, got none. {_WITHOUT_GPU}")
    enable()
    _report("cuda" if enable_cpu_ranks is None else "cpu")
    sys.argv = list(argv)
    runpy.run_path(str(script), run_name="__main__")
    return 0


def _check_dataset_helpers() -> None:
    """Refuse a checkout of Megatron-LM that would compile its dataset helpers for another Python.

    Rank 0 runs make there while all others wait for it, and make takes Python from PATH. A wheel
    has the compiled helpers, and no Makefile.
    """
    folder = Path(find_spec("megatron.core").origin).with_name("datasets")  # type: ignore[union-attr, arg-type]
    if not (folder / "Makefile").is_file():
        return
    helpers = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    headers = Path(sysconfig.get_path("include")).name
    if make := shutil.which("make"):
        command = subprocess.check_output([make, "--dry-run", "-C", str(folder)], text=True)
        if " -o " not in command and (folder / helpers).is_file():
            return
        # pybind11 of that Python prints the folder of its headers.
        if re.search(rf"/{headers}\b.* -o {re.escape(helpers)}$", command, re.MULTILINE):
            return
    path = f"{Path(sys.executable).parent}:{sys.base_prefix}/bin"
    raise SettingsError(
        f"PATH: expected make, and python3 and python3-config of {sys.executable} with pybind11, "
        f"to compile the dataset helpers in {folder}, got others or none. Type: "
        f"PATH={path}:$PATH torchrun ..."
    )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _log_to_stdout_on_rank_0() -> None:
    """Print this package's log lines; Megatron's configuration hides INFO."""
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
    from megatron_muon.mcore.patches import PATCHES

    sys.stdout.writelines(f"{patch.symbol}: {patch.purpose}\n" for patch in PATCHES)
    return 0


def _end_with(text: str) -> None:
    """Print on rank 0 why the run ends, and write it to the file that torchrun's summary reads.

    The summary has errors that rank 0 does not share, or has no time to print; without torchrun the
    rank prints its error.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is not None:
        # The format of torch.distributed.elastic's ErrorHandler, without py_callstack.
        message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(error_file).write_text(json.dumps({"message": message}))
    if error_file is None or os.environ.get("RANK", "0") == "0":
        sys.stdout.flush()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _report(device: str) -> None:
    from megatron_muon.mcore.versions import installed_versions

    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    logger.info("%s, device %s; %s shows what is patched", versions, device, _LIST_PATCHES)
