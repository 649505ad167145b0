# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""GPUs, versions and commit of a run."""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CPU_RANKS = 2

# In a process of its own: the runner holds no memory of a GPU.
_PROBE = """
import json, torch
from megatron_muon import __version__
from megatron_muon.mcore.versions import installed_versions
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
versions = {"megatron-muon": __version__, **installed_versions(), "torch": torch.__version__}
versions["CUDA"] = torch.version.cuda
if count:
    versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
print(json.dumps({"gpus": count, "card": " and ".join(names), "versions": versions}))
"""


@dataclass(frozen=True)
class Machine:
    """Hardware and software of a run.

    Args:
        card: Name of the GPU, or of the CPU where there is none.
        gpus: GPUs of a node that are used; 0 for CPU ranks.
        nodes: Nodes of the run.
        driver: Driver of the GPUs.
        versions: Versions of packages by name.
        commit: Commit of the repository, with a hash of the changes to it.
    """

    card: str
    gpus: int
    nodes: int
    driver: str
    versions: Mapping[str, str]
    commit: str

    @property
    def ranks_on_node(self) -> int:
        """Ranks that a piece starts on a node."""
        return self.gpus or CPU_RANKS

    @property
    def ranks(self) -> int:
        """Ranks of a piece that spans all nodes."""
        return self.ranks_on_node * self.nodes

    @property
    def title(self) -> str:
        """Number and kind of the GPUs, or of CPU ranks."""
        if not self.gpus:
            return f"{self.ranks} CPU ranks ({self.card})"
        nodes = f", {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.gpus * self.nodes} x {self.card}{nodes}"

    @property
    def identity(self) -> str:
        """Hash that is equal for runs whose results may stand in one report."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def folder_name(self) -> str:
        """Name of the default folder of results."""
        card = f"{self.gpus * self.nodes} {self.card}" if self.gpus else "cpu ranks"
        return re.sub(r"\W+", "_", f"{card} {self.commit[:10]}").lower()


def find_machine(nodes: int) -> Machine:
    """Look for GPUs and versions.

    Args:
        nodes: Nodes of the run, which have equal GPUs.

    Raises:
        RuntimeError: This Python lacks torch or another package.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE], env=environment, capture_output=True, text=True
    )
    if probe.returncode:
        raise RuntimeError(
            f"{sys.executable}: expected a Python with the packages of requirements.in, got\n"
            f"{probe.stderr[-2000:]}\nUnset MEGATRON_MUON_PYTHON, or name a Python that has them."
        )
    found: dict[str, Any] = json.loads(probe.stdout.splitlines()[-1])
    versions = {name: str(version) for name, version in found["versions"].items() if version}
    return Machine(
        card=found["card"] or _cpu_name(),
        # Model and data divide by a power of two.
        gpus=1 << (found["gpus"].bit_length() - 1) if found["gpus"] else 0,
        nodes=nodes,
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if found["gpus"]
        else "",
        versions={**versions, "Python": platform.python_version()},
        commit=_commit(),
    )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.is_file() else []
    name = names[0] if names else platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def _commit() -> str:
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD") or "unknown"
    changes = _output("git", "-C", str(ROOT), "diff", "HEAD")
    if not changes:
        return commit
    return f"{commit[:12]} with changes {hashlib.sha256(changes.encode()).hexdigest()[:8]}"


def _output(*command: str) -> str:
    """Return the output of a command, on one line; "" if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode:
        return ""
    # One line a GPU, all the same.
    return "\n".join(dict.fromkeys(done.stdout.strip().splitlines()))
