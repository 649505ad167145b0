# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""A run that is saved and resumed, on the ranks that saved it and on others.

On the same ranks nothing may change, bit for bit. On others parameters and momentum are the same
bits; the iterations after sum gradients in another order, so losses differ by rounding, as those of
two runs that never stopped do. Tolerances are relative; what is seen, ``pytest -rP`` prints:

==============  =========  =====================================================================
setting         tolerance  largest difference seen
==============  =========  =====================================================================
bf16            1.5e-4     8.7e-6
fp32            4e-5       1.9e-7, with Newton-Schulz in bf16
experts         4e-3       8.6e-7; a token that is routed to another expert makes it far more
SOAP            4e-3       1.8e-5; eigenvectors of nearly equal eigenvalues turn with rounding
==============  =========  =====================================================================
"""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import grouped_experts
from helpers.checkpoint_runs import (
    LAST,
    SAVED_AT,
    as_saved,
    assert_resumes,
    assert_same,
    gathered,
    resumed_run,
    saved_run,
)
from helpers.parity import HIGH
from helpers.ranks import Run
from helpers.toy_gpt import (
    BF16,
    EP,
    FSDP2,
    HFSDP,
    HSDP,
    INTERLEAVED,
    MOE,
    NO_MATRIX,
    PP,
    TIED,
    TP,
    V2,
    ZERO,
    needs_flags,
    relative_differences,
    slow,
)

from megatron_muon.mcore.checkpoint_reading import read_checkpoint

pytestmark = pytest.mark.ranks
type Flags = tuple[str, ...]

BF16_TOLERANCE, FP32_TOLERANCE, MOE_TOLERANCE, SOAP_TOLERANCE = 1.5e-4, 4e-5, 4e-3, 4e-3
SEQUENCE = ("--sequence-parallel", "--expert-tensor-parallel-size")
ADAMUON, NORMUON, NAMO = (
    ("--optimizer", "adaptive_muon", "--adaptive-muon-moment2-method", method)
    for method in ("adamuon", "normuon", "namo")
)
# Of whole matrices, which does not depend on the tensor-parallel size.
WHOLE = (*NORMUON, "--muon-tp-mode", "duplicated")
SOAP = ("--optimizer", "soap", "--lr", "2e-3")
MTP = ("--mtp-num-layers", "1")
LION = ("--muon-scalar-optimizer", "lion")
# One dense layer, and one of experts.
MIXED = (*MOE, "--moe-layer-freq", "[0,1]")
# Of attention. Hidden dropout draws from CUDA's
# default generator, on CPU ranks the one that a new data loader draws its seed from.
DROPOUT = ("--attention-dropout", "0.1")
# A batch that divides by three ranks too, as one microbatch on each number of them.
BF16_ON = {
    num_ranks: (*BF16, "--global-batch-size", "12", "--micro-batch-size", str(12 // num_ranks))
    for num_ranks in (2, 3, 4)
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[..., tuple[Run, Path]]:
    """Function that trains and saves; one run serves all tests that load it."""

    @functools.cache
    def train_and_save(world_size: int, zero: int, *flags: str) -> tuple[Run, Path]:
        folder = tmp_path_factory.mktemp("run") / "saved"
        return saved_run(world_size, folder, ZERO[zero], *flags), folder

    return train_and_save


# Version 2, on a checkout of Megatron-LM's main.
on_v2 = functools.partial(pytest.param, marks=needs_flags)
EP_BF16 = (*EP, *BF16)
# Dense layers in the first stage, experts in the second.
EP_IN_ONE = (*PP, *EP, "--moe-layer-freq", "[0,1]")
ADAMUON_EP = (*ADAMUON, *EP, *HFSDP)
NORMUON_TP = (*NORMUON, *TP, *DROPOUT)
SAME_WORLD = [
    pytest.param(2, 3, (*FSDP2, *BF16), id="fsdp2_bf16"),
    slow(2, 3, (*FSDP2, *MOE, *NORMUON), id="fsdp2_fp32_normuon_moe"),
    slow(3, 3, (*FSDP2, *SOAP, *BF16_ON[3], "--async-save"), id="fsdp2_async_soap"),
    slow(2, 0, (), id="zero0_fp32"),
    pytest.param(2, 1, BF16, id="zero1_bf16"),
    slow(2, 3, (*BF16, "--exp-avg-dtype", "bf16"), id="zero3_momentum_bf16"),
    slow(2, 2, MIXED, id="zero2_fp32_moe"),
    slow(4, 3, (*HSDP, *BF16), id="hsdp_bf16"),
    slow(4, 3, (*HFSDP, *BF16), id="hfsdp_bf16"),
    slow(4, 3, ADAMUON_EP, id="hfsdp_fp32_adamuon_ep2"),
    slow(4, 1, NORMUON_TP, id="zero1_fp32_normuon_tp2_dropout"),
    slow(4, 3, (*NAMO, *EP, *TP, *SEQUENCE, "1", *BF16), id="zero3_bf16_namo_tp2_ep2"),
    slow(1, 3, NORMUON, id="zero3_normuon_on_one_rank"),
    slow(2, 3, (*NORMUON, *LION), id="zero3_fp32_normuon_lion"),
    pytest.param(2, 3, SOAP, id="zero3_soap"),
    slow(4, 3, (*SOAP, *EP, *TP, *SEQUENCE, "1", *BF16), id="zero3_bf16_soap_tp2_ep2"),
    slow(4, 1, (*SOAP, *PP, *MIXED), id="stages_soap"),
    slow(4, 3, (*PP, *BF16), id="stages_bf16"),
    pytest.param(4, 3, (*INTERLEAVED, *BF16), id="interleaved_bf16"),
    slow(4, 3, (*INTERLEAVED, *EP), id="interleaved_ep2"),
    slow(4, 3, (*INTERLEAVED, TIED), id="interleaved_tied"),
    slow(4, 1, (*INTERLEAVED, *SOAP), id="interleaved_soap"),
    slow(4, 3, (*INTERLEAVED, *MTP), id="interleaved_mtp"),
    slow(4, 3, (*PP, *MTP, *BF16), id="stages_mtp_bf16"),
    slow(4, 3, (*PP, TIED), id="stages_tied"),
    slow(4, 1, (*PP, *EP, *MIXED), id="stages_experts_in_one_ep2"),
    slow(4, 3, (*NO_MATRIX, *NORMUON), id="stages_without_matrix_normuon"),
    slow(8, 3, (*PP, *TP, *HFSDP), id="stages_tp2_hfsdp"),
    on_v2(2, 3, (*V2, *HIGH), id="v2_fp32"),
    on_v2(4, 3, (*V2, *EP_BF16), id="v2_ep2_bf16"),
    # With the bias of the last norm the two copies of the embedding have other rows on a rank.
    on_v2(4, 3, (*V2, *PP, TIED, *HIGH, "--normalization", "LayerNorm"), id="v2_tied"),
    on_v2(4, 3, (*V2, *INTERLEAVED, *HIGH), id="v2_interleaved"),
    on_v2(4, 3, (*V2, *EP_IN_ONE, "--swiglu", *BF16), id="v2_experts_in_one_ep2_gated_bf16"),
]


@pytest.mark.parametrize(("world_size", "zero", "flags"), SAME_WORLD)
def test_resumed_run_is_the_run_that_never_stopped(world_size, zero, flags, saved, tmp_path):
    """A resumed run has the losses, parameters and state of the first run, bit for bit."""
    first, folder = saved(world_size, zero, *flags)
    assert_resumes(first, folder, tmp_path / "resumed", world_size, ZERO[zero], *flags)


@pytest.mark.parametrize(
    "flags",
    [PP, INTERLEAVED, (*PP, *MTP), (*PP, TIED)],
    ids=["stages", "interleaved", "mtp", "tied"],
)
@pytest.mark.slow
def test_adam_with_stages_resumes(flags, tmp_path):
    """Layers of two stages or chunks have names of their own, where upstream's are the same."""
    run = (2, tmp_path / "saved", ZERO[3], *flags, "--optimizer", "adam")
    first = saved_run(*run)
    resumed = resumed_run(*run[:2], tmp_path / "resumed", *run[2:]).check()
    assert resumed.losses == first.losses[SAVED_AT:]


