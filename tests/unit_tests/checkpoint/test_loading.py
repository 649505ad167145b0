# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Loads by Megatron's flags, and refusals before anything is overwritten."""

import functools
import json
import os
import pickle
import shutil
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.checkpoint_runs import (
    SAVED_AT,
    SCHEDULE,
    assert_same,
    digest,
    gathered,
    resumed_run,
    saved_run,
    wrap,
)
from helpers.ranks import Run, launch, run_ranks
from helpers.toy_gpt import BF16, ZERO, fsdp_toy_gpt, slow
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_muon.mcore.checkpoint_folders import TRACKER
from megatron_muon.mcore.checkpoint_reading import StoredCheckpoint

pytestmark = pytest.mark.ranks

Z3 = ZERO[3]
TRAIN = [*BF16, *SCHEDULE]
INNER, NEXT = f"iter_{SAVED_AT:07d}", SAVED_AT + 1
ONE_MORE = ("--exit-interval", str(NEXT))
ADAM = ("--optimizer", "adam")


@pytest.fixture(scope="module")
def muon(tmp_path_factory) -> tuple[Run, Path]:
    """A Muon run of two ranks and its folder; tests copy what they damage."""
    folder = tmp_path_factory.mktemp("muon") / "saved"
    return saved_run(2, folder, Z3, *BF16), folder


@pytest.fixture(scope="module")
def saved_with(tmp_path_factory) -> Callable[..., Path]:
    """A function that saves a run with other flags, once, and returns its folder."""

    @functools.cache
    def save(*flags: str) -> Path:
        folder = tmp_path_factory.mktemp("other") / "saved"
        arguments = [*TRAIN, *flags, "--save", str(folder), "--exit-interval", str(SAVED_AT)]
        launch(2, fsdp_toy_gpt(Z3, *arguments)).check()
        return folder

    return save


def _load(folder: Path, *flags: str, train: Sequence[str] = TRAIN, **options) -> Run:
    arguments = [*train, "--load", str(folder), "--ckpt-step", str(SAVED_AT), *flags]
    return launch(2, fsdp_toy_gpt(Z3, *arguments, *ONE_MORE), **options)


def watch_load(status: str) -> None:
    """Write for each rank whether parameters or state changed in a load that raised."""
    from megatron.training import training

    def load(original: Callable, model: object, optimizer: object, *args, **kwargs) -> object:
        before = digest(optimizer)
        try:
            return original(model, optimizer, *args, **kwargs)
        except BaseException:
            is_unchanged = digest(optimizer) == before
            Path(f"{status}_{dist.get_rank()}").write_text(json.dumps(is_unchanged))
            raise

    wrap(training, "load_checkpoint", load)


def _copy(folder: Path, target: Path) -> Path:
    shutil.copytree(folder / INNER, target / INNER)
    (target / TRACKER).write_text(str(SAVED_AT))
    return target


def _truncate(path: Path, num_bytes: int = 100) -> None:
    os.truncate(path, path.stat().st_size - num_bytes)


def _drop_a_chunk(path: Path) -> None:
    """Leave a part of a tensor out of the table, which torch would not load, without an error."""
    metadata = pickle.loads(path.read_bytes())
    values = metadata.state_dict_metadata.values()
    next(v for v in values if isinstance(v, TensorStorageMetadata)).chunks.pop()
    path.write_bytes(pickle.dumps(metadata))


