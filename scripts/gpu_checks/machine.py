# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The card, its driver, and the versions that figures were taken with."""

import importlib.metadata
import importlib.util
import platform
import re
import subprocess
from pathlib import Path

from gpu_checks.report import Context, NotPossibleError, Report

ROOT = Path(__file__).resolve().parents[2]
# Modules that every check needs, by the package that brings them.
_NEEDED = {
    "torch": "torch",
    "megatron-core": "megatron.core",
    "emerging-optimizers": "emerging_optimizers",
    "numpy": "numpy",
    "einops": "einops",
    "absl-py": "absl",
    "packaging": "packaging",
}
_PACKAGES = ("megatron-core", "emerging-optimizers", "transformer-engine", "triton")


def missing_packages() -> list[str]:
    """List packages that no check can do without and that are not on the path."""
    missing = []
    for package, module in _NEEDED.items():
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            found = None
        if found is None:
            missing.append(package)
    return missing


def check(context: Context, report: Report) -> None:
    """Write what this machine is into the data of the report.

    Raises:
        NotPossibleError: A GPU is asked for, and torch finds none.
    """
    import torch

    if context.device == "cuda":
        if not torch.cuda.is_available():
            raise NotPossibleError(
                "expected a GPU that torch can use, got none. Use --cpu for the checks that need "
                f"none, or look at the driver (torch {torch.__version__} for CUDA "
                f"{torch.version.cuda})"
            )
        properties = torch.cuda.get_device_properties(0)
        card = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, "
            f"{properties.multi_processor_count} multiprocessors"
        )
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        report.data("card", card)
        report.data("driver", _driver())
        report.data("CUDA, NCCL of torch", f"{torch.version.cuda}, {nccl}")
    else:
        report.data("card", "none: gloo ranks on a CPU")
    report.data("CPU", _cpu())
    report.data("python", platform.python_version())
    report.data("torch", torch.__version__)
    for package in _PACKAGES:
        report.data(package, _version(package))
    report.data("commit", _commit())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    if package in _NEEDED and package not in missing_packages():
        return "found without its metadata"
    return "not installed"


def _driver() -> str:
    found = _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if found:
        return found.splitlines()[0]
    path = Path("/proc/driver/nvidia/version")
    match = re.search(r"\d+\.\d+(\.\d+)?", path.read_text()) if path.exists() else None
    return match[0] if match else "unknown"


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*: (.*)", path.read_text()) if path.exists() else None
    return match[1] if match else platform.machine()


def _commit() -> str:
    return _printed("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "unknown"


def _printed(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
