# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run-level parity: losses and gradient norms against upstream's own optimizers under DDP.

Both runs go through the launcher, on the same samples; ``helpers/parity.py`` has the tolerances.
Rows of Megatron-FSDP v2 need a checkout of Megatron-LM's main: ``check_compat.py --megatron
DIR`` runs them.
"""

import pytest
from helpers.broken_optimizers import flip_rows_of_other_ranks, skip_newton_schulz
from helpers.parity import (
    ADAM,
    CLIPPED,
    FP32,
    HIGH,
    HIGH_TOLERANCE,
    IN_BF16,
    LEAST_GAIN,
    MEDIUM,
    V2_IN_BF16,
    Setting,
    check_trains_like_ddp,
    row,
)
from helpers.ranks import launch
from helpers.toy_gpt import (
    BF16,
    EP,
    EXPERT_TP,
    FSDP2,
    HFSDP,
    HSDP,
    INTERLEAVED,
    LATENT,
    MOE,
    NO_MATRIX,
    NO_NESTEROV,
    NUM_ITERATIONS,
    PP,
    TIED,
    TP,
    ZERO,
    fsdp_toy_gpt,
    reference,
    relative_differences,
    slow,
    toy_gpt,
    train,
)

pytestmark = pytest.mark.ranks
WHOLE = ("--muon-tp-mode", "distributed")
EP_TP = (*EP, *TP, "--sequence-parallel", EXPERT_TP, "1")
MOE_TP = (*MOE, *TP, "--sequence-parallel", EXPERT_TP, "2")
ONE_DENSE_LAYER = ("--moe-layer-freq", "[0,1]")
# expt_dp is a single rank.
EP_ETP = (*EP, EXPERT_TP, "2", *ONE_DENSE_LAYER)
# Dense layers in the first stage, experts in the second.
EXPERTS_IN_ONE = (*PP, *MOE, *ONE_DENSE_LAYER)
# The root of the second stage has no parameter of its own under v2.
THREE = ("--pipeline-model-parallel-size", "3", "--num-layers", "3")
MLA = "--muon-split-mla"
GRAM = ("--muon-fsdp-newton-schulz", "gram")
FP32_MESSAGES = ("--muon-fsdp-comm-dtype", "fp32")
# Nearly the least that works, matrices of a few kilobytes a bucket.
LITTLE_MEMORY = "--muon-fsdp-staging-bytes"

# The functional cases have ZeRO-1 to ZeRO-3 and EP 2 on two ranks, with the same tolerance.
TRAINS_LIKE_DDP = [
    row("zero3", 3, 3, is_slow=False),
    # Two replicas of two shards, which share the work.
    row("hsdp_zero0", 4, 0, fsdp=HSDP),
    row("hsdp_zero2", 4, 2, fsdp=HSDP),
    # Shards cut over inner and outer ranks, also with a single inner rank.
    row("hfsdp_one_inner_rank", 2, 3, fsdp=HFSDP, is_slow=False),
    # Newton-Schulz of the whole matrix; of the block, which is the default, below.
    row("tp2_duplicated", 4, 0, *TP, "--muon-tp-mode", "duplicated"),
    row("tp2_distributed", 4, 0, *TP, *WHOLE),
    # Experts over expt_dp, dense layers over dp_cp.
    row("ep2_etp2", 4, 3, *EP_ETP),
    row("tp2_etp2", 4, 3, *MOE_TP, *ONE_DENSE_LAYER),
    row("tp2_ep2", 4, 3, *EP_TP),
    # One inner rank for experts: their shards are cut over the outer ranks alone.
    row("ep2_hsdp", 4, 3, *EP, fsdp=HSDP),
    row("ep2_hfsdp", 4, 3, *EP, fsdp=HFSDP),
    # Newton-Schulz in bf16, with either dtype of messages.
    row("medium", 2, 1, setting=MEDIUM, is_slow=False),
    row("fp32_messages", 3, 3, fsdp=(*FP32_MESSAGES, LITTLE_MEMORY, "30000"), setting=MEDIUM),
    row("bf16_messages_hsdp", 4, 3, fsdp=(*HSDP, LITTLE_MEMORY, "39000"), setting=MEDIUM),
    row("bf16_messages_replicas", 2, 0, fsdp=(LITTLE_MEMORY, "45000"), setting=MEDIUM),
    # Owners of whole matrices gather blocks of both tensor-parallel ranks, in bf16.
    row("bf16_messages_tp2", 4, 3, *TP, *WHOLE, setting=MEDIUM),
    row("bf16_zero0", 2, 0, setting=IN_BF16, is_slow=False),
    row("bf16_zero3", 2, 3, setting=IN_BF16, is_slow=False),
    row("bf16_zero2", 3, 2, setting=IN_BF16),
    # In fp32 the polynomial is the same, and its rounding no larger than that of sums.
    row("gram", 2, 3, fsdp=GRAM),
    # PyTorch's FSDP2 has the bits of DDP, see below; here other shards, and their norms.
    row("fsdp2", 3, 3, fsdp=FSDP2, is_slow=False),
    row("fsdp2_experts", 2, 3, *MOE, fsdp=FSDP2),
    row("fsdp2_glu_bf16", 4, 3, "--muon-split-glu", fsdp=FSDP2, setting=IN_BF16),
    # Pipeline stages.
    row("experts_in_one_stage_zero0_ep2", 4, 0, *EXPERTS_IN_ONE, *EP[-2:]),
    row("experts_in_one_stage", 4, 3, *EXPERTS_IN_ONE),
    row("stages_tp2_dp1", 4, 3, *PP, *TP),
    row("interleaved_tied_zero1", 4, 1, *INTERLEAVED, TIED, is_slow=False),
    row("interleaved", 4, 3, *INTERLEAVED),
    row("tied_zero0", 4, 0, *PP, TIED),
    row("tied_hfsdp", 4, 3, *PP, TIED, fsdp=HFSDP),
    row("tied_hsdp_tp2", 8, 2, *PP, *TP, TIED, fsdp=HSDP),
    row("stage_without_matrix", 4, 3, *NO_MATRIX, is_slow=False),
    row("stages_mtp", 4, 3, *PP, "--mtp-num-layers", "1"),
    row("stages_bf16", 4, 3, *PP, setting=IN_BF16),
    # The repairs are those of Megatron-FSDP, not of Muon.
    row("tied_adam", 4, 3, *PP, TIED, setting=ADAM, is_slow=False),
    # Version 2.
    row("fp32", 2, "v2", is_slow=False),
    row("three_ranks", 3, "v2", is_slow=False),
    row("ep2", 4, "v2", *EP, is_slow=False),
    row("bf16", 2, "v2", setting=V2_IN_BF16, is_slow=False),
    row("glu", 2, "v2", "--muon-split-glu", is_slow=False),
    row("three_stages_tied", 6, "v2", *THREE, TIED),
    row("stages_of_one_rank_tied", 2, "v2", *PP, TIED),
    row("tied", 4, "v2", *PP, TIED, is_slow=False),
    row("stages_ep2", 4, "v2", *PP, *EP, is_slow=False),
    row("experts_in_one_stage_ep2", 4, "v2", *EXPERTS_IN_ONE, *EP[-2:]),
    row("stage_without_matrix", 4, "v2", *NO_MATRIX),
    row("interleaved_tied", 4, "v2", *INTERLEAVED, TIED, is_slow=False),
    row("interleaved_experts", 4, "v2", *INTERLEAVED, *MOE),
    row("tied_bf16", 4, "v2", *PP, TIED, setting=V2_IN_BF16),
    # Its norm is that of all stages, in which a tied embedding counts once.
    row("tied_adam", 4, "v2", *PP, TIED, setting=ADAM, is_slow=False),
    row("experts_in_one_stage_ep2_adam", 4, "v2", *EXPERTS_IN_ONE, *EP[-2:], setting=ADAM),
    row("interleaved_adam", 4, "v2", *INTERLEAVED, setting=ADAM),
]


@pytest.mark.parametrize(("world_size", "zero", "setting", "flags", "fsdp_flags"), TRAINS_LIKE_DDP)
def test_trains_like_ddp(world_size, zero, setting, flags, fsdp_flags):
    """Losses and norms equal DDP's in every layout and precision, up to rounding."""
    check_trains_like_ddp(world_size, zero, setting, flags, fsdp_flags)


