# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What Muon gets of 46 architectures of transformers: the table in docs/architectures.md.

    python scripts/maintainer/architectures.py              # from the record in tests/
    python scripts/maintainer/architectures.py --record     # from transformers, on meta devices
    python scripts/maintainer/architectures.py --plan       # plans of its causal models

The record has names, shapes, classes and what modules say of themselves, so that continuous
integration applies the rule to them without transformers. It holds one layer of each kind.
"""

import argparse
import io
import json
import logging
import re
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from megatron_muon.fsdp2.groups import choose
from megatron_muon.tools.plan.command import main as plan
from megatron_muon.tools.plan.transformers_model import build_model

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests/unit_tests/repository/architectures.json"
PAGE = ROOT / "docs/architectures.md"
# transformers' model types, and what their first layers need to be of each kind.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {}, "gemma3_text": {}, "phi3": {}, "glm4": {}, "opt": {}, "gpt2": {},
    "gpt_neox": {}, "bloom": {}, "falcon": {}, "mpt": {}, "codegen": {}, "gpt_bigcode": {},
    "minimax": {}, "mamba": {}, "mamba2": {}, "jamba": {}, "rwkv": {}, "recurrent_gemma": {},
    "nemotron_h": {}, "qwen3_next": {}, "lfm2": {}, "kimi_linear": {}, "mixtral": {},
    "qwen3_moe": {}, "deepseek_v3": {"first_k_dense_replace": 1}, "gpt_oss": {},
    "llama4_text": {}, "granitemoehybrid": {}, "jetmoe": {}, "olmoe": {},
    "glm4_moe": {"first_k_dense_replace": 1}, "switch_transformers": {}, "t5": {}, "bart": {},
    "bert": {}, "albert": {}, "modernbert": {}, "roberta": {}, "vit": {}, "dinov2": {},
    "siglip": {}, "clip": {}, "swin": {}, "whisper": {}, "wav2vec2": {},
}  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers",
           "decoder_layers", "num_decoder_layers")  # fmt: skip
_BASES = (torch.nn.Embedding, torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d)
_KINDS = re.compile("Embed|Expert|Router|Norm")
_SAYS = re.compile(r"(num|n|kv)_\w*(heads?|experts)|nx|nf|is_\w+ed|multi_query|weight_[gv]")


def shortened(model_type: str, changes: dict[str, Any]) -> Any:
    """Return the default configuration of a model of transformers, with six layers."""
    import transformers  # type: ignore[import-not-found, unused-ignore]

    config = transformers.AutoConfig.for_model(model_type)
    parts = [part for part in vars(config).values() if hasattr(part, "to_dict")]
    for part in (config, *parts):
        for name in (*_LAYERS, *changes):
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, changes.get(name, min(6, getattr(part, name))))
        if isinstance(vars(part).get("layer_types"), list):
            part.layer_types = part.layer_types[:6]
    return config


def build(model_type: str, changes: dict[str, Any]) -> torch.nn.Module:
    """Build a model of transformers with its default configuration and six layers, on meta."""
    return build_model(shortened(model_type, changes))


def plan_all() -> None:
    """Print what ``plan --hf`` makes of each causal language model of transformers."""
    import transformers

    configs = {c.model_type: c for c in transformers.AutoModelForCausalLM._model_mapping}
    num_planned = 0
    for model_type, config_class in sorted(configs.items()):
        text, error = io.StringIO(), io.StringIO()
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(text), redirect_stderr(error):
            try:
                # As published files have them: the defaults of the class.
                config = {"model_type": model_type, **config_class().to_diff_dict()}
                (Path(folder) / "config.json").write_text(json.dumps(config, default=str))
                plan(["--hf", folder, "--dp", "8"])
            except SystemExit:
                pass
            except Exception as problem:
                error.write(f"{type(problem).__name__}: {problem}")
        first = text.getvalue().partition("\n")[0].partition(": ")[2]
        num_planned += bool(first)
        reason = error.getvalue().strip().rpartition("\n")[2].partition(", got ")[2]
        print(f"| {model_type} | {first or reason or error.getvalue().strip()} |", flush=True)
    print(f"{num_planned} of {len(configs)} are planned")


def record(model: torch.nn.Module) -> dict[str, Any]:
    """Return what the rule looks at: one tensor of each kind, and the modules around it."""
    first: dict[str, str] = {}
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.ndim < 2:
            continue
        kind = re.sub(r"(?<=[._])\d+", "*", name)
        if first.setdefault(kind, name) == name:
            names.setdefault(id(param), []).append(name)
    shapes = {id(param): list(param.shape) for param in model.parameters()}
    paths = {path[: i and i - 1] for path in first.values() for i in _dots(path)}
    modules = {}
    for path, module in model.named_modules(remove_duplicate=False):
        recorded = [type(module).__name__, _base(module), _says(module)]
        # Others are modules that only contain some.
        if path in paths and (recorded[1:] != ["Module", {}] or _KINDS.search(str(recorded[0]))):
            modules[path] = recorded
    params: list[Any] = [["", shapes[key], *of_param] for key, of_param in names.items()]
    found: dict[str, Any] = {"modules": modules, "params": params}
    kinds = choices(found)
    for entry in params:
        entry[0] = kinds[entry[2]]
    return found


def _dots(path: str) -> list[int]:
    return [0, *(match.end() for match in re.finditer(r"\.", path))]


def _base(module: torch.nn.Module) -> str:
    return next((base.__name__ for base in _BASES if isinstance(module, base)), "Module")


def _says(module: torch.nn.Module) -> dict[str, Any]:
    """Return the numbers and flags of a module and of its configuration."""
    config = getattr(module, "config", None)
    says: dict[str, Any] = {
        key: value
        for key, value in vars(module).items()
        if _SAYS.fullmatch(key) and isinstance(value, int)
    }
    numbers = {} if config is None else {
        name: getattr(config, name)
        for name in ("num_attention_heads", "num_key_value_heads", "num_kv_heads")
        if isinstance(getattr(config, name, None), int)
    }  # fmt: skip
    return says | ({"config": numbers} if numbers else {})


def rebuild(recorded: dict[str, Any]) -> torch.nn.Module:
    """Return a model of modules with the recorded names, shapes, bases and attributes."""
    built: dict[str, torch.nn.Module] = {}

    def add(path: str) -> torch.nn.Module:
        """Return a module, with those that contain it."""
        if path not in built:
            name, base, says = recorded["modules"].get(path, ["Module", "Module", {}])
            made: Any = type(name, (getattr(torch.nn, base),), {})
            built[path] = module = made.__new__(made)
            torch.nn.Module.__init__(module)
            for key, value in says.items():
                value = type("Config", (), value) if key == "config" else value
                setattr(module, key, value)
            parent, _, own = path.rpartition(".")
            if path:
                add(parent).add_module(own, module)
        return built[path]

    for _, shape, *names in recorded["params"]:
        param = torch.nn.Parameter(torch.empty(shape, device="meta"))
        for name in names:
            path, _, leaf = name.rpartition(".")
            add(path).register_parameter(leaf, param)
    return built[""]


def choices(recorded: dict[str, Any]) -> dict[str, str]:
    """Return algorithm, layout and reason of each recorded parameter."""
    return {
        param.name: param.log_line + " (warned)" * param.is_unclear
        for param in choose(rebuild(recorded))
    }


_USUAL = ("embedding", "head", "output layer", "bias")
_INTRODUCTION = """# Parameters of Muon by architecture

