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

from megatron_muon.plan.cost import CostModel
from megatron_muon.plan.exchange_plan import ExchangePlan, staging_problem
from megatron_muon.plan.layout import Splits
from megatron_muon.plan.settings import EXCHANGE_FLAGS, ExchangeSettings, PlanSettings
from megatron_muon.tools.plan.model_shape import PRESETS, ModelShape
from megatron_muon.tools.plan.rank_report import build_report
from megatron_muon.tools.plan.simulation import Parallelism, Sharding, simulate
from megatron_muon.tools.plan.summary import (
    Memory,
    Size,
    memory_under_fsdp2,
    memory_under_megatron_fsdp,
    size_of_shape,
    summary,
    summary_of_soap,
)
from megatron_muon.tools.plan.timeline import draw
from megatron_muon.user_errors import in_flags

_MEGATRON = "Megatron-LM and Megatron-FSDP: a preset, or Megatron's flags"


def _positive(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text}.")
    return float(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_muon.plan",
        description="Report the owners of matrices, and time, bytes and memory by rank.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # The defaults of a live run: a plan without flags is the plan of such a run.
    defaults = ExchangeSettings()
    megatron = parser.add_argument_group(_MEGATRON)
    megatron.add_argument("--preset", choices=PRESETS)
    # Named as in Megatron-LM, so that the flags of a training script can be copied here.
    for field in dataclasses.fields(ModelShape):
        flag = "--" + field.name.replace("_", "-")
        if field.type is bool:
            megatron.add_argument(flag, action="store_true", default=None)
        else:
            megatron.add_argument(flag, type=int, metavar="N")
    for flag in ("no-split-qkv", "split-glu", "split-mla", "split-qkv-per-head"):
        megatron.add_argument(f"--muon-{flag}", action="store_true")
    for name, default, text in (
        ("tp", 1, "tensor-parallel ranks"),
        ("ep", 1, "expert-parallel ranks"),
        ("etp", 0, "expert tensor parallelism; 0: --tp"),
        ("pp", 1, "pipeline stages; the first is planned"),
    ):
        megatron.add_argument(f"--{name}", type=int, default=default, help=text)
    megatron.add_argument("--hfsdp", action="store_true", help="shard over instances too")
    for name, choices, text in (
        ("sharding", get_args(Sharding)[::-1], "strategy of Megatron-FSDP"),
        ("muon-tp-mode", ("blockwise", "duplicated", "distributed"), "as in a run"),
        ("megatron-fsdp-main-grads-dtype", ("auto", "fp32"), "auto: bf16, as the weights"),
    ):
        megatron.add_argument(f"--{name}", choices=choices, default=choices[0], help=text)
    fsdp2 = parser.add_argument_group("fully_shard and MuonAdamW.from_model")
    fsdp2.add_argument(
        "--hf", type=Path, metavar="CONFIG", help="config.json of transformers, or its folder"
    )
    job = parser.add_argument_group("job")
    job.add_argument("--dp", type=int, default=8, help="data-parallel ranks")
    job.add_argument("--hsdp", type=int, default=1, help="optimizer instances")
    job.add_argument("--tokens", type=_positive, default=4e6, help="tokens of an iteration")
    job.add_argument("--gpu-gb", type=_positive, default=80, help="memory of a GPU")
    job.add_argument(
        "--model-tflops", type=_positive, default=400, help="forward and backward passes, a GPU"
    )
    plan = parser.add_argument_group("plan")
    for name, settings in EXCHANGE_FLAGS.items():
        if name != "log_plan":
            flag = "--muon-fsdp-" + name.replace("_", "-")
            plan.add_argument(flag, default=getattr(defaults, name), **settings)
    plan.add_argument(
        "--muon-fp32-matmul-prec",
        choices=("medium", "high"),
        default="medium",
        help="Precision of Newton-Schulz; medium is bf16.",
    )
    output = parser.add_argument_group("output: a summary")
    output.add_argument("--json", action="store_true", help="figures by rank, as JSON")
    output.add_argument("--soap", action="store_true", help="figures of SOAP instead")
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
    cost = CostModel.parse(settings.cost_model, CostModel(backend=settings.newton_schulz))
    plan = settings.plan_settings(cost, is_bf16=options.muon_fp32_matmul_prec == "medium")
    return plan.for_whole_matrices() if options.soap else plan


def _under_megatron(
    options: argparse.Namespace, parallel: Parallelism
) -> tuple[list[ExchangePlan], Size, Memory]:
    """Plan a model of Megatron-LM."""
    # Explicit flags replace the fields of a preset.
    fields = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(ModelShape)
        if getattr(options, field.name) is not None
    }
    preset = options.preset and PRESETS[options.preset]
    model = dataclasses.replace(preset, **fields) if preset else ModelShape(**fields)
    splits = Splits(
        # SOAP steps fused parameters whole, as upstream.
        qkv=not (options.muon_no_split_qkv or options.soap),
        glu=options.muon_split_glu,
        mla=options.muon_split_mla,
        per_head=options.muon_split_qkv_per_head,
    )
    plans = simulate(model, parallel, _settings(options), splits)
    has_fp32 = options.megatron_fsdp_main_grads_dtype == "fp32"
    memory = memory_under_megatron_fsdp(model, parallel, has_fp32_gradients=has_fp32)
    return plans, size_of_shape(model), memory


