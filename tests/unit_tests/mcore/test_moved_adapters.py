# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Wrappers of Megatron-FSDP in other modules, as in Megatron-LM's nightly documentation.

A copy of the megatron that is installed, or of a checkout (``check_compat.py --megatron``),
is changed like that: ``mcore_adapter_v1`` and ``mcore_adapter_v2`` hold the classes, and
``mcore_fsdp_adapter`` is left with what chooses between them.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import megatron.core
import pytest
from helpers.ranks import ROOT, run_ranks
from helpers.toy_gpt import needs_flags, v2_toy_gpt

from megatron_muon import IncompatibleMegatronError, enable

INSTALLED = Path(megatron.core.__file__).parents[1]
V1, V2 = "mcore_adapter_v1", "mcore_adapter_v2"


@pytest.fixture
def tree(tmp_path):
    """A copy to change; its version is that of the original."""
    shutil.copytree(INSTALLED, tmp_path / "megatron", ignore=shutil.ignore_patterns(".git"))
    info = tmp_path / "megatron" / "core" / "package_info.py"
    info.write_text(f"{info.read_text()}\n__version__ = {megatron.core.__version__!r}\n")
    return tmp_path


def move_adapters(tree: Path) -> None:
    """Move the classes, with what they call, and let importers follow."""
    folder = tree / "megatron" / "core" / "distributed" / "fsdp"
    path = folder / "mcore_fsdp_adapter.py"
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    parts = {"": [], V1: [], V2: []}
    start = 0
    for node in ast.parse(text).body:
        names = [V1]
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = [V1, V2, ""]
        elif node.name == "FullyShardedDataParallelV2":
            names = [V2]
        elif isinstance(node, ast.FunctionDef) and node.name == "FullyShardedDataParallel":
            names = [""]
        for name in names:
            parts[name] += lines[start : node.end_lineno]
        start = node.end_lineno
    for module in (V1, V2):
        code = "".join(parts[module])
        if classes := re.findall(r"^class (\w+)", code, re.M):
            (folder / f"{module}.py").write_text(code)
            parts[""] += [f"\n\nfrom .{module} import {', '.join(classes)}\n"]
    path.write_text("".join(parts[""]))
    name = "import FullyShardedDataParallelV2"
    for importer in tree.rglob("*.py"):
        if (old := f"fsdp.mcore_fsdp_adapter {name}") in (code := importer.read_text()):
            importer.write_text(code.replace(old, f"fsdp.{V2} {name}"))