@pytest.mark.slow
def test_grouped_experts_with_biases_resume(tmp_path):
    """Biases of grouped experts have the name of their expert, where upstream has one for two.

    Under expert parallelism a save would keep the biases of one rank, with Adam too.
    """
    folder, flags = tmp_path / "saved", (*EP, *grouped_experts.FLAGS)
    stand_in: Any = {"before": grouped_experts.replace_experts}
    first = saved_run(2, folder, ZERO[3], *flags, **stand_in)
    assert_resumes(first, folder, tmp_path / "resumed", 2, ZERO[3], *flags, **stand_in)
    flags = (*MOE, *grouped_experts.FLAGS)
    resumed_run(1, folder, tmp_path / "other", ZERO[1], *flags, **stand_in).check()
    found = gathered(tmp_path / "other", 1)
    assert sum(".experts.linear_fc1.bias" in name for name in found) > 4
    assert_same(found, gathered(folder, 2))
    adam = (2, tmp_path / "adam", ZERO[3], *EP, *grouped_experts.FLAGS, "--optimizer", "adam")
    first = saved_run(*adam, **stand_in)
    resumed = resumed_run(*adam[:2], tmp_path / "adam_resumed", *adam[2:], **stand_in).check()
    assert resumed.losses == first.losses[SAVED_AT:]


