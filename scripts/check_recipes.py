# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run the recipes of ``scripts/recipes`` with their libraries, in an environment of their own.

    .venv/bin/python scripts/check_recipes.py                   # all, about 15 minutes
    .venv/bin/python scripts/check_recipes.py --only lightning  # whose name contains the text
    .venv/bin/python scripts/check_recipes.py --keep DIR        # keep the environment, or use it

Each recipe trains on two ranks, with MuonAdamW and with torch's AdamW, and checks that a run which
loads has the losses of the run that went on. Needs a package registry. The exit status is 1 if any
of them fails.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from check_compat import find_uv

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "scripts" / "recipes"
# For one run of a recipe.
LIMIT_S = 600.0


class Recipe(NamedTuple):
    """A script and how to call it.

    Args:
        script: Name in ``scripts/recipes``, without suffix.
        package: The library.
        calls: Further arguments of each call; all calls of a run share a folder.
    """

    script: str
    package: str
    calls: tuple[tuple[str, ...], ...] = ((),)


CLASS_AND_FULL = ("--form", "class", "--state-dict-type", "FULL_STATE_DICT")
RECIPES = (
    Recipe("with_accelerate", "accelerate"),
    Recipe("with_trainer", "transformers"),
    Recipe("with_trainer", "transformers", (CLASS_AND_FULL,)),
    Recipe("with_lightning", "lightning"),
    Recipe("with_torchtitan", "torchtitan", ((), ("--resume",))),
    Recipe("with_megatron_fsdp", "megatron-fsdp"),
    Recipe("with_automodel", "nemo-automodel"),
    Recipe("with_xtuner_groups", "torch"),
)


def build_environment(folder: Path) -> Path:
    """Install the libraries and this checkout, and return the environment's Python.

    Args:
        folder: Of the environment; used as it is if it is there.

    Raises:
        subprocess.CalledProcessError: An installation failed; its error is printed.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        uv = find_uv()
        subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
        install = [*uv, "pip", "install", "--quiet", "--python", str(python)]
        pins = [
            line
            for line in (ROOT / "requirements.in").read_text().splitlines()
            if re.match(r"(torch|emerging-optimizers)==", line)
        ]
        subprocess.run(
            [*install, *pins, "setuptools", "-r", FOLDER / "requirements.txt"], check=True
        )
        no_deps = ["--no-deps", "-r", FOLDER / "requirements-no-deps.txt"]
        subprocess.run([*install, *no_deps], check=True)
        subprocess.run(
            [*install, "--no-deps", "--no-build-isolation", "--editable", ROOT], check=True
        )
    return python


def run(recipe: Recipe, optimizer: str, python: Path, folder: Path) -> str:
    """Run a recipe on two ranks; return ``ok``, or the line of its error."""
    command = [python, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2"]
    script = [FOLDER / f"{recipe.script}.py", "--optimizer", optimizer, "--folder", folder]
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    output = ""
    for call in recipe.calls:
        done = subprocess.run(
            [*command, *script, *call],
            env=env,
            timeout=LIMIT_S,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output = done.stdout
        if done.returncode:
            print(output[-6000:], file=sys.stderr)
            errors = [line for line in output.splitlines() if re.search(r"\w(Error|Exit)\b", line)]
            return f"FAILED: {(errors or output.splitlines() or ['nothing was printed'])[0]}"
    return "ok" if "losses after loading: equal" in output else "FAILED: no result was printed"


def main() -> int:
    """Run the requested recipes and print the table; return 0 if all went well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="recipes whose name contains it")
    parser.add_argument(
        "--keep", metavar="DIR", type=Path, help="environment to use, or to make and keep"
    )
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="megatron-muon-recipes-") as temporary:
        python = build_environment((options.keep or Path(temporary) / "venv").absolute())
        print("| recipe | optimizer | result |\n| --- | --- | --- |")
        for number, recipe in enumerate(RECIPES):
            if options.only not in recipe.script:
                continue
            for optimizer in ("muon", "adamw"):
                folder = Path(temporary) / f"{number}-{optimizer}"
                results.append(run(recipe, optimizer, python, folder))
                name = " ".join((recipe.script, *recipe.calls[0]))
                print(f"| {name} | {optimizer} | {results[-1]} |", flush=True)
    return 0 if set(results) == {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())
