# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plans of ``fully_shard`` and ``MuonAdamW.from_model()`` for a model that does not run.

transformers builds the model from its config.json, on the meta device. ``fully_shard`` shards the
first dimension of every parameter; the modules that it is called on change no plan.
"""

import itertools
import math
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from megatron_muon.fsdp2.groups import Choice, as_groups
from megatron_muon.fsdp2.parameters import planned_parameters
from megatron_muon.plan.exchange_plan import ExchangePlan
from megatron_muon.plan.layout import MatrixLayout, Ranks
from megatron_muon.plan.settings import PlanSettings
from megatron_muon.rows.matrices import matrices_of
from megatron_muon.rows.parameters import boxes_of_placements, replicas_of
from megatron_muon.tools.plan.simulation import Parallelism, plan_all
from megatron_muon.tools.plan.summary import Elements, Size

# Experts that a token is sent to, by architecture.
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
# Others have a model without a head.
_HEADS = ("CausalLM", "ImageTextToText", "Seq2SeqLM", "MaskedLM", "ImageClassification", "CTC")


def read_model(path: Path) -> torch.nn.Module:
    """Build the model of a config.json, or of its folder, without memory and without a network.

    Raises:
        ValueError: transformers is not installed, does not know the model, or cannot build it.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers

        transformers.logging.set_verbosity_error()
        # A missing file would be looked up on the hub.
        file = (path / "config.json" if path.is_dir() else path).resolve(strict=True)
        return build_model(transformers.AutoConfig.from_pretrained(file, trust_remote_code=False))
    # Any exception: each class of transformers refuses values in its own way.
    except Exception as error:
        reason = shorten(f"{type(error).__name__}: {error}", 300).rstrip(".")
        raise ValueError(
            f"--hf {path}: expected the config.json of a model that transformers 5 or later (pip "
            f"install 'transformers>=5') builds on the meta device, got {reason}. Correct it, or "
            "pass the shape by Megatron's flags."
        ) from error


def build_model(config: Any) -> torch.nn.Module:  # noqa: ANN401 - a class of transformers
    """Build the model of a configuration of transformers, without memory.

    It has the class that the configuration names, or else the first head of the architecture.
    """
    import transformers

    named: list[Any] = [getattr(transformers, n, None) for n in config.architectures or ()]
    classes = [c for c in named if isinstance(config, getattr(c, "config_class", None) or ())]
    heads = [getattr(transformers, f"AutoModelFor{head}") for head in _HEADS]
    autos = [auto for auto in heads if type(config) in auto._model_mapping]
    # Kernels of attention need not be installed here.
    options = {"attn_implementation": "eager"}
    with torch.device("meta"):
        if classes:
            model = classes[0]._from_config(config, **options)
        else:
            auto = (autos or [transformers.AutoModel])[0]
            model = auto.from_config(config, trust_remote_code=False, **options)
    model.tie_weights()
    return model


def plan_choices(
    choices: Sequence[Choice], parallel: Parallelism, settings: PlanSettings
) -> list[ExchangePlan]:
    """Plan the matrices of Muon on ``dp`` ranks; as in a run, ``hsdp`` ranks hold the same rows.

    Args:
        choices: The parameters of a model, see ``choose()``.
        parallel: Numbers of ranks and of replicas.
        settings: Numbers of the plans.
    """
    num_shards = parallel.dp // parallel.hsdp
    ranks = torch.arange(parallel.dp).view(parallel.hsdp, num_shards)
    # A mesh without process groups: its ranks do not run.
    mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=0)
    placements = (Replicate(), Shard(0))
    replicas = replicas_of(mesh, placements)
    matrices: dict[tuple[Ranks, ...], list[MatrixLayout]] = defaultdict(list)
    groups = [group for group in as_groups(choices) if group["algorithm"] == "muon"]
    for parameter in planned_parameters(groups):
        shape = tuple(parameter.param.shape)
        boxes = boxes_of_placements(mesh, placements, shape)
        # Ranks with the same number of whole experts plan their own.
        is_even = len(shape) == 3 and shape[0] % num_shards == 0
        for domain in [(holders,) for holders in replicas] if is_even else [replicas]:
            # Rows of this process are not asked for.
            found = matrices_of(
                replace(parameter, known_boxes=boxes),
                tuple(sorted(itertools.chain(*domain))),
                rank=-1,
            )
            matrices[domain] += [matrix for matrix, _ in found]
    return plan_all(matrices, settings)


def count(
    model: torch.nn.Module, choices: Sequence[Choice], num_shards: int
) -> tuple[Size, Elements]:
    """Count the trainable parameters of a model of transformers, and those of the fullest rank.

    A rank may have one of few experts, and others none. A token is multiplied by all parameters but
    embeddings, and by as many experts as the configuration says; by all, if it says nothing.
    """
    config: Any = model.config
    numbers = [getattr(config.get_text_config(), name, None) for name in _TOP_K]
    top_k = next((number for number in numbers if isinstance(number, int)), None)
    # A shared embedding is the head too.
    num_uses: Counter[torch.Tensor] = Counter(
        param for _, param in model.named_parameters(remove_duplicate=False)
    )
    whole, on_rank = Counter[str](), Counter[str]()
    active = 0
    for param, algorithm, reason in ((c.param, c.algorithm, c.reason) for c in choices):
        num_rows, row = param.shape[0] if param.ndim else 1, math.prod(param.shape[1:])
        whole[algorithm] += param.numel()
        on_rank[algorithm] += -(-num_rows // num_shards) * row
        if param.ndim == 3 and algorithm == "muon" and top_k is not None:
            active += min(top_k, num_rows) * row
        elif reason != "embedding" or num_uses[param] > 1:
            active += param.numel()
    muon, adamw = (on_rank[algorithm] for algorithm in ("muon", "adamw"))
    return Size(whole.total(), whole["muon"], active), Elements(muon, adamw)
