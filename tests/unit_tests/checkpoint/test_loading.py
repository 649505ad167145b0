# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What loads by Megatron's flags, and what is refused before anything is overwritten."""

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_runs import SCHEDULE, assert_same, gathered, resumed_run, saved_run
from helpers.ranks import Run, launch, run_ranks
from helpers.toy_gpt import BF16, ZERO, fsdp_toy_gpt

from megatron_muon.checkpoint.reading import TRACKER

pytestmark = pytest.mark.ranks

Z3 = ZERO[3]


@pytest.fixture(scope="module")
def muon(tmp_path_factory) -> tuple[Run, Path]:
    """A Muon run of two ranks and its folder; tests copy what they damage."""
    folder = tmp_path_factory.mktemp("muon") / "saved"
    return saved_run(2, folder, Z3, *BF16), folder


@pytest.fixture(scope="module")
def adam(tmp_path_factory) -> Path:
    """A folder that Adam saved."""
    folder = tmp_path_factory.mktemp("adam") / "saved"
    launch(2, _adam(Z3, *BF16, *SCHEDULE, "--save", str(folder), "--exit-interval", "5")).check()
    return folder


def _adam(sharding: str, *flags: str) -> list[str]:
    return fsdp_toy_gpt(sharding, "--optimizer", "adam", *flags)


def _load(folder: Path, *flags: str, **options) -> Run:
    """Load the checkpoint of iteration 5 and train one iteration."""
    arguments = [*BF16, *SCHEDULE, "--load", str(folder), "--ckpt-step", "5", *flags]
    return launch(2, fsdp_toy_gpt(Z3, *arguments, "--exit-interval", "6"), **options)


def watch_load(status: str) -> None:
    """Write for each rank whether parameters or state changed in a load that raised."""
    from megatron.training import training

    original = training.load_checkpoint

    def digest(optimizer) -> str:
        found = hashlib.sha256()
        for child in getattr(optimizer, "chained_optimizers", [optimizer]):
            for param in child.get_parameters():
                found.update(param._local_tensor.detach().numpy().tobytes())
                for value in child.optimizer.state.get(param, {}).values():
                    local = getattr(value, "_local_tensor", value)
                    # Adam makes its state, of zeros, on the way.
                    found.update(local.numpy().tobytes() if local.any() else b"")
        return found.hexdigest()

    @functools.wraps(original)
    def load_checkpoint(model, optimizer, *args, **kwargs):
        before = digest(optimizer)
        try:
            return original(model, optimizer, *args, **kwargs)
        except BaseException:
            rank = torch.distributed.get_rank()
            Path(f"{status}_{rank}").write_text(json.dumps(digest(optimizer) == before))
            raise

    training.load_checkpoint = load_checkpoint


def _assert_refused(run: Run, status: Path, *texts: str) -> None:
    """Every rank ended with status 1, the whole message, and all as it was."""
    assert run.exit_codes == [1, 1], run.outputs[0][-2000:]
    for rank, output in enumerate(run.outputs):
        for text in (*texts, "Nothing was loaded."):
            assert text in output, output[-3000:]
        assert json.loads(Path(f"{status}_{rank}").read_text()) is True
    assert run.history == []


def _copy(folder: Path, target: Path) -> Path:
    """Copy the checkpoint of iteration 5 and the tracker."""
    shutil.copytree(folder / "iter_0000005", target / "iter_0000005")
    (target / TRACKER).write_text("5")
    return target


def _truncate(path: Path, num_bytes: int = 100) -> None:
    os.truncate(path, path.stat().st_size - num_bytes)


NO_TEXT = "expected the tracker of a --save folder, got no such file. Finished in"
INNER = "iter_0000005"
DATA, TABLE = f"{INNER}/__1_*.distcp", f"{INNER}/.metadata"
# The place in a copy, what is done there, whether --ckpt-step 5 is passed, and the text to expect.
DAMAGES: dict[str, tuple[str, Callable[[Path], object], bool, str]] = {
    "without_metadata": (TABLE, Path.unlink, True, "iter_0000005: expected a finished checkpoint"),
    "without_a_file": (DATA, Path.unlink, True, ".distcp: expected a file, got none"),
    "truncated": (DATA, _truncate, True, ".distcp: expected "),
    "damaged_metadata": (TABLE, _truncate, True, ".metadata: expected the metadata of torch.dist"),
    "torch_format": (
        INNER,
        lambda path: (path / ".metadata").rename(path / "mp_rank_00"),
        True,
        "expected the format fsdp_dtensor, got torch.",
    ),
    "torch_dist_format": (
        INNER,
        lambda path: (path / "metadata.json").write_text("{}"),
        True,
        "expected the format fsdp_dtensor, got torch_dist.",
    ),
    "empty_tracker": (
        TRACKER,
        lambda path: path.write_text(""),
        False,
        "expected an iteration or 'release', got ''. Finished in",
    ),
    "tracker_of_another": (
        TRACKER,
        lambda path: path.write_text("7"),
        False,
        "iter_0000007: expected a checkpoint, got no such folder. Finished in",
    ),
    "no_tracker": (TRACKER, Path.unlink, False, NO_TEXT),
    "release": (
        TRACKER,
        lambda path: path.write_text("release"),
        True,
        "expected an iteration beside --ckpt-step 5, got 'release'",
    ),
}


