# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Scripts that users call: they train, resume and report.

docs/trainers.md says how to make an environment with the libraries of all recipes.
"""

import importlib.metadata
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from typing import Any

import byte_dataset
import learning_rate_sweep as sweep
import pytest
import quickstart
from helpers.commands import run_command, train_forked
from helpers.ranks import ROOT, run_ranks


def _run_script(name: str, *arguments: str) -> None:
    path = str(ROOT / "scripts" / name)
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


def _run_megatron_core(*arguments: str) -> None:
    import torch

    from megatron_muon.mcore.chained_optimizer import FSDPMuonChainedOptimizer

    original = FSDPMuonChainedOptimizer.step

    def step(self: Any) -> tuple[bool, torch.Tensor, Any]:
        """Return the norm as Transformer Engine's kernels leave it, of shape ``(1,)``."""
        is_done, norm, num_zeros = original(self)
        return is_done, torch.tensor([norm]), num_zeros

    FSDPMuonChainedOptimizer.step = step
    _run_script("train_megatron_core.py", *arguments)


@pytest.mark.ranks
@pytest.mark.megatron
def test_script_on_megatron_core_alone_learns():
    """The script learns, and prints norms that are tensors of one element."""
    output = run_ranks(2, _run_megatron_core, "--steps", "40").check().outputs[0]
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)  grad", output, re.M)]
    # From the logarithm of the vocabulary's size to almost nothing, on every rank's data.
    assert len(losses) == 5 and losses[0] > 3.5 and losses[-1] < 0.1


def _losses_of_fsdp2(num_ranks: int, *arguments: str) -> dict[int, float]:
    output = run_ranks(num_ranks, _run_script, "train_fsdp2.py", *arguments).check().outputs[0]
    found = re.findall(r"^step (\d+): loss (.*)$", output, re.M)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.ranks
@pytest.mark.slow
def test_script_of_fsdp2_learns_and_goes_on_on_other_ranks(tmp_path):
    """The script learns, and goes on with the same losses on another number of ranks."""
    expected = _losses_of_fsdp2(2, "--steps", "16")
    assert list(expected) == list(range(1, 17))
    assert expected[16] < 0.5 * expected[1]
    folder = ("--checkpoint", str(tmp_path / "saved"))
    before = _losses_of_fsdp2(2, "--steps", "12", *folder)
    after = _losses_of_fsdp2(4, "--steps", "16", *folder)
    assert list(after) == [13, 14, 15, 16]
    # Of four printed digits; sums over other ranks round differently.
    assert before | after == pytest.approx(expected, rel=1e-3)


WITHOUT_MEGATRON = """
import importlib.util
from helpers.ranks import run_ranks
assert run_ranks(2, importlib.util.find_spec, "megatron").check().results == [None, None]
"""


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.cpu_only
def test_ranks_start_without_megatron(tmp_path):
    """Ranks start where megatron is not installed."""
    # None is what Python documents for a module that shall not be found. Every process that the
    # tests start imports this file.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['megatron'] = None\n")
    paths = [str(tmp_path), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", WITHOUT_MEGATRON]
    subprocess.run(command, env=env, check=True, timeout=120)


# Script, libraries and arguments.
RECIPES = [
    ("with_accelerate", "accelerate", ()),
    ("with_trainer", "transformers accelerate", ()),
    (
        "with_trainer",
        "transformers accelerate",
        ("--form", "class", "--state-dict-type", "FULL_STATE_DICT"),
    ),
    ("with_trainer", "transformers accelerate", ("--form", "parameters")),
    ("with_trainer", "trl", ("--trainer", "trl", "--form", "parameters")),
    ("with_trainer", "axolotl", ("--trainer", "axolotl")),
    ("with_trainer", "ms-swift", ("--trainer", "ms-swift")),
    ("with_builder", "verl", ("--trainer", "verl")),
    ("with_builder", "nemo-automodel", ("--trainer", "automodel")),
    ("with_builder", "hydra-core", ("--trainer", "nemo-rl")),
    ("with_builder", "torchtitan", ("--trainer", "torchtitan")),
    ("with_lightning", "lightning", ()),
    ("with_megatron_fsdp", "megatron-fsdp", ()),
    ("with_peft", "peft", ()),
]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.cpu_only
@pytest.mark.parametrize(("script", "packages", "arguments"), RECIPES)
def test_recipe_trains_and_resumes(script, packages, arguments, tmp_path):
    """Each recipe of an installed trainer trains, and resumes with equal losses."""
    for package in packages.split():
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed")
    # With adamw it shows that the recipe itself is right.
    optimizer = os.environ.get("MEGATRON_MUON_TEST_RECIPES", "muon")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(ROOT / f"scripts/recipes/{script}.py")]
    folder = str(tmp_path / "saved")
    done = run_command(*command, "--optimizer", optimizer, "--folder", folder, *arguments)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "losses after loading: equal" in done.stdout


