# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Command lines: accepted ones, and each refusal with its message and exit code."""

import contextlib
import functools
import os
import runpy
import sys
import types
from functools import partial
from typing import Any

import pytest
from helpers.checkpoint_runs import wrap
from helpers.ranks import launch, run_ranks
from helpers.toy_gpt import FSDP2, HSDP, PP, TP, ZERO, fsdp_toy_gpt, slow, toy_gpt

from megatron_muon.mcore.unsupported import raise_where_refused
from megatron_muon.user_errors import SettingsError

pytestmark = pytest.mark.ranks

ZERO_3 = ZERO[3]

ADAM = ("--optimizer", "adam")
UNGROUPED = ("without:--group-query-attention", "--num-query-groups", "1")
# Flags that are added to those of the toy GPT under ZeRO-3, and a part of their refusal.
REFUSALS = [
    (("--fp16",), "--fp16: emerging optimizers have no loss scaling; use --bf16."),
    (("--exp-avg-dtype", "fp8"), "(--exp-avg-dtype): expected fp32 or bf16, got fp8"),
    (
        ("--optimizer", "soap", "--muon-fsdp-comm-dtype", "bf16"),
        "--muon-fsdp-comm-dtype: soap does not read it; leave it out.",
    ),
    (
        (*PP, "--defer-embedding-wgrad-compute", *ADAM),
        "Megatron-FSDP reduces the gradient of the output layer before it has been computed",
    ),
    # Megatron's own.
    (("--ckpt-format", "torch_dist"), "Megatron-FSDP requires the `fsdp_dtensor` checkpointing"),
    (("--use-torch-fsdp2",), "--use-torch-fsdp2 "),
    (("--ddp-average-in-collective",), "then drops the scaling of expert gradients"),
    (("--muon-fp32-matmul-prec", "low"), "torch has no such precision"),
    (("--qk-clip", *TP), "accepted"),
    (("--qk-clip", *TP, "--num-query-groups", "1"), "expects the logits of all heads of a group"),
    (
        ("--qk-clip", *TP, *ADAM, "--num-query-groups", "1"),
        "--optimizer adam --use-megatron-fsdp cannot run",
    ),
    # Every head has keys of its own.
    (("--qk-clip", *TP, *UNGROUPED), "accepted"),
    (("--qk-clip", "--attention-output-gate"), "leaves the gate out of linear_qkv"),
    (
        ("--qk-clip", "--experimental-attention-variant", "dsa"),
        "upstream has no clip for absorbed multi-latent attention",
    ),
    (("--optimizer-cuda-graph",), "the step checks gradients on the host"),
    (("--cuda-graph-impl", "full_iteration"), "full_iteration: replaying a graph skips"),
    (("--cuda-graph-scope", "full_iteration"), "full_iteration: replaying a graph skips"),
    (("--async-save", "--async-ckpt-use-cpu-shm", *ADAM), "a thread of the trainer writes, and"),
    (("--async-save", "--use-persistent-ckpt-worker"), "accepted"),
    (("--non-persistent-ckpt-type", "local", *ADAM), "-type local: upstream's local checkpoints"),
    (
        (*"--save a/b --non-persistent-global-ckpt-dir a".split(), *ADAM),
        "that holds the folder of --save: all checkpoints below it but the last",
    ),
    ("--save a --save-interval 5 --non-persistent-global-ckpt-dir a/b".split(), "accepted"),
    (("--ckpt-convert-format", "torch_dist"), "--ckpt-convert-format: a Megatron-FSDP model"),
    (("--muon-fsdp-comm-dtype", "nothing"), "invalid choice: 'nothing' (choose from 'auto', "),
    (("--muon-fsdp-staging-bytes", "0"), "--muon-fsdp-staging-bytes: expected a positive number"),
    (("--muon-fsdp-max-owners", "3"), "--muon-fsdp-max-owners: expected a power of two, got 3."),
    (
        ("--muon-split-qkv-per-head", "--muon-no-split-qkv"),
        "--muon-split-qkv-per-head: expected query, key and value apart, got --muon-no-split-qkv",
    ),
    (("--optimizer", "lion", "--muon-split-glu"), "--muon-split-glu: expected --use-megatron-fsdp"),
    (
        ("--optimizer", "lion", "--muon-fsdp-log-metrics"),
        "adaptive_muon, got --optimizer lion",
    ),
    ((*ADAM, "--muon-fsdp-log-metrics"), "muon or adaptive_muon, got --optimizer adam. Leave the"),
    # A user who has two settings to change is told of both at once.
    (
        ("--fp16", "--optimizer-cuda-graph"),
        "--bf16.\n  --optimizer-cuda-graph: the step checks",
    ),
    ((*ADAM, "--optimizer-cpu-offload"), "with --optimizer adam or sgd: upstream's step copies"),
    (("--qk-clip", "--optimizer-cpu-offload"), "accepted"),
    (("--optimizer-cpu-offload", "--use-precision-aware-optimizer"), "accepted"),
    (
        ("--optimizer-cpu-offload", "--optimizer-offload-fraction", "0"),
        "not in (0, 1]: nothing would be in CPU memory",
    ),
    (("--optimizer-cpu-offload", "--log-params-norm"), "the norm reads main weights between"),
    (("--optimizer-cpu-offload", "--use-nccl-ub"), "NCCL's memory pool would keep the memory"),
    (("--muon-fsdp-cost-model", "gbps=fast"), "cost model: expected name=value with a name of"),
    (
        ("--muon-fsdp-comm-dtype", "bf16", "--muon-fp32-matmul-prec", "high"),
        "--muon-fsdp-comm-dtype: expected fp32 for Newton-Schulz in fp32, got bf16",
    ),
    (("--main-params-dtype", "fp16"), "--exp-avg-sq-dtype other than fp32: steps read float32"),
    (("--exp-avg-sq-dtype", "bf16"), "--exp-avg-sq-dtype other than fp32: steps read float32"),
    (("--use-precision-aware-optimizer", "--optimizer", "soap"), "keep their states in float32"),
    (("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16"), "accepted"),
    (FSDP2, "accepted, optimizer muon"),
    ((*FSDP2, "--muon-split-glu", "--async-save"), "accepted"),
    (
        (*FSDP2, "--ckpt-format", "torch_dist"),
        "--use-torch-fsdp2 cannot run with:\n  --use-torch-fsdp2 --ckpt-format torch_dist: it ",
    ),
    ((*FSDP2, *TP), "--use-torch-fsdp2 with tensor parallelism: a checkpoint would keep the shar"),
    ((*FSDP2, "--qk-clip"), "--use-torch-fsdp2 --qk-clip: upstream clips whole weights; drop it"),
    ((*FSDP2, "--optimizer-cpu-offload"), "modules gather main weights, and need them on the dev"),
    ((*FSDP2, "--calculate-per-token-loss"), "does not divide gradients by the number of tokens"),
    ((*FSDP2, "--fp16"), "emerging optimizers have no loss scaling"),
    # Adam is upstream's there.
    ((*FSDP2, *ADAM, "--muon-split-glu"), "--muon-split-glu: expected --use-megatron-fsdp with"),
    # Megatron-FSDP turns the flag on itself; it does not mean the layer-wise optimizer here.
    (("--use-distributed-optimizer",), "accepted"),
]
# They do nothing without Megatron-FSDP.
OWN_FLAGS = [
    ("--muon-fsdp-comm-dtype", "fp32"),
    ("--muon-fsdp-staging-bytes", "1"),
    ("--muon-fsdp-max-owners", "4"),
    ("--muon-fsdp-cost-model", "gbps=1"),
    ("--muon-fsdp-newton-schulz", "gram"),
    ("--muon-fsdp-log-plan",),
    ("--muon-fsdp-log-metrics",),
    ("--muon-split-glu",),
    ("--muon-split-mla",),
    ("--muon-split-qkv-per-head",),
    ("--moe-router-skip-muon",),
]
# Whole command lines of two ranks. Without Megatron-FSDP, upstream's own refusals still speak, and
# flags of this package would do nothing.
LINES = {
    tuple(toy_gpt(*ADAM, "--use-megatron-fsdp")): (
        "Megatron-FSDP requires the `fsdp_dtensor` checkpointing format."
    ),
    tuple(toy_gpt("--ckpt-format", "fsdp_dtensor")): (
        "--ckpt-format fsdp_dtensor is only tested with Megatron FSDP."
    ),
    **{
        tuple(toy_gpt(*flags)): f"{flags[0]}: expected --use-megatron-fsdp with --optimizer muon "
        "or adaptive_muon, got --optimizer muon"
        for flags in OWN_FLAGS
    },
    # The default.
    tuple(toy_gpt("--muon-fsdp-max-owners", "8")): "accepted, optimizer muon",
    tuple(f for f in fsdp_toy_gpt("optim", *HSDP) if not f.startswith("--overlap")): (
        "HSDP without --overlap-grad-reduce: Megatron-FSDP then never reduces gradients"
    ),
    # Megatron renames it, and chooses the layer-wise optimizer.
    tuple(toy_gpt("--optimizer", "dist_muon")): "accepted, optimizer muon",
    **{tuple(fsdp_toy_gpt(ZERO_3, *flags)): message for flags, message in REFUSALS},
}
# Errors of argparse.
MISTYPED = {
    ("--muon-nestrov",): "unrecognized arguments: --muon-nestrov",
    ("--optimizer", "moun"): "argument --optimizer: invalid choice: 'moun' (choose from",
}


