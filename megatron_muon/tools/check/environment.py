# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Versions, the compiler of Triton, NCCL and the variables that change it."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_muon.mcore.versions import installed_versions, version_problems
from megatron_muon.runtime.agreement import gather_objects
from megatron_muon.step.dependencies import environment_problems, missing_names
from megatron_muon.tools.check.verdicts import Finding

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "PYTORCH_ALLOC", "PYTORCH_CUDA_ALLOC", "CUDA_DEVICE_MAX")


def check_versions() -> Finding:
    """Check the installed packages, and that all ranks have the same ones.

    Communication: a gather of objects over the job.
    """
    versions = dict(installed_versions())
    has_megatron = versions["megatron-core"] is not None
    problems = version_problems(versions if has_megatron else versions | {"megatron-core": "0.19"})
    problems += missing_names() + environment_problems()
    if not has_megatron:
        versions["megatron-core"] = "none (FSDP2 does not need it)"
    versions["Python"] = platform.python_version()
    if torch.version.cuda is not None:
        versions["CUDA"] = torch.version.cuda
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    # Before any rank returns: all ranks join.
    texts = set(gather_objects(text))
    if problems:
        return Finding("FAIL", "; ".join(problems), "See docs/support.md, Versions")
    if len(texts) > 1:
        return Finding("FAIL", text, "Install the same packages on all ranks")
    return Finding("PASS", text)


def check_compiler(device: torch.device) -> Finding:
    """Check that Triton can compile: it needs a C compiler and Python's header."""
    if device.type == "cpu":
        return Finding("SKIP", "CPU ranks compile nothing")
    if importlib.util.find_spec("triton") is None:
        return Finding("SLOW", "no triton", "Install the triton that your torch release names")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    lacking = [] if compiler else ["a C compiler (gcc, clang, or CC)"]
    lacking += [] if header.is_file() else [f"{header} (python3-dev)"]
    if lacking:
        return Finding("SLOW", f"no {' and no '.join(lacking)}", "Install it: rows move by torch")
    return Finding("PASS", f"triton {importlib.metadata.version('triton')}, {compiler}")


def check_communication() -> Finding:
    """List the backend and its variables, and warn about those that prevent overlap."""
    backend = dist.get_backend()
    version = ""
    if backend == "nccl":
        version = " " + ".".join(map(str, torch.cuda.nccl.version()))
    variables = [f"{name}={os.environ[name]}" for name in sorted(os.environ)
                 if name.startswith(_PREFIXES)]  # fmt: skip
    text = ", ".join([f"{backend}{version}, {dist.get_world_size()} ranks", *variables])
    if os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1":
        return Finding("SLOW", text, "Unset TORCH_NCCL_BLOCKING_WAIT: the host waits, overlap ends")
    is_expandable = "expandable_segments:True" in os.environ.get(
        "PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    )
    if backend == "nccl" and not is_expandable:
        advice = "Set PYTORCH_ALLOC_CONF=expandable_segments:True: steps then reuse freed memory"
        return Finding("PASS", text, advice)
    return Finding("PASS", text)
