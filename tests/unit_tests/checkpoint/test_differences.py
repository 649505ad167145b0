# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a run and of a checkpoint differ, by name and shape."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megatron_muon.checkpoint.reading import StoredCheckpoint, StoredTensor

WORDS, HALF = "embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight_w"
SHAPES = {WORDS: (96, 32), HALF: (56, 32)} | {
    f"decoder.layers.{layer}.mlp.linear_fc2.weight": (32, 56) for layer in (0, 1)
}
ADAM = ("exp_avg", "exp_avg_sq", "step")
type Shapes = dict[str, tuple[int, ...]]


def _saved(shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Return keys and shapes of weights, of Muon's momentum, and of Adam's state of the words."""
    found: Shapes = {f"model.{name}": shape for name, shape in shapes.items()}
    for name, shape in shapes.items():
        for kind in ADAM if name == WORDS else ("momentum_buffer",):
            found[f"optimizer.state.{name}.{kind}"] = () if kind == "step" else shape
    return found


def _differences(wanted: Shapes, num_experts: int | None = None, **more: tuple[int, ...]) -> str:
    """Compare what a run wants with the checkpoint, which holds ``more`` under these keys."""
    from megatron_muon.mcore.checkpoint_load import find_differences

    stored = {
        key: StoredTensor(shape, torch.float32, ())
        for key, shape in (_saved(SHAPES) | more).items()
    }
    checkpoint = StoredCheckpoint(Path(), stored, {})
    return "; ".join(find_differences(checkpoint, wanted, num_experts))


FC2 = "decoder.layers.{}.mlp.linear_fc2.weight"
SAVED = _saved(SHAPES)
CASES: dict[str, tuple[Shapes, tuple[str, ...]]] = {
    "same model": (SAVED, ()),
    # Another --ffn-hidden-size, and a vocabulary padded to another multiple.
    "shapes": (
        _saved(SHAPES | {FC2.format(0): (32, 64), WORDS: (128, 32)}),
        (
            "layers.0.mlp.linear_fc2: expected weight (32, 64), got weight (32, 56)",
            "embedding.word_embeddings: expected weight (128, 32), got weight (96, 32)",
        ),
    ),
    "fewer layers": (
        _saved({name: shape for name, shape in SHAPES.items() if "layers.1." not in name}),
        ("model.decoder.layers.1.mlp.linear_fc2: expected nothing, got weight (32, 56)",),
    ),
    "more layers": (
        _saved(SHAPES | {FC2.format(2): (32, 56)}),
        ("model.decoder.layers.2.mlp.linear_fc2: expected weight (32, 56), got nothing",),
    ),
    "lion": (
        {k: shape for k, shape in SAVED.items() if not k.endswith((".exp_avg_sq", ".step"))},
        (f"{WORDS}: expected nothing, got exp_avg_sq (96, 32), step ()",),
    ),
    "adam": (
        {k.replace("momentum_buffer", kind): shape for k, shape in SAVED.items() for kind in ADAM},
        (f"{HALF}: expected exp_avg (56, 32), exp_avg_sq (56, 32), step (56, 32), got momentum_",),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_differences_are_named(case):
    """Shapes, layers that are missing or would be dropped, and states of other optimizers."""
    wanted, texts = CASES[case]
    differences = _differences(wanted)
    assert all(text in differences for text in texts)
    assert texts or not differences


@pytest.mark.parametrize(("num_experts", "is_refused"), [(4, False), (2, True), (None, True)])
def test_experts_of_other_ranks_are_no_differences(num_experts, is_refused):
    """A rank wants its own, by their numbers among all ranks; more than the model has are named."""
    name = "decoder.layers.0.mlp.experts.linear_fc2.weight"
    wanted = _saved(SHAPES) | {f"model.{name}0": (32, 56), f"model.{name}1": (32, 56)}
    stored = {f"model.{name}{number}": (32, 56) for number in range(4)}
    found = _differences(wanted, num_experts, **stored)
    assert ("linear_fc2: expected nothing, got weight" in found) == is_refused
    assert bool(found) == is_refused