def _refusals(command_lines: list[list[str]]) -> list[str]:
    """Parse command lines as pretrain_gpt.py does, and return what each is refused with."""
    import io

    import megatron_muon

    megatron_muon.enable()
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.global_vars import unset_global_variables

    found = []
    for flags in command_lines:
        sys.argv = ["pretrain_gpt.py", *flags]
        printed = io.StringIO()
        try:
            with contextlib.redirect_stderr(printed):
                args = parse_and_validate_args()
            found.append(f"accepted, optimizer {args.optimizer}")
            unset_global_variables()
        except SystemExit as stop:
            found.append(f"exit code {stop.code}: {printed.getvalue()}")
        except (AssertionError, ValueError) as error:
            found.append(str(error))
    return found


@functools.cache
def refusals() -> dict[tuple[str, ...], str]:
    """Parse every command line of this file once, in one process."""
    lines = [*LINES, *(tuple(fsdp_toy_gpt(ZERO_3, *flags)) for flags in MISTYPED)]
    run = run_ranks(1, _refusals, list(map(list, lines)), env={"WORLD_SIZE": "2"}).check()
    return dict(zip(lines, run.results[0], strict=True))


@pytest.mark.parametrize(("line", "message"), LINES.items(), ids=lambda value: str(value)[-60:])
def test_refusal_names_the_flag_the_reason_and_the_way_out(line, message):
    """A refusal of Megatron's parser or this package names the flag, the reason and the remedy."""
    assert message in refusals()[line]


