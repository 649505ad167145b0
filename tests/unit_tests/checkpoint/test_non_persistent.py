# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""``--non-persistent-ckpt-type global``: a run goes on from the newer of two checkpoints."""

import argparse
from pathlib import Path

import pytest
from helpers.checkpoint_runs import TRACKER, loadable
from helpers.ranks import launch
from helpers.toy_gpt import BF16, FSDP2, ZERO, fsdp_toy_gpt, slow

from megatron_muon.mcore.non_persistent import delete_untracked, keep_tracked, load_newer

FLAGS = "--lr-decay-iters 20 --save-interval 3".split()
GLOBAL = "--non-persistent-ckpt-type global --non-persistent-save-interval 1".split()


@pytest.mark.ranks
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="muon"),
        slow(("--async-save", "--optimizer", "adam"), id="adam_async"),
        slow((*FSDP2, "--async-save"), id="fsdp2_async"),
        slow(("--async-save", "--save-retain-interval", "6"), id="muon_async_retained"),
    ],
)
def test_run_resumes_from_the_newer_checkpoint(flags, tmp_path):
    """Upstream saves these checkpoints as fsdp_dtensor, and fails to load them as torch_dist."""
    common = [*BF16, *FLAGS, *flags, "--save", str(tmp_path)]
    # Without the flags of saves.
    whole = [*BF16, *FLAGS, *(flag for flag in flags if "-save" not in flag and flag != "6")]
    first = [*common, *GLOBAL, "--exit-interval", "5"]
    launch(2, fsdp_toy_gpt(ZERO[3], *first)).check()
    assert (loadable(tmp_path), loadable(tmp_path / "non_persistent")) == (3, 5)
    # At most the finished one, and that of the save before.
    assert len(list((tmp_path / "non_persistent").glob("iter_*"))) == 2
    load = [*GLOBAL, "--use-checkpoint-args", "--load", str(tmp_path)]
    resumed = launch(2, fsdp_toy_gpt(ZERO[3], *common, *load)).check()
    assert [record["iteration"] for record in resumed.history] == [6, 7, 8]
    expected = launch(2, fsdp_toy_gpt(ZERO[3], *whole)).check()
    assert resumed.losses == expected.losses[5:]
    assert loadable(tmp_path) == 8


def _folder(path: Path, tracked: str | None, *iterations: int) -> Path:
    """Make a folder with a tracker and checkpoints."""
    path.mkdir(parents=True)
    if tracked is not None:
        (path / TRACKER).write_text(tracked)
    for iteration in iterations:
        (path / f"iter_{iteration:07d}").mkdir()
    return path


@pytest.mark.parametrize(
    ("persistent", "other", "chosen", "step"),
    [
        ("3", "5", "other", None),
        ("5", "5", "persistent", None),
        ("7", "5", "persistent", None),
        ("3", "5", "persistent", 2),
        (None, "5", "other", None),
        ("3", None, "persistent", None),
        ("release", "5", "other", None),
        # It is refused by name then.
        ("3", "half", "other", None),
    ],
)
@pytest.mark.parametrize("is_inside", [True, False])
def test_newer_folder_is_loaded(persistent, other, chosen, step, is_inside, tmp_path):
    """Trackers decide; a rewind by --ckpt-step reads --load, and settings are as before after."""
    load = _folder(tmp_path / "persistent", persistent)
    own = _folder(load / "non_persistent" if is_inside else tmp_path / "other", other)
    args = argparse.Namespace(
        use_megatron_fsdp=True,
        non_persistent_ckpt_type="global",
        non_persistent_global_ckpt_dir=None if is_inside else str(own),
        load=str(load),
        ckpt_step=step,
    )
    before = dict(vars(args))

    def original(args: argparse.Namespace) -> tuple[str, None]:
        return args.load, args.non_persistent_ckpt_type

    expected = {"persistent": str(load), "other": str(own)}[chosen]
    assert load_newer(original, args) == (expected, None)
    assert vars(args) == before


def test_cleanup_keeps_the_tracked_checkpoint(tmp_path):
    """After a killed save, the next one deletes the only finished checkpoint upstream."""
    kept: list[int] = []

    def original(save_dir: str, leave_ckpt_num: int, do_async: bool) -> None:
        kept.append(leave_ckpt_num)

    killed = _folder(tmp_path / "killed", "4", 3, 4, 5)
    rewound = _folder(tmp_path / "rewound", "6", 5, 6, 10)
    for folder in (killed, rewound, _folder(tmp_path / "first", None, 1), tmp_path / "none"):
        keep_tracked(original, str(folder))
    assert kept == [2, 2, 1, 1]


def test_retention_keeps_the_tracked_checkpoint(tmp_path):
    """The latest checkpoint of --save is not deleted by a non-persistent save with its number."""
    deleted: list[int] = []
    folder = _folder(tmp_path / "saved", "6", 3, 6)
    for iteration in (3, 6):
        delete_untracked(lambda _, number: deleted.append(number), str(folder), iteration)
    assert deleted == [3]
