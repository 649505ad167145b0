# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Report the plan of a job: ``python -m megatron_muon.plan --preset llama3-8b --dp 64``.

``--hf config.json`` plans a model of transformers under ``fully_shard``, and needs torch and
transformers. Otherwise the job is one of Megatron-FSDP, and neither is imported. No plan needs a
GPU or a process group.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from megatron_muon.newton_schulz import CHOICES
from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.exchange_plan import ExchangePlan, staging_problem
from megatron_muon.plan.layout import Splits
from megatron_muon.plan.settings import EXCHANGE_FLAGS, ExchangeSettings, PlanSettings
from megatron_muon.tools.plan.model_shape import PRESETS, ModelShape
from megatron_muon.tools.plan.rank_report import Report, build_report, table
from megatron_muon.tools.plan.simulation import Parallelism, Sharding, simulate
from megatron_muon.tools.plan.summary import (
    Machine,
    Memory,
    Size,
    memory_under_fsdp2,
    memory_under_megatron_fsdp,
    size_of_shape,
    summary,
)
from megatron_muon.tools.plan.timeline import draw
from megatron_muon.user_errors import in_flags

_REQUIRED = [f.name for f in dataclasses.fields(ModelShape) if f.default is dataclasses.MISSING]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_muon.plan",
        description="Report the owners of matrices, and time, bytes and memory by rank.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # The defaults of a live run: a plan without flags is the plan of such a run.
    defaults = ExchangeSettings()
    source = parser.add_argument_group("model: a preset, a config.json, or Megatron's flags")
    named = source.add_mutually_exclusive_group()
    named.add_argument("--preset", choices=PRESETS)
    named.add_argument(
        "--hf",
        type=Path,
        metavar="CONFIG",
        help="config.json of transformers, or its folder: fully_shard and MuonAdamW.from_model",
    )
    # Named as in Megatron-LM, so that the flags of a training script can be copied here.
    for field in dataclasses.fields(ModelShape):
        flag = "--" + field.name.replace("_", "-")
        if field.type is bool:
            source.add_argument(flag, action="store_true", default=None)
        else:
            source.add_argument(flag, type=int, metavar="N")
    for flag in ("no-split-qkv", "split-glu", "split-mla", "split-qkv-per-head"):
        source.add_argument(f"--muon-{flag}", action="store_true")
    job = parser.add_argument_group("job")
    job.add_argument("--fsdp2", action="store_true", help="implied by --hf")
    job.add_argument(
        "--megatron-fsdp-main-grads-dtype",
        choices=("auto", "fp32"),
        default="auto",
        help="auto: bf16, as the weights",
    )
    job.add_argument("--tokens", type=float, default=4e6, help="tokens of an iteration")
    job.add_argument("--gpu-gb", type=float, default=80, help="memory of a GPU")
    job.add_argument(
        "--model-tflops", type=float, default=400, help="forward and backward passes, a GPU"
    )
    for name, default, text in (
        ("dp", 8, "data-parallel ranks"),
        ("tp", 1, "tensor-parallel ranks"),
        ("ep", 1, "expert-parallel ranks"),
        ("etp", 0, "expert tensor parallelism; 0: --tp"),
        ("pp", 1, "pipeline stages; the first is planned"),
        ("hsdp", 1, "optimizer instances"),
    ):
        job.add_argument(f"--{name}", type=int, default=default, help=text)
    job.add_argument("--hfsdp", action="store_true", help="shard over instances too")
    job.add_argument("--sharding", choices=get_args(Sharding), default="optim_grads_params")
    job.add_argument(
        "--muon-tp-mode",
        choices=("blockwise", "duplicated", "distributed"),
        default="blockwise",
    )
    plan = parser.add_argument_group("plan")
    for name, settings in EXCHANGE_FLAGS.items():
        if name == "log_plan":
            continue
        flag = "--muon-fsdp-" + name.replace("_", "-")
        plan.add_argument(flag, default=getattr(defaults, name), **settings)
    plan.add_argument(
        "--muon-fp32-matmul-prec",
        choices=("medium", "high"),
        default="medium",
        help="Precision of Newton-Schulz; medium is bf16.",
    )
    output = parser.add_argument_group("output: a summary")
    output.add_argument("--ranks", action="store_true", help="figures by rank too")
    output.add_argument("--json", action="store_true", help="print JSON instead")
    output.add_argument(
        "--svg", type=Path, metavar="FILE", help="draw the step of the slowest GPU and its links"
    )
    return parser


def _settings(options: argparse.Namespace) -> PlanSettings:
    """Return the numbers of a live run's plans, checked as there."""
    settings = ExchangeSettings(
        **{
            name: getattr(options, f"muon_fsdp_{name}")
            for name in EXCHANGE_FLAGS.keys() - {"log_plan"}
        }
    )
    rates = CostModel(backends=CHOICES[settings.newton_schulz])
    cost = CostModel.parse(settings.cost_model, rates)
    return settings.plan_settings(cost, is_bf16=options.muon_fp32_matmul_prec == "medium")


