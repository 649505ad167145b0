# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Functional test cases in Megatron-LM's schema: recipes name them, ``model_config.yaml`` has them.

Vocabulary, Megatron's:

============  ==================================================================================
recipe        which cases run on which platform; ``recipes/*.yaml``
case          one training; ``test_cases/<model>/<case>/model_config.yaml``
platform      ``dgx_h100`` or ``cpu``; golden values are kept for each
============  ==================================================================================
"""

import itertools
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
ENVIRONMENT = "dev"
# What Megatron checks where a case has no METRICS.
DEFAULT_METRICS = ("lm loss", "num-zeros")

# Flags that only sharding or its checkpoints need; value flags with their value.
SHARDING_FLAGS = {
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy",
    "--outer-dp-sharding-strategy",
    "--num-distributed-optimizer-instances",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
    "--ckpt-format",
    "--save",
    "--load",
    "--save-interval",
}
SHARDING_PREFIXES = ("--megatron-fsdp-", "--muon-fsdp-", "--fsdp-")


class CaseError(ValueError):
    """A case, or a variable of its flags, is unknown."""


@dataclass(frozen=True)
class Case:
    """One training on one platform."""

    model: str
    name: str
    platform: str
    num_ranks: int
    environment: Mapping[str, str]
    arguments: Mapping[str, str]
    test_type: str
    metrics: tuple[str, ...]

    @property
    def golden_path(self) -> Path:
        """File of the golden values, which may not exist yet."""
        name = f"golden_values_{ENVIRONMENT}_{self.platform}.json"
        return FOLDER / "test_cases" / self.model / self.name / name

    @property
    def train_iters(self) -> int:
        """Iterations of a run that nothing stops."""
        return int(self.arguments["--train-iters"])

    @property
    def allows_nondeterminism(self) -> bool:
        """Whether the case itself asks for an approximate comparison."""
        return self.environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "1"

    def unsharded_arguments(self) -> dict[str, str]:
        """Return the flags of the same training under DDP, with upstream's own Muon."""
        return {
            flag: value
            for flag, value in self.arguments.items()
            if flag not in SHARDING_FLAGS and not flag.startswith(SHARDING_PREFIXES)
        }


def command_line(arguments: Mapping[str, str], variables: Mapping[str, str]) -> list[str]:
    """Turn flags of a case into arguments as Megatron's ``_run_training.sh`` does.

    Args:
        arguments: Flags to values.
        variables: Replacements of ``${NAME}``.

    Returns:
        ``--flag`` for true; ``[a b]`` without its brackets, as several arguments; else both as
        they are.

    Raises:
        CaseError: A variable is not among ``variables``.
    """
    line = []
    for flag, value in arguments.items():
        line.append(flag)
        if value == "true":
            continue
        try:
            value = string.Template(value).substitute(variables)
        except KeyError as error:
            raise CaseError(f"${error}: expected one of {sorted(variables)}. Export it.") from None
        is_list = value.startswith("[") and value.endswith("]")
        line += value.strip("[]").split() if is_list else [value]
    return line


def load_cases() -> list[Case]:
    """Read every product of every recipe."""
    cases = []
    for path in sorted((FOLDER / "recipes").glob("*.yaml")):
        recipe = _read(path)
        spec = recipe["spec"]
        for product in recipe["products"]:
            for block in product["products"]:
                names = [name for name in block if name != "cadence"]
                # Megatron takes the first name of test_case.
                (case_name,) = product["test_case"]
                for values in itertools.product(*(block[name] for name in names)):
                    settings = spec | dict(zip(names, values, strict=True))
                    case = _load_case(case_name, settings)
                    # A scope is a label: one case in two scopes is one case.
                    if case not in cases:
                        cases.append(case)
    return cases


def _load_case(name: str, settings: Mapping[str, Any]) -> Case:
    config = _read(FOLDER / "test_cases" / settings["model"] / name / "model_config.yaml")
    return Case(
        model=settings["model"],
        name=name,
        platform=settings["platforms"],
        num_ranks=int(settings["gpus"]),
        environment=config.get("ENV_VARS") or {},
        arguments=config["MODEL_ARGS"],
        test_type=config["TEST_TYPE"],
        metrics=tuple(config.get("METRICS") or DEFAULT_METRICS),
    )


def select_cases(names: list[str], platform: str) -> list[Case]:
    cases = load_cases()
    here = {case.name: case for case in cases if case.platform == platform}
    for name in names:
        if name not in here:
            others = sorted({case.platform for case in cases if case.name == name})
            found = f"one of {', '.join(others)}" if others else "an unknown name"
            raise CaseError(f"{name}: expected one of {platform}: {', '.join(here)}; got {found}.")
    return [here[name] for name in names or here]


def _read(path: Path) -> dict[str, Any]:
    # Scalars as they are written, as Megatron's yq hands them on.
    return yaml.load(path.read_text(), Loader=yaml.BaseLoader)