@pytest.mark.parametrize("precision", [slow((), id="fp32"), pytest.param(BF16, id="bf16")])
def test_torch_fsdp2_has_the_bits_of_ddp(precision):
    """``--use-torch-fsdp2`` trains Muon, which upstream asserts away, with the losses of DDP.

    On two ranks, whose sums have no order, and without clipping, whose norm has one.
    """
    flags = (*HIGH, "--clip-grad", "0", *precision)
    run = train(2, fsdp_toy_gpt(ZERO[3], *FSDP2, *flags))
    expected = train(2, toy_gpt(*flags))
    assert len(run.losses) == NUM_ITERATIONS
    assert run.losses[-1] < run.losses[0] - LEAST_GAIN
    assert run.losses == expected.losses


def check_flags(
    world_size: int, base: tuple, groups: list[str], least: float, setting: Setting = FP32
):
    """Compare a run with the flags of a model, and all groups of flags at once, with upstream's.

    Upstream's losses change where any group is left out, so a flag that Megatron-FSDP ignored would
    be found.
    """
    every = [flag for group in groups for flag in group.split()]
    check_trains_like_ddp(world_size, 3, setting, (*base, *every))
    options = {"compared_with": world_size, "num_microbatches": 2}
    expected = reference(*setting.flags, *base, *every, **options).losses
    for left_out in groups:
        others = [flag for group in groups if group != left_out for flag in group.split()]
        without = reference(*setting.flags, *base, *others, **options).losses
        assert max(relative_differences(without, expected)) > least, left_out