# What one rank of two meets alone.
UNSEEN, FORBIDDEN = "unseen", "forbidden"


def _open_each(folders: dict[str, str], steps: dict[str, int | None]) -> dict[str, str]:
    """Open every folder on two ranks as Megatron's load does, and return what is said."""
    from types import SimpleNamespace

    import torch.distributed as dist

    from megatron_muon.mcore import checkpoint_load as loading

    dist.init_process_group("gloo")
    loaded: list[str] = []
    load = loading.find_before_loading(lambda folder, *rest, **options: loaded.append(folder))
    kept = loading.find_misfits, loading._open
    found = {}
    for name, folder in folders.items():
        if dist.get_rank() == 1 and name == FORBIDDEN:
            loading.find_misfits = _forbid
        if dist.get_rank() == 1 and name == UNSEEN:
            loading._open = lambda folder, iteration: None
        args = SimpleNamespace(use_megatron_fsdp=True, ckpt_step=steps[name])
        try:
            load(folder, args, True)
            found[name] = "loaded"
        except RuntimeError as error:
            found[name] = str(error)
        loading.find_misfits, loading._open = kept
    # Ranks meet here after each refusal, and the sound checkpoint is loaded.
    return found | {"loaded": ", ".join(loaded)}


def _forbid(*args: object) -> None:
    raise PermissionError("not allowed")


@pytest.fixture(scope="module")
def opened(muon, tmp_path_factory) -> list[dict[str, str]]:
    """What each rank says of every damaged checkpoint."""
    folders, steps = {}, {}
    for name, (place, damage, has_step, _) in DAMAGES.items():
        folder = _copy(muon[1], tmp_path_factory.mktemp(name))
        damage(next(folder.glob(place)))
        folders[name], steps[name] = str(folder), 5 if has_step else None
    for name in (UNSEEN, FORBIDDEN, "sound"):
        folders[name], steps[name] = str(muon[1]), 5
    folders["one_checkpoint"], steps["one_checkpoint"] = str(muon[1] / "iter_0000005"), 5
    return run_ranks(2, _open_each, folders, steps).check().results


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoint_is_refused_before_anything_is_loaded(name, opened):
    """By all ranks, naming the file, also where one rank alone reads the damaged one.

    Upstream ends with status 0 for an empty tracker, and trains from random weights without one.
    """
    _, _, has_step, text = DAMAGES[name]
    for said in opened:
        assert text in said[name]
        assert "Nothing was loaded." in said[name]
        assert "--ckpt-step" in said[name] or has_step


def test_sound_checkpoint_is_opened_and_what_one_rank_meets_is_raised_by_all(muon, opened):
    """Ranks that wait for one another's verdict would wait for ever.

    In the folder of one checkpoint, upstream looks for a tracker, and trains from random weights.
    """
    for said in opened:
        assert said["sound"] == "loaded" and said["loaded"] == str(muon[1])
        assert "expected a --save folder, got that of one checkpoint" in said["one_checkpoint"]
        assert "rank 1: PermissionError: not allowed" in said[FORBIDDEN]
        assert "rank 1 has 'none' where rank 0 has 'iter_0000005, __0_" in said[UNSEEN]


@pytest.fixture(scope="module")
def plain_losses(muon) -> list[float]:
    """Losses of a run that loads the checkpoint with its own flags."""
    return _load(muon[1]).check().losses


@pytest.mark.slow
def test_arguments_come_from_the_checkpoint(muon, plain_losses):
    """--use-checkpoint-args reads it before there is a process group."""
    run = _load(muon[1], "--use-checkpoint-args").check()
    assert run.losses == plain_losses
    gone = launch(
        2, fsdp_toy_gpt(Z3, *BF16, "--load", str(muon[1] / "iter_0000005"), "--use-checkpoint-args")
    )
    assert gone.exit_codes == [1, 1]
    assert "expected a --save folder" in gone.outputs[0]


def test_other_model_is_refused(muon, tmp_path):
    """Through the launcher: every rank names the tensors, and nothing is loaded."""
    status = tmp_path / "status"
    flags = ("--ffn-hidden-size", "64")
    run = _load(muon[1], *flags, before=functools.partial(watch_load, str(status)))
    _assert_refused(run, status, "linear_fc2: expected weight (32, 64), got weight (32, 56)")


def test_checkpoint_of_bf16_is_refused_in_fp32(muon, tmp_path):
    """Upstream names optimizer state by the wrapper of bf16 models; weights alone load."""
    status = tmp_path / "status"
    flags = [*SCHEDULE, "--load", str(muon[1]), "--ckpt-step", "5", *BF16[1:]]
    run = launch(2, fsdp_toy_gpt(Z3, *flags), before=functools.partial(watch_load, str(status)))
    _assert_refused(run, status, "linear_fc2.weight: expected momentum_buffer (32, 56), got n")