def run_in(tree: Path, *arguments: str) -> str:
    """Run Python with a tree in place of the installed megatron, and return what it prints."""
    folders = [str(tree), str(ROOT), str(ROOT / "scripts")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=tree,
        env=environment,
        timeout=240.0,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


MOVED = """
import importlib, sys
from megatron.core.distributed import DistributedDataParallel
from megatron_muon import enable
enable()
from megatron_muon.mcore.fsdp_model import is_wrapped

package = "megatron.core.distributed.fsdp."
old = importlib.import_module(package + "mcore_fsdp_adapter")
assert "torch.arange" not in open(old.__file__).read()
v1 = importlib.import_module(package + "mcore_adapter_v1")
for name in ("_get_dp_tp_mesh", "_get_hsdp_tp_mesh"):
    assert hasattr(getattr(v1, name), "__wrapped__"), name
wrappers = [getattr(v1, name) for name in vars(v1) if name.startswith("FullyShardedDataParallel")]
assert wrappers
if hasattr(old, "FullyShardedDataParallelV2"):
    v2 = importlib.import_module(package + "mcore_adapter_v2").FullyShardedDataParallelV2
    assert hasattr(v2._validate_config, "__wrapped__")
    wrappers.append(v2)
for wrapper in wrappers:
    assert is_wrapped(wrapper.__new__(wrapper)), wrapper
assert not is_wrapped(DistributedDataParallel.__new__(DistributedDataParallel))
"""


@pytest.mark.slow
def test_wrappers_are_repaired_in_the_modules_of_nightly(tree):
    """Wrappers that were moved to other modules are repaired and count as wrapped."""
    move_adapters(tree)
    run_in(tree, "-c", MOVED)


ADAM = {"use_megatron_fsdp": True, "optimizer": "adam"}


def _v2_without_its_targets() -> list[str]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    from megatron_muon.mcore import arguments

    DistributedDataParallelConfig.megatron_fsdp_version = 1
    vars(mcore_fsdp_adapter).pop("FullyShardedDataParallelV2", None)
    enable()
    # Version 1 is as it was.
    arguments.check_arguments(argparse.Namespace(**ADAM))
    with pytest.raises(IncompatibleMegatronError) as caught:
        arguments.check_arguments(argparse.Namespace(**ADAM, megatron_fsdp_version=2))
    return list(caught.value.problems)


@pytest.mark.ranks
def test_release_with_v2_whose_targets_are_elsewhere_is_refused():
    """A repair of version 2 without a target refuses version 2, and not version 1."""
    (problems,) = run_ranks(1, _v2_without_its_targets).check().results
    symbol = "mcore_fsdp_adapter:FullyShardedDataParallelV2._validate_config"
    assert f"{symbol}: expected it to exist, found none" in "".join(problems)


OWN_NORM = """
    def get_grad_norm(self):
        raise RuntimeError("upstream's own norm")

    def count_zeros(self):
        raise RuntimeError("upstream's own count")
"""


def losses(tree: Path, *flags: str) -> list[str]:
    """Return losses and norms of two ranks, as logged."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "scripts" / name) for name in ("cpu_ranks", "pretrain_gpt.py")]
    printed = run_in(tree, *command, *v2_toy_gpt("--train-iters", "2", *flags))
    found = re.findall(r"lm loss: (\S+).*grad norm: (\S+) .*", printed)
    assert len(found) == 2
    return found


@pytest.mark.ranks
@pytest.mark.slow
@needs_flags
def test_moved_v2_trains_as_where_it_was(tree):
    """Version 2 trains the same in other modules, with Muon's norm of its own."""
    flags = ("--lr-warmup-iters", "0", "--log-num-zeros-in-grad")
    before = losses(tree, *flags)
    move_adapters(tree)
    optimizer = tree / "megatron" / "core" / "optimizer" / "fully_sharded_optimizer.py"
    optimizer.write_text(optimizer.read_text() + OWN_NORM)
    assert losses(tree, *flags) == before


MENDED = """
from megatron.core.optimizer.fully_sharded_optimizer import FullyShardedOptimizer
from megatron_muon import enable
enable()
from megatron_muon.mcore.gradient_repairs import count_shards_once
from megatron_muon.mcore.patches import PATCHES

mended = [each.replacement for each in PATCHES if each.applies_to == "v2" and each.is_repaired()]
assert mended == [count_shards_once]
assert not hasattr(FullyShardedOptimizer.__init__, "__wrapped__")
"""


@needs_flags
def test_norm_that_upstream_has_mended_is_left_alone(tree):
    """The repair of the norm is left out where upstream has pull request 6489."""
    optimizer = tree / "megatron" / "core" / "optimizer" / "fully_sharded_optimizer.py"
    optimizer.write_text(optimizer.read_text() + OWN_NORM)
    run_in(tree, "-c", MENDED)


def test_group_of_upstreams_own_norm_is_left_alone(monkeypatch):
    """The group of upstream's own norm, which sums over all ranks, is left as it is."""
    from megatron_muon.mcore import fsdp_model, gradient_repairs

    class Upstream:
        grad_stats_parallel_group = "all ranks"

        def get_grad_norm(self):
            """Is its own, as in pull request 6489."""

    monkeypatch.setattr(fsdp_model, "is_v2", lambda model: True)
    chunk = SimpleNamespace(ddp_config=SimpleNamespace(use_megatron_fsdp=True))
    build = gradient_repairs.reduce_grad_norm_over_instances
    built = build(lambda config, chunks: Upstream(), None, [chunk])
    assert built.grad_stats_parallel_group == "all ranks"