@pytest.mark.parametrize(
    ("world_size", "model", "flags"),
    [
        pytest.param(2, (), "--muon-split-glu", id="glu"),
        slow(2, (), "--muon-split-qkv-per-head", id="heads"),
        slow(2, (*LATENT, MLA), "--muon-split-qkv-per-head", id="latent_heads"),
        slow(
            *(4, (*TP, *LATENT, "--muon-tp-mode", "duplicated", "--muon-split-glu"), MLA),
            id="latent_glu_tp2",
        ),
        slow(
            *(4, (*LATENT, *EP, "--moe-shared-expert-intermediate-size", "24", MLA)),
            "--muon-split-glu --moe-router-skip-muon",
            id="deepseek",
        ),
    ],
)
def test_split_matrices_train_like_ddp_with_the_same_flags(world_size, model, flags):
    """Each flag that splits matrices changes training, as it changes upstream's under DDP."""
    check_flags(world_size, model, flags.split(), 10 * HIGH_TOLERANCE)


@pytest.mark.parametrize(
    "base",
    [
        pytest.param((), id="grouped"),
        pytest.param(LATENT, id="latent"),
        # Without experts: one token that a last bit routes to another exceeds the tolerance.
        pytest.param(("--optimizer", "adam"), id="adam"),
    ],
)
@pytest.mark.slow
def test_qk_clip_trains_like_ddp(base):
    """MuonClip, and Adam with QK-clip, train like DDP where logits are large from the start.

    In bf16 runs differ from DDP's in one rounding: upstream clips the rounded weight and rounds
    again, here the clipped main weight is rounded.
    """
    clip = "--qk-clip --qk-clip-threshold 1.0 --qk-clip-alpha 0.3"
    check_flags(2, (*base, "--init-method-std", "0.25"), [clip], 5 * CLIPPED.losses, CLIPPED)


@pytest.mark.slow
def test_muon_flags_do_what_they_do_under_ddp():
    """Each flag of Muon changes a run as it changes upstream's."""
    flags = [
        NO_NESTEROV,
        "--muon-momentum 0.8",
        "--muon-scale-mode unit_rms_norm",
        "--muon-coefficient-type polar_express",
        "--muon-num-ns-steps 3",
        "--muon-extra-scale-factor 4",
        "--muon-scalar-optimizer lion",
        "--muon-no-split-qkv",
    ]
    check_flags(2, ("--lr", "1e-3"), flags, 20 * HIGH_TOLERANCE)


def _complete_adaptive_muon() -> None:
    """Set what Megatron-LM main sets, and 0.19.2 fails without."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon

    original = TensorParallelAdaptiveMuon.__init__

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.scale_mode = kwargs["scale_mode"]
        self.extra_scale_factor = kwargs["extra_scale_factor"]

    TensorParallelAdaptiveMuon.__init__ = __init__


ADAPTIVE = ("--optimizer", "adaptive_muon", "--adaptive-muon-moment2-method")


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((*ADAPTIVE, "adamuon", *EP, *ONE_DENSE_LAYER, *HIGH), id="adamuon_ep2"),
        pytest.param(("--optimizer", "lion", "--lr", "1e-3"), id="lion"),
    ],
)
@pytest.mark.slow
def test_other_optimizers_train_like_upstreams(flags):
    """AdaMuon and Lion train like upstream's, and unlike Muon."""
    # On as many ranks: adamuon's second moments amplify the rounding of sums, to 4e-6.
    expected = train(2, toy_gpt(*flags), before=_complete_adaptive_muon).losses
    found = train(2, fsdp_toy_gpt(ZERO[3], *flags)).losses
    differences = relative_differences(found, expected)
    print(f"largest relative difference: {max(differences):.1e}")
    assert max(differences) <= HIGH_TOLERANCE, differences
    assert max(relative_differences(found, reference(*HIGH).losses)) > 10 * HIGH_TOLERANCE


