# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""``--optimizer-cpu-offload``: the run without it, with less memory of the device in between."""

from typing import Any

import pytest
import torch
from helpers.checkpoint_runs import LAST, after_enable, wrap
from helpers.fsdp2_models import stored
from helpers.ranks import launch
from helpers.toy_gpt import (
    BF16,
    EP,
    HSDP,
    NO_NESTEROV,
    PP,
    TP,
    ZERO,
    fsdp_toy_gpt,
    slow,
)
from torch.multiprocessing.reductions import StorageWeakRef

pytestmark = pytest.mark.ranks

# Evaluations, and a save in the middle and at the end.
SCHEDULE = (
    f"--train-iters {LAST} --lr-decay-iters 20 --eval-interval 2 --eval-iters 1 --save-interval 3"
).split()
OFFLOAD = ("--optimizer-cpu-offload", "--async-save")
SOAP = ("--optimizer", "soap", "--lr", "2e-3", "--min-lr", "1e-4")
ADAPTIVE = ("--optimizer", "adaptive_muon")
NORMUON = (*ADAPTIVE, "--adaptive-muon-moment2-method", "normuon")


def _watch() -> None:
    after_enable(_print_what_leaves)


def _print_what_leaves() -> None:
    """Print the bytes of state and main weights on the device, before they move and after."""
    from megatron_muon.step.offload import Offload

    def to_cpu(original: Any, own: Any) -> None:
        seen = {}
        for tensor in own._tensors():
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            if tensor.dim() and storage.nbytes():
                seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        # Nothing but tensors holds the memory.
        storage = tensor = None  # type: ignore[assignment]
        is_there = not own._away
        original(own)
        if is_there:
            before = sum(size for _, size in seen.values())
            after = sum(size for ref, size in seen.values() if not ref.expired())
            print(f"on the device: {before} bytes, then {after}", flush=True)

    wrap(Offload, "to_cpu", to_cpu)


@pytest.mark.parametrize(
    ("world_size", "zero", "flags"),
    [
        pytest.param(2, 3, BF16, id="zero3_bf16"),
        slow(2, 0, (NO_NESTEROV,), id="zero0_fp32"),
        slow(2, 1, (*BF16, *SOAP), id="zero1_soap_bf16"),
        slow(2, 3, (*ADAPTIVE, *BF16, "--swiglu"), id="zero3_adamuon_gated"),
        slow(4, 2, (*PP, *NORMUON, "--muon-scalar-optimizer", "lion"), id="stages_normuon_lion"),
        slow(4, 3, (*EP, *HSDP, *BF16), id="ep2_hsdp_bf16"),
        slow(4, 3, (*TP, *BF16, "--swiglu"), id="tp2_bf16_gated"),
    ],
)
def test_run_is_the_one_without_offload(world_size, zero, flags, tmp_path):
    """Losses, checkpoints and a resumed run have the bits of the run without offload."""
    folders = {name: tmp_path / name for name in ("plain", "offloaded")}

    def run(name: str, *more: str) -> Any:
        arguments = (*flags, *SCHEDULE, *more, *(OFFLOAD if name == "offloaded" else ()))
        before = _watch if name == "offloaded" else None
        return launch(world_size, fsdp_toy_gpt(ZERO[zero], *arguments), before=before).check()

    losses = {name: run(name, "--save", str(folders[name])).losses for name in folders}
    assert losses["offloaded"] == losses["plain"] and len(losses["plain"]) == LAST
    for iteration in (3, LAST):
        expected, found = (stored(each / f"iter_{iteration:07d}") for each in folders.values())
        assert found.keys() == expected.keys()
        assert not [key for key in found if not torch.equal(found[key], expected[key])]
    resumed = run("offloaded", "--load", str(folders["plain"]), "--ckpt-step", "3")
    assert resumed.losses == losses["plain"][3:]
    for output in resumed.outputs:
        lines = [line for line in output.splitlines() if line.startswith("on the device: ")]
        assert lines and all(line.endswith(" bytes, then 0") for line in lines), lines
        assert not lines[-1].startswith("on the device: 0 ")


@pytest.mark.slow
def test_weights_alone_load_into_cpu_memory(tmp_path):
    """Main weights that load without optimizer state are in CPU memory then, and are installed."""
    flags = (*BF16, *SCHEDULE)
    launch(2, fsdp_toy_gpt(ZERO[3], *flags, "--save", str(tmp_path))).check()
    load = (*flags, "--load", str(tmp_path), "--ckpt-step", "3", "--no-load-optim")
    plain, offloaded = (
        launch(2, fsdp_toy_gpt(ZERO[3], *load, *more)).check().losses for more in ((), OFFLOAD[:1])
    )
    assert plain == offloaded


def test_share_of_the_bytes_moves():
    """``--optimizer-offload-fraction`` leaves the rest on the device."""
    arguments = (
        *BF16,
        "--train-iters",
        "2",
        "--lr-decay-iters",
        "20",
        *OFFLOAD[:1],
        "--optimizer-offload-fraction",
        "0.5",
    )
    run = launch(2, fsdp_toy_gpt(ZERO[3], *arguments), before=_watch).check()
    line = next(x for x in run.outputs[0].splitlines() if x.startswith("on the device: "))
    before, after = (int(word) for word in line.split() if word.isdigit())
    assert 0.5 * before <= after < before
