# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Commands of a run, in the order of their value.

On GPUs sizes are those of models; on CPU ranks they are tiny, and show that a command works.
Expected minutes choose what fits into ``--minutes``; they are estimates.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from evidence.machine import ROOT, Machine

# A piece is ended after as many times its expected minutes.
LIMIT = 3.0
# In a command, the file for its figures.
JSON = "{json}"
# In a command of several nodes, the port of its ranks.
PORT = "{port}"
# For scripts/test.sh.
_PYTHON = f"MEGATRON_MUON_PYTHON={sys.executable}"
# Tests of the device, in the order of CONTRIBUTING.md.
TESTS = "optimizer", "engine", "parity", "model", "fsdp2", "newton_schulz", "training"


@dataclass(frozen=True)
class Piece:
    """A command with a time limit.

    Args:
        name: Of the piece, and of its files.
        command: Program and arguments.
        minutes: Expected time.
        missing: Why it cannot run on this machine; "" if it can.
        spans_nodes: Ranks of all nodes take part; otherwise it runs on the first node.
    """

    name: str
    command: tuple[str, ...]
    minutes: float
    missing: str = ""
    spans_nodes: bool = False

    @property
    def limit_s(self) -> float:
        """Seconds after which it is ended."""
        return 60 * LIMIT * self.minutes

    @property
    def shown_command(self) -> str:
        """Command as a user types it in the root of the repository."""
        names = {
            sys.executable: "python",
            _PYTHON: "MEGATRON_MUON_PYTHON=python",
            JSON: f"{self.name}.json",
            PORT: "PORT",
        }
        words = [names.get(word, word) for word in self.command]
        words = [word.removeprefix(f"{ROOT}/") for word in words]
        return shlex.join(words)


def torchrun_of(machine: Machine, node_rank: int = 0, address: str = "") -> tuple[str, ...]:
    """Return the command that starts the ranks of a node.

    Args:
        machine: Its nodes and GPUs.
        node_rank: Of this node.
        address: Host and port of the first one of several nodes.
    """
    torchrun = (sys.executable, "-m", "torch.distributed.run")
    ranks = ("--nproc-per-node", str(machine.ranks_on_node))
    if machine.nodes == 1:
        return (*torchrun, "--standalone", *ranks)
    host, _, port = address.rpartition(":")
    nodes = ("--nnodes", str(machine.nodes), "--node-rank", str(node_rank))
    return (*torchrun, *nodes, "--master-addr", host, "--master-port", port, *ranks)


class _Script(NamedTuple):
    """A script of the repository, with flags and expected minutes by device.

    Args:
        name: Of the piece.
        path: Of the script, or ``-m`` and a module.
        flags: On GPUs.
        minutes: On GPUs.
        cpu_flags: On CPU ranks; None if it needs a GPU.
        cpu_minutes: On CPU ranks.
        start: "ranks" of torchrun, the same through the "launcher", a "process", "helpers" of
            tests, or "bash".
        min_ranks: Fewest ranks that show anything.
    """

    name: str
    path: str
    flags: str
    minutes: float
    cpu_flags: str | None
    cpu_minutes: float = 2
    start: str = "launcher"
    min_ranks: int = 1