def between_versions(before_size: int, before: Flags, size: int, flags: Flags, id: str) -> Any:
    """Return a row of two runs of the same samples, in several microbatches with stages."""
    num_samples = 8 if PP[0] in (*before, *flags) else 12
    sides = []
    for world_size, side in ((before_size, before), (size, flags)):
        batch_size = 2 if num_samples == 8 else num_samples // world_size
        batch = ("--global-batch-size", str(num_samples), "--micro-batch-size", str(batch_size))
        sides.append((world_size, 3, (*side, *batch)))
    # With experts a token may be routed elsewhere.
    return on_v2(*sides, MOE_TOLERANCE if EP[0] in before else FP32_TOLERANCE, id=id)


SOAP_ON_4, SOAP_ON_3 = (*SOAP, *BF16_ON[4]), (*SOAP, *BF16_ON[3])
V2_HIGH, STAGES = (*V2, *HIGH), (*PP, *HIGH)
Z3 = (4, 3, BF16_ON[4])
FOUR = ("--num-layers", "4")
CHUNKS = (4, 3, (*INTERLEAVED, *BF16))
TP_MIXED = (*MIXED, *TP, *SEQUENCE, "2")
OTHER_BLOCKS = ("--muon-split-glu", "--muon-no-split-qkv")
OTHER_WORLD = [
    slow(Z3, (3, 3, BF16_ON[3]), BF16_TOLERANCE, id="4_to_3"),
    slow(Z3, (2, 1, BF16_ON[2]), BF16_TOLERANCE, id="4_to_2_zero3_to_zero1"),
    pytest.param((2, 1, BF16), (2, 3, BF16), BF16_TOLERANCE, id="zero1_to_zero3"),
    slow((2, 0, ()), (4, 2, ()), FP32_TOLERANCE, id="2_to_4_zero0_to_zero2"),
    slow((4, 3, (*HSDP, *BF16)), (2, 3, BF16), BF16_TOLERANCE, id="hsdp_to_plain"),
    slow((4, 3, (*HFSDP, *BF16)), (2, 1, BF16), BF16_TOLERANCE, id="hfsdp_to_plain"),
    slow((2, 1, BF16), (4, 3, (*HFSDP, *BF16)), BF16_TOLERANCE, id="plain_to_hfsdp"),
    slow((4, 3, ADAMUON_EP), (2, 1, (*ADAMUON, *MOE)), MOE_TOLERANCE, id="adamuon_ep2_to_ep1"),
    slow((2, 2, MIXED), (4, 3, (*EP, *MIXED)), MOE_TOLERANCE, id="ep1_to_ep2"),
    slow((4, 3, (*WHOLE, *TP)), (2, 1, WHOLE), FP32_TOLERANCE, id="normuon_tp2_to_tp1"),
    slow((2, 1, NAMO), (4, 3, (*NAMO, *HSDP)), FP32_TOLERANCE, id="namo"),
    slow((4, 3, (*SOAP_ON_4, *HSDP)), (3, 1, SOAP_ON_3), SOAP_TOLERANCE, id="soap"),
    slow(
        *((3, 3, (*FSDP2, *SOAP_ON_3)), (4, 3, (*FSDP2, *SOAP_ON_4)), SOAP_TOLERANCE),
        id="fsdp2_soap",
    ),
    slow((2, 2, (*SOAP, *MIXED)), (4, 3, (*SOAP, *EP, *MIXED)), MOE_TOLERANCE, id="soap_ep2"),
    slow((4, 3, (*PP, *BF16)), (2, 1, BF16), BF16_TOLERANCE, id="stages_to_none"),
    slow((2, 1, BF16), (4, 3, (*PP, *BF16)), BF16_TOLERANCE, id="none_to_stages"),
    slow((4, 3, (*PP, *BF16)), (4, 2, (*NO_MATRIX, *BF16)), BF16_TOLERANCE, id="other_stages"),
    slow(CHUNKS, (2, 1, (*FOUR, *BF16)), BF16_TOLERANCE, id="interleaved_to_none"),
    slow((2, 1, (*FOUR, *BF16)), CHUNKS, BF16_TOLERANCE, id="none_to_interleaved"),
    slow(CHUNKS, (4, 2, (*PP, *FOUR, *BF16)), BF16_TOLERANCE, id="interleaved_to_stages"),
    slow((4, 3, (*INTERLEAVED, *EP)), (2, 2, (*FOUR, *MOE)), MOE_TOLERANCE, id="chunks_ep2_to_1"),
    slow((4, 3, (*PP, TIED)), (2, 3, (TIED,)), FP32_TOLERANCE, id="tied_stages_to_none"),
    slow((2, 3, (TIED,)), (4, 3, (*PP, TIED)), FP32_TOLERANCE, id="none_to_tied_stages"),
    slow((4, 3, (*INTERLEAVED, TIED)), (2, 3, (*FOUR, TIED)), FP32_TOLERANCE, id="tied_chunks"),
    slow((4, 3, (*PP, *MTP, *BF16)), (2, 1, (*MTP, *BF16)), BF16_TOLERANCE, id="mtp_to_none"),
    slow((2, 1, (*MTP, *BF16)), (4, 3, (*PP, *MTP, *BF16)), BF16_TOLERANCE, id="none_to_mtp"),
    slow((2, 0, ()), (2, 1, OTHER_BLOCKS), None, id="to_other_blocks"),
    slow((2, 2, MIXED), (4, 3, TP_MIXED), None, id="tp1_to_tp2_etp2_blockwise"),
    between_versions(2, V2_HIGH, 2, HIGH, id="v2_to_v1"),
    between_versions(2, HIGH, 2, V2_HIGH, id="v1_to_v2"),
    between_versions(2, V2_HIGH, 3, V2_HIGH, id="v2_to_3_ranks"),
    between_versions(4, (*V2, *EP_BF16), 2, EP_BF16, id="v2_ep2_bf16_to_v1"),
    between_versions(2, EP_BF16, 4, (*V2, *EP_BF16), id="v1_ep2_bf16_to_v2"),
    between_versions(4, (*V2, *STAGES), 2, V2_HIGH, id="v2_two_stages_to_one"),
    between_versions(2, V2_HIGH, 4, (*V2, *STAGES), id="v2_one_stage_to_two"),
    between_versions(4, (*V2, *STAGES), 4, STAGES, id="v2_stages_to_v1"),
    between_versions(4, STAGES, 4, (*V2, *STAGES), id="v2_stages_of_v1"),
]