@pytest.mark.parametrize(("flags", "message"), MISTYPED.items(), ids=lambda value: value[0])
def test_mistyped_flag_is_named_below_one_line_of_usage(flags, message):
    """A mistyped flag is one line with a suggestion, not all of Megatron's flags."""
    usage, line = refusals()[tuple(fsdp_toy_gpt(ZERO_3, *flags))].splitlines()
    assert message in line and "[FLAGS]; --help lists them" in usage


def test_refusal_ends_every_rank():
    """Each rank ends with the same non-zero exit code and the same message."""
    run = launch(2, fsdp_toy_gpt(ZERO_3, "--fp16"))
    assert run.exit_codes == [1, 1]
    for output in run.outputs:
        assert "--fp16: emerging optimizers have no loss scaling; use --bf16." in output


def _add_flags(flags: list[str]) -> None:
    """Add flags to the command line of rank 1."""

    def run(original: Any, *args: Any, **kwargs: Any) -> Any:
        sys.argv += flags
        return original(*args, **kwargs)

    if os.environ["RANK"] == "1":
        wrap(runpy, "run_path", run)


def _install_another_release() -> None:
    from megatron_muon.mcore import arguments

    if os.environ["RANK"] == "1":
        arguments.installed_versions = lambda: {"megatron-core": "0.19.9"}