@pytest.mark.filterwarnings("ignore")
@pytest.mark.cpu_only
def test_dataset_reads_back_as_the_bytes_of_its_files(tmp_path):
    """Megatron's reader returns the bytes of every file and an end token, once."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    contents = {f"{i:02d}.txt": bytes((i + j) % 256 for j in range(3000 + i)) for i in range(60)}
    contents["empty.txt"] = b""
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = sorted(tmp_path.iterdir())
    prefix = byte_dataset.build_byte_dataset(files, tmp_path / "out", 10_000_000)
    tokens = [document.tolist() for document in IndexedDataset(str(prefix))]
    assert all(document[-1] == byte_dataset.END_OF_DOCUMENT for document in tokens)
    written = sorted(bytes(document[:-1]) for document in tokens)
    assert written == sorted(content for content in contents.values() if content)
    assert not list((tmp_path / "out").glob("*partial*"))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.cpu_only
def test_quickstart_trains_with_both_optimizers_and_reports(tmp_path, monkeypatch, capsys):
    """The quickstart trains both optimizers and reports, on a CPU without bf16 too."""
    flags = ("--iterations", "2", "--max-megabytes", "0.5", "--output", str(tmp_path))
    # Held to AVX2: any CPU then lacks bf16 instructions, without which it took ten minutes.
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    # Muon by torchrun, and Adam on forked ranks.
    trains = iter([quickstart.train, train_forked])
    monkeypatch.setattr(quickstart, "train", lambda *args, **kwargs: next(trains)(*args, **kwargs))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert quickstart.main(list(flags)) == 0
    runs = json.loads((tmp_path / "results.json").read_text())
    assert [run["optimizer"] for run in runs] == ["muon", "adam"]
    # Before the first update both are one model: bytes, seed and schedule are the same.
    assert runs[0]["losses"]["1"] == runs[1]["losses"]["1"]
    assert all(math.isfinite(x) for run in runs for x in run["losses"].values())
    assert (tmp_path / "results.md").read_text().strip() in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.cpu_only
def test_sweep_goes_on_and_draws(tmp_path, monkeypatch, capsys):
    """A sweep that goes on trains only what is missing, and draws all optimizers."""
    monkeypatch.setattr(sweep, "RATES", {name: rates[2:4] for name, rates in sweep.RATES.items()})
    monkeypatch.setattr(sweep, "SETTINGS", {"warm_up": (0.0, 0.1)})
    monkeypatch.setattr(sweep, "MUON_SETTINGS", {"momentum": (0.9, 0.95)})
    flags = f"--output {tmp_path} --steps 10 --widths 32 --seeds 0 --workers 1"
    monkeypatch.setattr(sys, "argv", ["learning_rate_sweep.py", *flags.split()])
    sweep.main()
    printed = capsys.readouterr().out
    assert all(f"| {name}, 32 |" in printed for name in (*sweep.RATES, sweep.SWITCH))
    picture = (tmp_path / "learning_rates.svg").read_text()
    assert all(color in picture for color in sweep.COLORS.values())
    file = tmp_path / "runs.jsonl"
    results = sweep.finished(file)
    # The second part trains 7 and 10 more runs.
    assert len(results) == 7 + 17
    assert all(len(results[run]["losses"]) == run.steps for run in results)
    assert {run.steps * run.batch for run in results} == {10 * sweep.BATCH, 40 * sweep.BATCH}
    # The switch changes the second half alone.
    (switch,) = (run for run in results if run.optimizer == sweep.SWITCH)
    switched, adamw = results[switch], results[switch._replace(optimizer="AdamW")]
    same = [one == other for one, other in zip(switched["losses"], adamw["losses"], strict=True)]
    assert all(same[:6]) and not any(same[6:])

    file.write_text("\n".join(file.read_text().splitlines()[1:]) + "\n")
    sweep.main()
    again = capsys.readouterr().out
    assert again.count("min: ") == 1

    # The second part alone, at the same rates, prints the same table.
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--settings"])
    monkeypatch.setattr(sweep, "BEST_AT_64", {"AdamW": 2e-3, "Muon, match_adamw": 4e-3})
    sweep.main()
    table = capsys.readouterr().out
    assert again.endswith(table) and "| momentum |  | 0.9: " in table


@pytest.mark.slow
@pytest.mark.cpu_only
def test_sweep_draws_soap_beside_others(tmp_path, monkeypatch, capsys):
    """The comparison with SOAP has a row and a curve for each optimizer."""
    rates = {name: rates[1:2] for name, rates in sweep.BESIDE_SOAP.items()}
    monkeypatch.setattr(sweep, "BESIDE_SOAP", rates)
    flags = f"--soap --output {tmp_path} --steps 3 --widths 32 --seeds 0 1 --workers 1"
    monkeypatch.setattr(sys, "argv", ["learning_rate_sweep.py", *flags.split()])
    sweep.main()
    printed, picture = capsys.readouterr().out, (tmp_path / "soap.svg").read_text()
    for name, (rate,) in rates.items():
        assert f"| {name}, 32 | {rate:g} |" in printed
        assert f"{name.partition(',')[0]}, learning rate {rate:g}" in picture
    assert "SOAP, steps to Muon's last loss: " in printed
    assert len(sweep.finished(tmp_path / "runs.jsonl")) == 6