@pytest.mark.parametrize("method", ["normuon", slow("namo")])
def test_adaptive_method_trains_and_says_that_it_scales_once(method):
    """NorMuon and NAMO train, and one message says that results are scaled once."""
    run = train(2, fsdp_toy_gpt(ZERO[3], *ADAPTIVE, method, "--muon-split-glu"))
    assert run.losses[-1] < run.losses[0] - LEAST_GAIN
    assert sum(f"{method}: results are scaled once" in text for text in run.outputs) == 1


# Training flags of examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh of Megatron-LM, without
# those that need a GPU: --use-nccl-ub, --fsdp-manual-registration, --attention-backend fused, fp8,
# and --apply-layernorm-1p of Transformer Engine.
EXAMPLE = """
--use-mcore-models --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --kv-channels 16 --seq-length 32
--max-position-embeddings 32 --position-embedding-type rope --rotary-base 1000000
--rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --normalization RMSNorm
--init-method-std 0.0134 --untie-embeddings-and-output-weights --disable-bias-linear
--micro-batch-size 1 --global-batch-size 8 --train-samples 48 --lr-decay-samples 40
--lr-warmup-samples 8 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4
--decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --bf16 --cross-entropy-loss-fusion
--no-check-for-nan-in-loss-and-grad --manual-gc --empty-unused-memory-level 1
--exit-duration-in-mins 235 --use-megatron-fsdp
--data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion
--calculate-per-token-loss --ckpt-format fsdp_dtensor --tensor-model-parallel-size 1
--context-parallel-size 1 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce
--overlap-param-gather --mock-data --tokenizer-type NullTokenizer --vocab-size 95 --split 99,1,0
--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 0 --log-interval 1
--eval-iters 1 --eval-interval 100 --log-throughput --distributed-timeout-minutes 60
--transformer-impl local --no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm
--optimizer muon --muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.2
"""


@pytest.mark.slow
def test_megatrons_example_trains_with_muon():
    """Megatron's example trains, and flags that move its weights change no bit of the losses."""
    flags = EXAMPLE.split()
    losses = launch(2, flags).check().losses
    assert losses[-1] < losses[0] - 0.05
    more = ("--init-model-with-meta-device", "--fsdp-double-buffer")
    assert launch(2, [*flags, *more]).check().losses == losses


def _skip_large_gradients() -> None:
    """Set what no flag of Megatron sets."""
    from megatron.training import training

    original = training.get_megatron_optimizer_config

    def get_megatron_optimizer_config(args):
        config, overrides = original(args)
        config.grad_norm_skip_threshold = 0.75
        return config, overrides

    training.get_megatron_optimizer_config = get_megatron_optimizer_config


@pytest.mark.slow
def test_skipped_iterations_and_zero_counts_match_ddp():
    """Skipped steps change nothing, and zeros are counted as under DDP."""
    flags = (*HIGH, "--log-num-zeros-in-grad")
    found = train(2, fsdp_toy_gpt(ZERO[3], *flags), before=_skip_large_gradients)
    expected = reference(*flags, before=_skip_large_gradients)
    skipped = [record["skipped"] for record in found.history]
    assert skipped == [record["skipped"] for record in expected.history]
    assert sum(skipped) > 0
    assert [record["num_zeros"] for record in found.history] == [
        record["num_zeros"] for record in expected.history
    ]
    assert max(relative_differences(found.losses, expected.losses)) <= HIGH_TOLERANCE


@pytest.mark.parametrize(
    ("break_it", "setting"),
    [
        pytest.param(skip_newton_schulz, FP32, id="skipped"),
        slow(skip_newton_schulz, MEDIUM, id="skipped_medium"),
        slow(skip_newton_schulz, IN_BF16, id="skipped_bf16"),
        # The largest tolerance.
        slow(flip_rows_of_other_ranks, IN_BF16, id="wrong_rows_bf16"),
    ],
)
def test_broken_newton_schulz_fails_these_tolerances(break_it, setting):
    """Runs without Newton-Schulz, or with wrong rows, exceed the tolerances threefold."""
    flags = fsdp_toy_gpt(ZERO[3], *setting.flags, *setting.fsdp_flags)
    run = train(2, flags, before=break_it)
    expected = reference(*setting.flags).losses
    assert max(relative_differences(run.losses, expected)) > 3 * setting.losses


@pytest.mark.slow
def test_precision_aware_flag_asks_for_the_dtype_of_momentum():
    """Muon takes the dtype of momentum from the flags of the precision-aware optimizer."""
    flags = fsdp_toy_gpt(ZERO[3], "--exp-avg-dtype", "bf16")
    runs = [train(2, [*flags, *more]) for more in ((), ("--use-precision-aware-optimizer",))]
    assert runs[0].losses == runs[1].losses != train(2, fsdp_toy_gpt(ZERO[3])).losses
    assert "momentum is bf16 (--exp-avg-dtype)" in runs[1].outputs[0]