def test_weights_alone_load_under_fsdp2(saved, tmp_path):
    """Megatron loads ``torch_dcp`` into the state of the optimizer, with --no-load-optim too."""
    flags = (*FSDP2, *BF16)
    _, folder = saved(2, 3, *flags)
    resumed_run(2, folder, tmp_path / "resumed", ZERO[3], *flags, "--no-load-optim").check()
    found, expected = gathered(tmp_path / "resumed", 2), gathered(folder, 2)
    momentum = [name for name in found if name.endswith((".momentum_buffer", ".exp_avg"))]
    assert momentum and not any(found[name].any() for name in momentum)
    weights = [name for name in expected if name.endswith(".param")]
    assert_same({n: found[n] for n in weights}, {n: expected[n] for n in weights})


@pytest.mark.parametrize(("before", "after", "tolerance"), OTHER_WORLD)
def test_checkpoint_loads_on_other_ranks(before, after, tolerance, saved, tmp_path):
    """Gathered parameters and state are the saved ones, bit for bit, and training goes on.

    Blockwise Muon is another optimizer on another number of tensor-parallel ranks, as Muon of other
    blocks is: its losses are not compared.
    """
    (world_size, zero, flags), (new_world_size, new_zero, new_flags) = before, after
    first, folder = saved(world_size, zero, *flags)
    resumed = resumed_run(
        new_world_size, folder, tmp_path / "resumed", ZERO[new_zero], *new_flags
    ).check()
    assert_same(
        gathered(tmp_path / "resumed", new_world_size, *_tensor_ranks(new_flags)),
        gathered(folder, world_size, *_tensor_ranks(flags)),
    )
    assert len(resumed.losses) == LAST - SAVED_AT
    differences = relative_differences(resumed.losses, first.losses[SAVED_AT:])
    print(f"largest relative difference of losses: {max(differences):.1e}")
    if tolerance is None:
        assert resumed.losses[-1] < first.losses[SAVED_AT - 1] - 0.15
    else:
        assert max(differences) <= tolerance, differences


