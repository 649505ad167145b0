# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that a version leaves for the tests of later ones.

From a checkout of a release, in ``tests/unit_tests``::

    PYTHONPATH=../../scripts python -m helpers.earlier_versions 0.1.0

writes ``checkpoint/data/0.1.0.tar.xz``: ``megatron`` is a ``--save`` folder of two ranks, ``flat``
and ``nested`` are FSDP2's. Paths in them are relative.
"""

import contextlib
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions

from helpers.commands import run_command
from helpers.fsdp2_models import draw_grads, save_state, small_model
from helpers.ranks import ROOT, UNIT_TESTS, run_ranks
from helpers.toy_gpt import BF16, ZERO, fsdp_toy_gpt

DATA = UNIT_TESTS / "checkpoint" / "data"
# Of the same version, with the moments of NorMuon that all ranks kept.
OF_NORMUON = DATA / "normuon_0.1.0.tar.xz"
# Second moments too.
FLAGS = (
    *BF16, *"--num-layers 1 --hidden-size 16 --ffn-hidden-size 24 --vocab-size 31".split(),
    *"--optimizer adaptive_muon --adaptive-muon-moment2-method adamuon".split(),
)  # fmt: skip
FORMS = {name: StateDictOptions(flatten_optimizer_state_dict=name == "flat")
         for name in ("flat", "nested")}  # fmt: skip


def build(method: str = "adamuon") -> tuple[Any, Any]:
    """Return a small model that FSDP2 has sharded, and its optimizer."""
    from megatron_muon.fsdp2 import MuonAdamW

    model = small_model(is_sharded=True)
    return model, MuonAdamW.from_model(model, adaptive=method)


def _save_fsdp2() -> None:
    dist.init_process_group("gloo")
    model, optimizer = build()
    for seed in range(2):
        draw_grads(model.parameters(), seed)
        optimizer.step()
    for name, options in FORMS.items():
        save_state(name, model, optimizer, options)


def _save_megatron(folder: Path) -> None:
    more = "--train-iters 3 --lr-decay-iters 20 --save-interval 3 --save megatron".split()
    more += ["--data-cache-path", "cache"]
    torchrun = (sys.executable, *"-m torch.distributed.run --nproc-per-node 2".split())
    scripts = [str(ROOT / "scripts" / name) for name in ("cpu_ranks", "pretrain_gpt.py")]
    run = run_command(*torchrun, *scripts, *fsdp_toy_gpt(ZERO[3], *FLAGS, *more), cwd=folder)
    if run.returncode:
        raise RuntimeError(run.stderr[-4000:])


def _without_owner(file: tarfile.TarInfo) -> tarfile.TarInfo:
    file.uid = file.gid = file.mtime = 0
    file.uname = file.gname = ""
    return file


def main() -> None:
    """Save, and pack."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run_ranks(2, _save_fsdp2).check()
        _save_megatron(Path(folder))
        with tarfile.open(DATA / f"{sys.argv[1]}.tar.xz", "w:xz") as archive:
            for name in (*FORMS, "megatron"):
                archive.add(name, filter=_without_owner)


if __name__ == "__main__":
    main()