def _under_fsdp2(
    options: argparse.Namespace, parallel: Parallelism
) -> tuple[list[ExchangePlan], Size, Memory]:
    """Plan a model of transformers."""
    # Here, as they import torch.
    from megatron_muon.fsdp2 import groups
    from megatron_muon.tools.plan import transformers_model

    (megatron,) = (group for group in _parser()._action_groups if group.title == _MEGATRON)
    if ignored := [
        action.option_strings[0]
        for action in megatron._group_actions
        if getattr(options, action.dest) != action.default
    ]:
        raise ValueError(
            f"--hf: expected --dp and --hsdp alone, got {', '.join(ignored)}. Leave them out, and "
            "change the config.json for another shape; or pass --num-layers and other flags of "
            "Megatron in place of --hf."
        )
    model = transformers_model.read_model(options.hf)
    choices = groups.choose(model)
    plans = transformers_model.plan_choices(choices, parallel, _settings(options))
    size, on_rank = transformers_model.count(model, choices, parallel.dp // parallel.hsdp)
    return plans, size, memory_under_fsdp2(on_rank)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; exit with 2 and a message for invalid arguments."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.soap and (options.json or options.svg):
            raise ValueError("--soap: expected neither --json nor --svg with it. Leave them out.")
        fields = dataclasses.fields(Parallelism)
        parallel = Parallelism(**{field.name: getattr(options, field.name) for field in fields})
        plan = _under_megatron if options.hf is None else _under_fsdp2
        plans, size, memory = plan(options, parallel)
        report = build_report(parallel.stage_size, plans)
        fullest = max(report.ranks, key=lambda rank: rank.staging_bytes)
        its_plans = [plan for plan in plans if fullest.rank in plan.ranks]
        problem = staging_problem(its_plans, fullest.staging_bytes, options.muon_fsdp_staging_bytes)
        if problem is not None:
            raise ValueError(problem)
        name = options.hf.name.removesuffix(".json") if options.hf else options.preset or "model"
        if options.svg is not None:
            slowest = max(report.ranks, key=lambda rank: rank.step_ns)
            title = f"{name}, the slowest of {len(report.ranks)} GPUs: estimated step of Muon"
            options.svg.write_text(draw(slowest.spans, title))
    except (OSError, ValueError) as error:
        parser.error(in_flags(str(error)))
    if options.soap:
        lines = [*summary_of_soap(plans, report)]
    elif options.json:
        lines = [json.dumps({**vars(report), "ranks": [vars(rank) for rank in report.ranks]})]
    else:
        lines = [
            *summary(
                name,
                size,
                parallel.stage_size * parallel.pp,
                report,
                memory,
                gpu_gb=options.gpu_gb,
                model_tflops=options.model_tflops,
                tokens=options.tokens,
            )
        ]
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0