def _model(options: argparse.Namespace) -> ModelShape:
    # Explicit flags replace the fields of a preset.
    fields = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(ModelShape)
        if getattr(options, field.name) is not None
    }
    if options.fsdp2:
        raise ValueError(
            "--fsdp2: expected --hf, got a model of Megatron. Pass the model's config.json."
        )
    if options.preset is not None:
        return dataclasses.replace(PRESETS[options.preset], **fields)
    if not fields:
        raise ValueError(
            "model: expected --preset, --hf, or --num-layers and other flags of Megatron, got none."
        )
    # ModelShape names a missing flag.
    return ModelShape(**{**dict.fromkeys(_REQUIRED, 0), **fields})


def _parallelism(options: argparse.Namespace) -> Parallelism:
    # Any mode but blockwise needs the whole matrix over tensor-parallel ranks.
    return Parallelism(
        dp=options.dp,
        tp=options.tp,
        ep=options.ep,
        etp=options.etp,
        pp=options.pp,
        hsdp=options.hsdp,
        sharding=options.sharding,
        shards_outer=options.hfsdp,
        joins_tensor_ranks=options.muon_tp_mode != "blockwise",
    )


def _machine(options: argparse.Namespace) -> Machine:
    for name in ("gpu_gb", "model_tflops", "tokens"):
        if not getattr(options, name) > 0:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag}: expected a positive number, got {getattr(options, name)}.")
    return Machine(options.gpu_gb, options.model_tflops, options.tokens)


def _refuse_with_hf(options: argparse.Namespace) -> None:
    """Refuse flags of Megatron, which change nothing under FSDP2."""
    parser = _parser()
    ignored = [field.name for field in dataclasses.fields(ModelShape)]
    ignored += ["tp", "ep", "etp", "pp", "hfsdp", "sharding", "muon_tp_mode"]
    ignored += ["muon_no_split_qkv", "muon_split_glu", "muon_split_mla", "muon_split_qkv_per_head"]
    changed = [
        "--" + name.replace("_", "-")
        for name in (*ignored, "megatron_fsdp_main_grads_dtype")
        if getattr(options, name) != parser.get_default(name)
    ]
    if changed:
        raise ValueError(
            f"--hf: expected --dp and --hsdp alone, got {', '.join(changed)}. Leave them out, and "
            "change the config.json for another shape; or pass --num-layers and other flags of "
            "Megatron in place of --hf."
        )


def _report(options: argparse.Namespace, num_ranks: int, plans: Sequence[ExchangePlan]) -> Report:
    report = build_report(range(num_ranks), plans)
    fullest = max(report.ranks, key=lambda rank: rank.staging_bytes)
    its_plans = [plan for plan in plans if fullest.rank in plan.ranks]
    problem = staging_problem(its_plans, fullest.staging_bytes, options.muon_fsdp_staging_bytes)
    if problem is not None:
        raise ValueError(problem)
    return report


def _under_megatron(
    options: argparse.Namespace, parallel: Parallelism
) -> tuple[Size, Report, Memory]:
    """Plan a model of Megatron-LM."""
    model = _model(options)
    splits = Splits(
        qkv=not options.muon_no_split_qkv,
        glu=options.muon_split_glu,
        mla=options.muon_split_mla,
        per_head=options.muon_split_qkv_per_head,
    )
    plans = simulate(model, parallel, _settings(options), splits=splits)
    report = _report(options, parallel.stage_size, plans)
    has_fp32 = options.megatron_fsdp_main_grads_dtype == "fp32"
    memory = memory_under_megatron_fsdp(model, parallel, report, has_fp32_gradients=has_fp32)
    return size_of_shape(model), report, memory


def _under_fsdp2(options: argparse.Namespace, parallel: Parallelism) -> tuple[Size, Report, Memory]:
    """Plan a model of transformers."""
    # Here, as they import torch.
    from megatron_muon.fsdp2 import groups
    from megatron_muon.tools.plan import transformers_model

    _refuse_with_hf(options)
    model = transformers_model.read_model(options.hf)
    choices = groups.choose(model)
    plans = transformers_model.plan_choices(choices, parallel, _settings(options))
    report = _report(options, parallel.dp, plans)
    size, on_rank = transformers_model.count(model, choices, parallel.dp // parallel.hsdp)
    return size, report, memory_under_fsdp2(on_rank, report)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; exit with 2 and a message for invalid arguments."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        parallel, machine = _parallelism(options), _machine(options)
        plan = _under_megatron if options.hf is None else _under_fsdp2
        size, report, memory = plan(options, parallel)
        name = options.hf.name.removesuffix(".json") if options.hf else options.preset or "model"
        if options.svg is not None:
            slowest = max(report.ranks, key=lambda rank: rank.step_ns)
            title = f"{name}, the slowest of {len(report.ranks)} GPUs: estimated step of Muon"
            options.svg.write_text(draw(slowest.timeline(), title))
    except (OSError, ValueError) as error:
        parser.error(in_flags(str(error)))
    if options.json:
        figures = {**vars(report), "ranks": [vars(rank) for rank in report.ranks]}
        json.dump(figures, sys.stdout)
        sys.stdout.write("\n")
    else:
        num_ranks = parallel.stage_size * parallel.pp
        lines = [*summary(name, size, num_ranks, report, memory, machine)]
        lines += table(report) if options.ranks else []
        sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0