def _write(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


DATA, TABLE = f"{INNER}/__1_*.distcp", f"{INNER}/.metadata"
NO_FORMAT = "expected the format fsdp_dtensor, got"
# The place in a copy, what is done there, whether --ckpt-step is passed, and the text to expect.
DAMAGES: dict[str, tuple[str, Callable[[Path], object], bool, str]] = {
    "without_metadata": (TABLE, Path.unlink, True, f"{INNER}: expected a finished checkpoint"),
    "damaged_metadata": (TABLE, _truncate, True, ".metadata: expected the metadata of torch.dist"),
    "without_a_chunk": (TABLE, _drop_a_chunk, True, "that do not fill it"),
    "torch_format": (TABLE, lambda p: p.rename(p.with_name("mp_rank_00")), True, NO_FORMAT),
    "torch_dist_format": (
        INNER,
        lambda path: (path / "metadata.json").write_text("{}"),
        True,
        f"{NO_FORMAT} torch_dist",
    ),
    "empty_tracker": (TRACKER, _write(""), False, "expected an iteration or 'release', got ''"),
    "tracker_of_another": (TRACKER, _write("7"), False, "iter_0000007: expected a checkpoint"),
    "no_tracker": (TRACKER, Path.unlink, False, "expected the tracker of a --save folder, got no"),
    "release": (TRACKER, _write("release"), True, f"beside --ckpt-step {SAVED_AT}, got 'release'"),
}


# What one rank of two meets alone.
UNSEEN, FORBIDDEN = "unseen", "forbidden"


def _open_each(folders: dict[str, str], steps: dict[str, int | None]) -> dict[str, str]:
    """Open every folder on two ranks as Megatron's load does, and return what is said."""
    from megatron_muon.mcore import checkpoint_load as loading

    dist.init_process_group("gloo")
    loaded: list[str] = []
    original = lambda folder, *rest, **options: loaded.append(folder)  # noqa: E731
    load = functools.partial(loading.find_before_loading, original)
    kept = loading._locate
    found = {}
    for name, folder in folders.items():
        if dist.get_rank() == 1 and name == FORBIDDEN:
            loading._locate = _forbid
        if dist.get_rank() == 1 and name == UNSEEN:
            loading._locate = lambda folder, iteration: None
        args = types.SimpleNamespace(use_megatron_fsdp=True, ckpt_step=steps[name])
        try:
            load(folder, args, True)
            found[name] = "loaded"
        except RuntimeError as error:
            found[name] = str(error)
        loading._locate = kept
    # Ranks meet here after each refusal, and the sound checkpoint is loaded.
    return found | {"loaded": ", ".join(loaded)}


def _forbid(*args: object) -> None:
    raise PermissionError("not allowed")


def test_damaged_checkpoint_is_refused_before_anything_is_loaded(muon, tmp_path):
    """All ranks refuse a damaged checkpoint by the name of its file, where upstream trains on."""
    folders, steps = {}, {}
    for name, (place, damage, has_step, _) in DAMAGES.items():
        folder = _copy(muon[1], tmp_path / name)
        damage(next(folder.glob(place)))
        folders[name], steps[name] = str(folder), SAVED_AT if has_step else None
    for name in (UNSEEN, FORBIDDEN, "sound", "one_checkpoint"):
        inner = INNER if name == "one_checkpoint" else ""
        folders[name], steps[name] = str(muon[1] / inner), SAVED_AT
    for said in run_ranks(2, _open_each, folders, steps).check().results:
        for name, (_, _, has_step, text) in DAMAGES.items():
            assert text in said[name]
            assert "Nothing was loaded." in said[name]
            assert "--ckpt-step" in said[name] or has_step
        # Ranks that wait for one another's verdict would wait for ever.
        assert said["sound"] == "loaded" and said["loaded"] == str(muon[1])
        assert "expected a --save folder, got that of one checkpoint" in said["one_checkpoint"]
        assert "rank 1: PermissionError: not allowed" in said[FORBIDDEN]
        assert f"rank 1 has 'none' where rank 0 has '{INNER}, " in said[UNSEEN]


@pytest.mark.parametrize("damage", [_truncate, slow(Path.unlink)])
def test_damaged_file_ends_the_load_on_all_ranks(damage, muon, tmp_path):
    """A file that is truncated or missing ends all ranks with the command that finds it."""
    folder = _copy(muon[1], tmp_path / "damaged")
    damage(next(folder.glob(DATA)))
    run = _load(folder)
    assert run.exit_codes == [1, 1] and run.history == []
    for output in run.outputs:
        assert "CheckpointException ranks:dict_keys(" in output
        assert f"megatron_muon.checkpoint verify {folder / INNER}` names it" in output


@pytest.fixture(scope="module")
def plain_losses(muon) -> list[float]:
    """Losses of a run that loads the checkpoint with its own flags."""
    return _load(muon[1]).check().losses


@pytest.mark.slow
def test_arguments_come_from_the_checkpoint(muon, plain_losses):
    """--use-checkpoint-args reads the checkpoint before there is a process group."""
    run = _load(muon[1], "--use-checkpoint-args").check()
    assert run.losses == plain_losses
    gone = launch(
        2, fsdp_toy_gpt(Z3, *BF16, "--load", str(muon[1] / INNER), "--use-checkpoint-args")
    )
    assert gone.exit_codes == [1, 1]
    assert "expected a --save folder" in gone.outputs[0]


OTHER, IN_FP32, NO_STATE = ("--ffn-hidden-size", "64"), [*SCHEDULE, *BF16[1:]], ("--no-save-optim",)
# Flags of the run that saved, of the training that loads, more of them, and the texts.
REFUSED = [
    pytest.param((), TRAIN, OTHER, ["linear_fc2.weight: expected (32, 64)"], id="other_model"),
    # Upstream names optimizer state by the wrapper of bf16 models; weights alone load.
    pytest.param(
        (), IN_FP32, (), ["fc2.weight.momentum_buffer: expected (32, 56)"], id="bf16_in_fp32"
    ),
    slow(
        ADAM,
        TRAIN,
        (),
        [
            "linear_fc1.weight_w.momentum_buffer: expected (56, 32), got nothing",
            "--no-load-optim",
        ],
        id="adam",
    ),
    # It once named every state, and no flag.
    slow(NO_STATE, TRAIN, (), ["or its state is missing, --no-load-optim"], id="no_momentum"),
]


@pytest.mark.parametrize(("saved_by", "train", "flags", "texts"), REFUSED)
def test_checkpoint_that_does_not_fit_is_refused(
    saved_by, train, flags, texts, muon, saved_with, tmp_path
):
    """Every rank ends with status 1, names tensors and flags, and has all as it was."""
    folder, status = saved_with(*saved_by) if saved_by else muon[1], tmp_path / "status"
    before = functools.partial(watch_load, str(status))
    run = _load(folder, *flags, train=train, before=before)
    assert run.exit_codes == [1, 1], run.outputs[0][-2000:]
    for rank, output in enumerate(run.outputs):
        for text in (*texts, "Nothing was loaded."):
            assert text in output, output[-3000:]
        assert json.loads(Path(f"{status}_{rank}").read_text()) is True
    assert run.history == []


@pytest.mark.slow
def test_weights_alone_load_with_every_bit(muon, tmp_path):
    """Main weights of bf16 load without state, and a message says that momentum starts at zero."""
    flags = (*BF16, "--no-load-optim", *ONE_MORE)
    run = resumed_run(2, muon[1], tmp_path / "b", Z3, *flags).check()
    assert "loading weights without optimizer state" in run.outputs[0]
    assert "momentum starts at zero" in run.outputs[0]
    found, expected = gathered(tmp_path / "b", 2), gathered(muon[1], 2)
    params = {name for name in expected if name.endswith(".param")}
    assert_same({n: found[n] for n in params}, {n: expected[n] for n in params})
    assert all(bool((found[n] == 0).all()) for n in found.keys() - params)


@pytest.mark.parametrize(
    ("saved_by", "flag", "first"),
    [(ADAM, "--finetune", 1), (NO_STATE, "--no-load-optim", NEXT)],
)
@pytest.mark.slow
def test_weights_of_others_start_a_muon_run(saved_by, flag, first, saved_with):
    """Weights of another optimizer, or saved without state, start a run of Muon."""
    run = _load(saved_with(*saved_by), flag).check()
    assert "momentum starts at zero" in run.outputs[0]
    assert [record["iteration"] for record in run.history] == list(range(first, NEXT + 1))


@pytest.mark.slow
def test_load_of_an_empty_folder_is_a_fresh_run(muon, tmp_path):
    """A run that finds no checkpoint is a fresh one, without upstream's dummy step."""
    fresh = fsdp_toy_gpt(Z3, *TRAIN, "--exit-interval", "3")
    empty = ("--load", str(tmp_path))
    assert launch(2, [*fresh, *empty]).check().losses == muon[0].losses[:3]
    adam = [*fresh, *ADAM]
    assert launch(2, [*adam, *empty]).check().losses == launch(2, adam).losses


@pytest.mark.slow
def test_pretrained_checkpoint_loads_beside_an_empty_folder(muon, tmp_path):
    """--pretrained-checkpoint loads weights where --load names a folder without a checkpoint."""
    flags = ("--load", str(tmp_path), "--pretrained-checkpoint", str(muon[1]))
    run = launch(2, fsdp_toy_gpt(Z3, *TRAIN, *flags, "--exit-interval", "1")).check()
    # Weights of the last iteration, on the data of the first.
    assert run.losses[0] < muon[0].losses[0] - 0.15
    assert "momentum starts at zero" in run.outputs[0]


def _learning_rate(run: Run) -> float:
    line = next(line for line in run.outputs[-1].splitlines() if "learning rate:" in line)
    return float(line.partition("learning rate:")[2].split("|")[0])


@pytest.mark.slow
def test_schedule_flags_choose_between_run_and_checkpoint(muon, plain_losses):
    """The flags of the schedule choose between this run's --lr and the saved one."""
    other = ("--lr", "1e-3")
    kept = _load(muon[1], *other, "--use-checkpoint-opt_param-scheduler").check()
    assert kept.losses == plain_losses
    overridden = _load(muon[1], *other, "--override-opt_param-scheduler").check()
    assert _learning_rate(overridden) < 0.6 * _learning_rate(kept)
    assert "do not match" in _load(muon[1], *other).outputs[0]


def test_changed_momentum_flag_holds_and_is_said(muon):
    """--muon-momentum of this run holds, and a message names the checkpoint's."""
    run = _load(muon[1], "--muon-momentum", "0.5").check()
    text = "optimizer settings of this run differ from the checkpoint's and hold: momentum 0.5"
    assert text in run.outputs[0]


WORDS, HALF = "embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight_w"
SHAPES = {WORDS: (96, 32), HALF: (56, 32)} | {
    f"decoder.layers.{layer}.mlp.linear_fc2.weight": (32, 56) for layer in (0, 1)
}
STATE_OF_ADAM = ("exp_avg", "exp_avg_sq", "step")
type Shapes = dict[str, tuple[int, ...]]


def _saved(shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Return keys and shapes of weights, of Muon's momentum, and of Adam's state of the words."""
    found: Shapes = {f"model.{name}": shape for name, shape in shapes.items()}
    for name, shape in shapes.items():
        for kind in STATE_OF_ADAM if name == WORDS else ("momentum_buffer",):
            found[f"optimizer.state.{name}.{kind}"] = () if kind == "step" else shape
    return found


FC2 = "decoder.layers.{}.mlp.linear_fc2.weight"
EXPERT = "model.decoder.layers.0.mlp.experts.linear_fc2.weight{}"
EXPERTS: Shapes = {EXPERT.format(number): (32, 56) for number in range(2)}
SAVED = _saved(SHAPES)
# What a run wants, and what is said.
DIFFERENCES: dict[str, tuple[Shapes, tuple[str, ...]]] = {
    "same model": (SAVED, ()),
    # Another --ffn-hidden-size, and a vocabulary padded to another multiple.
    "shapes": (
        _saved(SHAPES | {FC2.format(0): (32, 64), WORDS: (128, 32)}),
        (
            "layers.0.mlp.linear_fc2.weight: expected (32, 64), got (32, 56)",
            "embedding.word_embeddings.weight: expected (128, 32), got (96, 32)",
        ),
    ),
    "fewer layers": (
        _saved({name: shape for name, shape in SHAPES.items() if "layers.1." not in name}),
        ("model.decoder.layers.1.mlp.linear_fc2.weight: expected nothing, got (32, 56)",),
    ),
    "more layers": (
        _saved(SHAPES | {FC2.format(2): (32, 56)}),
        ("model.decoder.layers.2.mlp.linear_fc2.weight: expected (32, 56), got nothing",),
    ),
    "lion": (
        {k: shape for k, shape in SAVED.items() if not k.endswith((".exp_avg_sq", ".step"))},
        (f"{WORDS}.exp_avg_sq: expected nothing, got (96, 32)",),
    ),
    "adam": (
        {k.replace("momentum_buffer", of): x for k, x in SAVED.items() for of in STATE_OF_ADAM},
        (f"{HALF}.exp_avg: expected (56, 32), got nothing",),
    ),
    # Each of two ranks wants its own; more than the model has are named.
    "4 experts": (SAVED | EXPERTS, ()),
    "2 experts": (SAVED | EXPERTS, ("linear_fc2.weight2: expected nothing, got (32, 56)",)),
}


def _named_differences() -> dict[str, str]:
    from megatron_muon.mcore.checkpoint_load import find_differences

    dist.init_process_group("gloo")
    named = {}
    for case, (wanted, _) in DIFFERENCES.items():
        saved = SAVED
        if "experts" in case:
            saved = saved | {EXPERT.format(number): (32, 56) for number in range(4)}
        if case == "4 experts" and dist.get_rank() == 1:
            others = {EXPERT.format(number): (32, 56) for number in (2, 3)}
            wanted = {key: shape for key, shape in wanted.items() if key not in EXPERTS} | others
        stored = {
            key: TensorStorageMetadata(TensorProperties(), torch.Size(shape), [])
            for key, shape in saved.items()
        }
        checkpoint = StoredCheckpoint(Path(), Metadata(stored))
        named[case] = "; ".join(find_differences(checkpoint, wanted))
    return named


def test_differences_are_named():
    """Differences of shapes, layers and states between run and checkpoint are named."""
    # On ranks, which have imported megatron.
    for named in run_ranks(2, _named_differences).check().results:
        for case, (_, texts) in DIFFERENCES.items():
            assert all(text in named[case] for text in texts), (case, named[case])
            assert texts or not named[case]