@pytest.mark.slow
def test_adams_checkpoint_is_refused_by_muon(adam, tmp_path):
    """Naming what was expected and found, and the way out."""
    status = tmp_path / "status"
    run = _load(adam, before=functools.partial(watch_load, str(status)))
    _assert_refused(
        run,
        status,
        "linear_fc1.weight_w: expected momentum_buffer (56, 32), got exp_avg (56, 32), exp_avg_sq",
        "was saved with --optimizer adam, this run has --optimizer muon",
        "--no-load-optim",
    )


@pytest.mark.slow
def test_missing_momentum_is_refused(tmp_path):
    """A checkpoint without optimizer state once named every state, and neither flag nor reason."""
    folder, status = tmp_path / "saved", tmp_path / "status"
    flags = [*BF16, *SCHEDULE, "--save", str(folder), "--no-save-optim", "--exit-interval", "5"]
    launch(2, fsdp_toy_gpt(Z3, *flags)).check()
    run = _load(folder, before=functools.partial(watch_load, str(status)))
    text = (
        "expected optimizer state, got none, as --no-save-optim leaves it out. Pass --no-load-optim"
    )
    _assert_refused(run, status, text)
    assert "expected momentum_buffer" not in run.outputs[0]
    assert "momentum starts at zero" in _load(folder, "--no-load-optim").check().outputs[0]


@pytest.mark.parametrize("flags", [("--no-load-optim",), ("--finetune",)])
@pytest.mark.slow
def test_weights_alone_load_with_every_bit(flags, muon, tmp_path):
    """bf16: main weights stay those of the checkpoint, and momentum starts at zero, which is said.

    Upstream raises NotImplementedError here.
    """
    run = resumed_run(2, muon[1], tmp_path / "b", Z3, *BF16, *flags, "--exit-interval", "6")
    run.check()
    assert "loading weights without optimizer state" in run.outputs[0]
    assert "momentum starts at zero" in run.outputs[0]
    if "--finetune" in flags:
        return  # begins at iteration 0, before which nothing is gathered
    found, expected = gathered(tmp_path / "b", 2), gathered(muon[1], 2)
    params = {name for name in expected if name.endswith(".param")}
    assert_same({n: found[n] for n in params}, {n: expected[n] for n in params})
    assert all(bool((found[n] == 0).all()) for n in found.keys() - params)


@pytest.mark.slow
def test_weights_of_adam_start_a_muon_run(adam):
    """--finetune takes weights from another optimizer's checkpoint, and begins at iteration 0."""
    run = _load(adam, "--finetune").check()
    assert "momentum starts at zero" in run.outputs[0]
    assert [record["iteration"] for record in run.history] == list(range(1, 7))


@pytest.mark.slow
def test_load_of_an_empty_folder_is_a_fresh_run(muon, tmp_path):
    """Upstream takes a dummy step then, which decays weights; here losses are the fresh run's."""
    flags = [*BF16, *SCHEDULE, "--load", str(tmp_path), "--exit-interval", "3"]
    run = launch(2, fsdp_toy_gpt(Z3, *flags)).check()
    assert run.losses == muon[0].losses[:3]
    adam = _adam(Z3, *BF16, *SCHEDULE, "--exit-interval", "3")
    assert launch(2, [*adam, "--load", str(tmp_path)]).check().losses == launch(2, adam).losses


@pytest.mark.slow
def test_pretrained_checkpoint_loads_without_load(muon):
    """Upstream joins a path with None."""
    flags = [*BF16, *SCHEDULE, "--pretrained-checkpoint", str(muon[1]), "--exit-interval", "1"]
    run = launch(2, fsdp_toy_gpt(Z3, *flags)).check()
    # Weights of the last iteration, on the data of the first.
    assert run.losses[0] < muon[0].losses[0] - 0.3
    assert "momentum starts at zero" in run.outputs[0]


def _learning_rate(run: Run) -> float:
    line = next(line for line in run.outputs[-1].splitlines() if "learning rate:" in line)
    return float(line.partition("learning rate:")[2].split("|")[0])


@pytest.mark.slow
def test_schedule_flags_choose_between_run_and_checkpoint(muon, plain_losses):
    """--override-opt_param-scheduler takes this run's --lr, --use-checkpoint-... the saved one."""
    other = ("--lr", "1e-3")
    kept = _load(muon[1], *other, "--use-checkpoint-opt_param-scheduler").check()
    assert kept.losses == plain_losses
    overridden = _load(muon[1], *other, "--override-opt_param-scheduler").check()
    assert _learning_rate(overridden) < 0.6 * _learning_rate(kept)
    assert "do not match" in _load(muon[1], *other).outputs[0]


def test_changed_momentum_flag_holds_and_is_said(muon):
    """The checkpoint does not silently undo --muon-momentum."""
    run = _load(muon[1], "--muon-momentum", "0.5").check()
    text = "optimizer settings of this run differ from the checkpoint's and hold: momentum 0.5"
    assert text in run.outputs[0]
