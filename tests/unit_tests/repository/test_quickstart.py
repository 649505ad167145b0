# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The quickstart: its data set, its flags, and one call of all."""

import json
import math
import signal
from pathlib import Path

import byte_dataset
import pytest
import quickstart
from helpers.commands import train_forked


@pytest.mark.filterwarnings("ignore")
def test_dataset_reads_back_as_the_bytes_of_its_files(tmp_path: Path) -> None:
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
def test_quickstart_trains_with_both_optimizers_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The quickstart trains both optimizers and reports, on a CPU without bf16 too."""
    flags = ("--iterations", "2", "--max-megabytes", "0.5", "--output", str(tmp_path))
    # Held to AVX2: any CPU then lacks bf16 instructions.
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
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