REFUSED = [
    # Of blocks that one rank has for itself.
    (
        (4, 1, NORMUON_TP),
        (2, 1, NORMUON),
        ["tensor rank 0 of 2.moment2_of_owner: expected nothing"],
    ),
    ((4, 1, (*SOAP, *TP)), (2, 1, SOAP), ["tensor rank 0 of 2.exp_avg: expected nothing"]),
    # Of a model that is not tied.
    ((2, 3, ()), (2, 3, (TIED,)), ["model.module.output_layer.weight: expected nothing"]),
]


@pytest.mark.parametrize(("before", "after", "texts"), REFUSED, ids=["tp", "soap", "to_tied"])
@pytest.mark.slow
def test_state_bound_to_a_number_of_ranks_is_refused_on_another(
    before, after, texts, saved, tmp_path
):
    """All ranks refuse by name a state that fits one number of tensor ranks or stages alone."""
    (_, folder), (world_size, zero, flags) = saved(*before[:2], *before[2]), after
    run = resumed_run(world_size, folder, tmp_path / "resumed", ZERO[zero], *flags)
    assert run.exit_codes == [1] * world_size
    for output in run.outputs:
        assert all(text in output for text in (*texts, "Nothing was loaded.")), output[-3000:]


def _name_copies_apart() -> None:
    """Save as versions before 0.1.0: a tied output layer of the last stage has its own name."""
    from megatron_muon.mcore import checkpoint_load, checkpoint_state

    for module in (checkpoint_load, checkpoint_state):
        module.is_copy = lambda param: False


@pytest.mark.slow
def test_second_copy_of_a_tied_embedding_is_ignored(tmp_path):
    """Earlier versions saved the last stage's copy of a tied embedding under a name of its own.

    Such checkpoints load, on other numbers of stages too, where the copy was one tensor too many.
    """
    folder, flags = tmp_path / "saved", (*PP, TIED)
    first = saved_run(4, folder, ZERO[3], *flags, before=_name_copies_apart)
    copies = {"model.module.output_layer.weight", "optimizer.state.module.module.output_layer"}
    stored = read_checkpoint(folder / f"iter_{SAVED_AT:07d}").tensors
    assert all(any(key.startswith(copy) for key in stored) for copy in copies)
    assert_resumes(first, folder, tmp_path / "resumed", 4, ZERO[3], *flags)
    resumed = resumed_run(2, folder, tmp_path / "other", ZERO[3], TIED).check()
    assert max(relative_differences(resumed.losses, first.losses[SAVED_AT:])) <= FP32_TOLERANCE


PLAIN_READER = """
import sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

folder, output = sys.argv[1:]
metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
state = {
    key: torch.empty(value.size, dtype=value.properties.dtype)
    for key, value in metadata.items()
    if isinstance(value, TensorStorageMetadata) and key.split(".")[0] in ("model", "optimizer")
}
dcp.load(state, checkpoint_id=folder, no_dist=True)
iteration = {"iteration": None}
dcp.load(iteration, checkpoint_id=folder, no_dist=True)
assert not {"megatron", "megatron_muon"} & {name.partition(".")[0] for name in sys.modules}
torch.save({**state, **iteration}, output)
"""


@pytest.mark.parametrize("flags", [(*HFSDP, *BF16), ADAMUON_EP], ids=["bf16", "adamuon_ep2"])
@pytest.mark.slow
def test_plain_torch_reads_the_checkpoint(flags, saved, tmp_path):
    """Code that imports neither megatron nor this package finds every weight and state, by name."""
    _, folder = saved(4, 3, *flags)
    checkpoint = folder / f"iter_{SAVED_AT:07d}"
    subprocess.run(
        [sys.executable, "-I", "-c", PLAIN_READER, str(checkpoint), str(tmp_path / "read.pt")],
        check=True,
        cwd=tmp_path,
    )
    read = torch.load(tmp_path / "read.pt")
    assert read.pop("iteration") == SAVED_AT
    assert_same(read, as_saved(gathered(folder, 4)))


def _tensor_ranks(flags: tuple[str, ...]) -> tuple[int, int]:
    """Give the numbers of tensor-parallel ranks of dense layers and of experts."""
    return 2 if TP[0] in flags else 1, 2 if flags[-2:] == (*SEQUENCE[1:], "2") else 1