`MuonAdamW.from_model` with its defaults, by the rules of
[fsdp2.md](fsdp2.md#which-parameters-muon-gets), for {} architectures of transformers 5.24 (one
layer of each kind). Muon gets every projection and expert, and AdamW embeddings, heads, biases
and vectors. The table has the exceptions. Brackets have the number of matrices in a parameter, or
their outputs; T marks weights stored as (inputs, outputs), italics a warning.
`python scripts/maintainer/architectures.py` writes the page.

No exceptions: {}.
"""


def page(records: dict[str, Any]) -> str:
    """Return the page with a row for architectures that have the same exceptions."""
    models: dict[str, list[str]] = {}
    for model_type, recorded in records.items():
        cells: dict[str, dict[str, None]] = {"muon": {}, "adamw": {}}
        for kind, _, name, *_ in recorded["params"]:
            algorithm, _, reason = kind.partition(": ")
            algorithm, _, layout = algorithm.partition(", ")
            is_usual = not layout if algorithm == "muon" else reason in _USUAL
            if not is_usual or reason.endswith("(warned)"):
                cells[algorithm][_cell(name, layout, reason)] = None
        row = " | ".join(", ".join(cell) for cell in cells.values())
        models.setdefault(row, []).append(model_type)
    plain = ", ".join(models.pop(" | ", []))
    lines = [
        _INTRODUCTION.format(len(records), plain),
        "| model | Muon | AdamW |",
        "| --- " * 3 + "|",
    ]
    lines += [f"| {', '.join(names)} | {row} |" for row, names in models.items()]
    return "\n".join([*lines, "", "Read next: [trainers.md](trainers.md).", ""])


def _cell(name: str, layout: str, reason: str) -> str:
    short = ".".join([p for p in name.removesuffix(".weight").split(".") if not p.isdigit()][-2:])
    is_stored = layout.endswith("transposed True")
    sizes = layout.removesuffix("transposed True").strip(", ").removeprefix("split_sizes ")
    text = f"`{short}`" + (f" [{sizes.strip('()')}]" if sizes else "") + " T" * is_stored
    return f"*{text}*" if reason.endswith("(warned)") else text


def main() -> None:
    """Record the architectures if asked to, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="needs transformers")
    parser.add_argument("--plan", action="store_true", help="needs transformers")
    logging.disable(logging.WARNING)
    options = parser.parse_args()
    if options.plan:
        return plan_all()
    if options.record:
        found = {}
        for model_type, changes in ARCHITECTURES.items():
            found[model_type] = record(build(model_type, changes))
        rows = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items()]
        RECORD.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    PAGE.write_text(page(json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main()