def _change_default_dtype() -> None:
    import torch

    if os.environ["RANK"] == "1":
        torch.set_default_dtype(torch.bfloat16)


# What rank 1 alone has. Ranks waited for each other, or trained with other values in silence.
OF_ONE_RANK = {
    "--log-params-norm True": partial(_add_flags, ["--log-params-norm"]),
    "--tensor-model-parallel-size 2": partial(_add_flags, ["--tensor-model-parallel-size", "2"]),
    "--lr 0.5": partial(_add_flags, ["--lr", "0.5"]),
    "--muon-fsdp-log-metrics True": partial(_add_flags, ["--muon-fsdp-log-metrics"]),
    "megatron-core 0.19.9": _install_another_release,
    "torch.get_default_dtype() torch.bfloat16": _change_default_dtype,
    "'muon_coefficient_type simple'": partial(_add_flags, ["--muon-coefficient-type", "simple"]),
}


@pytest.mark.parametrize(
    ("found", "before"),
    [next(iter(OF_ONE_RANK.items())), *map(slow, [*OF_ONE_RANK][1:], [*OF_ONE_RANK.values()][1:])],
    ids=list(OF_ONE_RANK),
)
def test_flag_or_release_of_one_rank_is_refused_on_all(found, before):
    """A flag or release that one rank alone has ends all ranks, which it hung or let diverge."""
    run = launch(2, fsdp_toy_gpt(ZERO_3, "--train-iters", "1"), before=before, timeout_s=60.0)
    assert run.exit_codes == [1, 1]
    for output in run.outputs:
        assert "expected the same on all ranks of the group, got rank 1 has" in output
        assert found in output


# Settings that are refused together, and changes of one of them that are not.
REPEATED = {
    "gradient_accumulation_fusion": True,
    "mtp_num_layers": 2,
    "mtp_use_repeated_layer": True,
    "data_parallel_sharding_strategy": ZERO_3,
}
LOCAL = {"cuda_graph_impl": "local"}


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        (REPEATED, True),
        ({**REPEATED, "gradient_accumulation_fusion": False}, False),
        ({**REPEATED, "mtp_num_layers": 1}, False),
        ({**REPEATED, "mtp_use_repeated_layer": False}, False),
        ({**REPEATED, "data_parallel_sharding_strategy": "optim"}, False),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []}, True),
        ({**LOCAL, "cuda_graph_modules": ["full_iteration"]}, True),
        ({"cuda_graph_modules": "full_iteration"}, True),
        ({"cuda_graph_scope": [types.SimpleNamespace(name="full_iteration")]}, True),
        ({**LOCAL, "cuda_graph_modules": "full_iteration_inference"}, False),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn", "mlp"]}, False),
        ({"cuda_graph_impl": "none", "cuda_graph_modules": "full"}, False),
        ({"muon_use_syrk": True}, True),
    ],
    ids=str,
)
def test_settings_are_refused_only_together(settings, is_refused):
    """Repeated layers and whole graphs are refused in combination.

    Each use of the layer overwrites the bucket of the microbatch; a replay counts no reductions.
    """
    settings = {"optimizer": "muon", **settings}
    with pytest.raises(SettingsError) if is_refused else contextlib.nullcontext():
        raise_where_refused(settings)
