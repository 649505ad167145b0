# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The public interface is the recorded one: names, signatures and flags that users rely on.

A change that is meant goes into the changelog, and into ``public_interface.txt``, which is what
this file prints as a script.
"""

import argparse
import difflib
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_ranks

RECORDED = Path(__file__).with_name("public_interface.txt")
REMEDY = (
    "If it is meant: .venv/bin/python tests/unit_tests/test_public_interface.py > "
    "tests/unit_tests/public_interface.txt"
)
MODULES = ("megatron_muon", "megatron_muon.fsdp2")
# Not in __all__: a star import would import megatron.
BUILDER = "build_megatron_fsdp_emerging_optimizer"


def _signature(value: Any) -> str:
    """Return names and defaults; annotations are printed otherwise by other versions of Python."""
    signature = inspect.signature(value)
    parameters = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in signature.parameters.values()
        if each.name != "self"
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def _described(name: str, value: Any) -> Iterator[str]:
    """Yield a line for a function, and for a class one more for each method of its own."""
    if inspect.isclass(value) and issubclass(value, Exception):
        yield f"{name}: {value.__mro__[1].__name__}"
    elif inspect.isclass(value):
        yield f"{name}{_signature(value)}"
        for method, function in sorted(vars(value).items()):
            function = getattr(function, "__func__", function)
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"{name}.{method}{_signature(function)}"
    elif callable(value):
        yield f"{name}{_signature(value)}"
    else:
        yield name


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        name = ", ".join(action.option_strings) or action.dest
        values = "" if action.nargs == 0 else " VALUE"
        if action.choices is not None:
            values = f" {{{','.join(map(str, action.choices))}}}"
        yield f"{name}{values}, default {action.default!r}"


def interface() -> str:
    """Return the public interface as text, a line for each name."""
    from megatron_muon.mcore.arguments import add_flags
    from megatron_muon.tools.plan.command import _parser

    lines = []
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        names = {*module.__all__} | ({BUILDER} if module_name == "megatron_muon" else set())
        for name in sorted(names):
            lines += _described(f"{module_name}.{name}", getattr(module, name))
    lines += ["", "Flags of training:", *_flags(add_flags(argparse.ArgumentParser()))]
    lines += ["", "Flags of python -m megatron_muon.plan:", *_flags(_parser())]
    return "\n".join(lines) + "\n"


@pytest.mark.ranks
def test_public_interface_is_the_recorded_one() -> None:
    """Names, arguments, defaults and flags are the recorded ones."""
    # On a rank: it has imported megatron, which takes ten seconds here.
    (found,) = run_ranks(1, interface).check().results
    recorded = RECORDED.read_text()
    change = difflib.unified_diff(recorded.splitlines(), found.splitlines(), lineterm="", n=0)
    assert found == recorded, "\n".join([*change, REMEDY])


if __name__ == "__main__":
    print(interface(), end="")