def _scripts(machine: Machine, peers: Path | None) -> list[_Script]:
    local = machine.ranks_on_node
    # As many as one card has run (docs/gpus.md), for each of up to 8.
    layers = 2 * min(machine.ranks, 8)
    large, small = f"--hidden 4096 --layers {layers}", "--hidden 32 --layers 2 --rounds 2"
    step = f"--peers {peers} --layouts even" if peers else "--layouts even"
    # An axis of replicas needs another one of shards.
    hybrid = " HSDP" if machine.ranks >= 4 else ""
    parity = f"--ranks {local} --iterations"
    return [
        _Script("check", "-m megatron_muon.check", "", 1, "", 2, "ranks"),
        _Script(
            *("step", "benchmarks/fsdp2_step.py"),
            *(f"--hidden 2048 --layers 4 {step} remainders experts tiny{hybrid}", 4),
            *(f"--hidden 32 --layers 1 --rounds 2 {step} experts", 4, "ranks"),
        ),
        _Script("overlap", "benchmarks/overlap.py", large, 2, small, min_ranks=2),
        # Above the slack that the script allows.
        _Script("memory", "benchmarks/peak_memory.py", large, 2, "--hidden 256 --layers 4"),
        _tests("optimizer"),
        _Script(
            *("parity", "scripts/parity.py", f"{parity} 200", 10),
            *(f"{parity} 8 --hidden 32 --layers 2", 8, "process"),
        ),
        _Script(
            *("killed_rank", "scripts/killed_rank.py", f"--ranks {local}", 4),
            *(f"--ranks {local}", 4, "process"),
        ),
        _Script("layer_wise", "benchmarks/optimizer_step.py", large, 3, small),
        _Script(
            *("killed_save", "tests/functional/kill_saves.py", "--kills 4", 5),
            *("--kills 2", 5, "helpers"),
        ),
        _tests("engine"),
        # The host alone, also where there are GPUs.
        _Script(
            *("host", "scripts/cpu_ranks", "benchmarks/host_time.py", 4),
            *("benchmarks/host_time.py --jobs llama3-8b-64", 2, "process"),
        ),
        _Script("device", "benchmarks/device_time.py", "", 3, None, start="process"),
        _Script(
            *("newton_schulz", "benchmarks/newton_schulz.py", "--device cuda", 3),
            *("--device cpu --rounds 2 --shapes 64x64 64x128", 1, "process"),
        ),
        _Script(
            *("iterations", "benchmarks/training_step.py"),
            *(f"--ranks {local} --hidden 2048 --layers 4 --passes 1", 14),
            *(f"--ranks {local} --hidden 32 --layers 1 --iterations 7 --passes 1", 10, "process"),
        ),
        *map(_tests, TESTS[2:]),
        _Script(
            *("parity_1000", "scripts/parity.py", f"{parity} 1000", 40, None),
            *(0, "process"),
        ),
    ]


# They print, and write no JSON.
_WITHOUT_JSON = "check", "killed_save"


def _tests(name: str) -> _Script:
    flags = f"--device cuda --piece {name} -m 'not slow' -rP"
    # Three minutes on one H200 (docs/gpus.md); they end themselves after eight.
    return _Script(f"tests_{name}", "scripts/test.sh", flags, 4, None, start="bash")


def list_pieces(
    machine: Machine, torchrun: tuple[str, ...] = (), peers: Path | None = None
) -> list[Piece]:
    """Return all pieces, with those that cannot run on this machine.

    Args:
        machine: Chooses sizes.
        torchrun: Command that starts the ranks of this node, for several nodes.
        peers: Folder of packages to compare with, as ``fsdp2_step.py`` takes it.
    """
    torchrun = torchrun or torchrun_of(machine)
    python, on_gpu = sys.executable, machine.gpus > 0
    launcher = ("-m", "megatron_muon") if on_gpu else (str(ROOT / "scripts" / "cpu_ranks"),)
    device = ("env", "MEGATRON_MUON_TEST_DEVICE=cuda") if on_gpu else ()
    starts = {
        "ranks": torchrun,
        "launcher": (*torchrun, *launcher),
        "process": (python,),
        "helpers": (*device, python),
        "bash": ("env", _PYTHON, "bash"),
    }
    pieces = []
    for script in _scripts(machine, peers):
        flags = script.flags if on_gpu else script.cpu_flags
        spans_nodes = script.start in ("ranks", "launcher")
        ranks = machine.ranks if spans_nodes else machine.ranks_on_node
        missing = ""
        if flags is None:
            missing = "no GPU"
        elif ranks < script.min_ranks:
            missing = f"needs {script.min_ranks} GPUs, got {ranks}"
        file = script.path.split() if script.path.startswith("-m ") else [str(ROOT / script.path)]
        words = [*starts[script.start], *file, *shlex.split(flags or "")]
        if script.name not in _WITHOUT_JSON and script.start != "bash":
            words += ["--json", JSON]
        minutes = script.minutes if on_gpu else script.cpu_minutes
        pieces.append(Piece(script.name, tuple(words), minutes, missing, spans_nodes))
    return pieces
