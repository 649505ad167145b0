# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Errors that the user can repair, as opposed to bugs; imports nothing of this package.

They are raised before training, on all ranks, with advice.

Errors of code that plain FSDP2 runs too name arguments, such as ``exchange.comm_dtype``;
``naming_flags()`` puts Megatron's flags in their place.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Others of ``exchange`` are --muon-fsdp-NAME.
_FLAGS = {
    "fp32_matmul_prec": "--muon-fp32-matmul-prec",
    "Set num_ns_steps": "Set --muon-num-ns-steps",
    "num_ns_steps: ": "--muon-num-ns-steps: ",
    "coefficient_type: ": "--muon-coefficient-type: ",
    "momentum_dtype: ": "--exp-avg-dtype: ",
    "Leave the matrix whole": "Leave the matrix whole (--muon-no-split-qkv)",
}
_ARGUMENT = re.compile("|".join([*map(re.escape, _FLAGS), r"exchange\.\w+"]))


class UserError(Exception):
    """The installed packages, or the user's settings, cannot work."""


class SettingsError(UserError, ValueError):
    """A flag, a variable of the environment or a path cannot work."""


def in_flags(text: str) -> str:
    """Return an error's text with flags in place of arguments."""
    return _ARGUMENT.sub(lambda match: _FLAGS.get(match[0]) or _flag(match[0]), text)


def _flag(argument: str) -> str:
    return "--muon-fsdp-" + argument.removeprefix("exchange.").replace("_", "-")


@contextmanager
def naming_flags() -> Iterator[None]:
    """Let ``ValueError`` and ``RuntimeError`` of the body name flags."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        # Subclasses of other libraries may have more than a text.
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (in_flags(error.args[0]),)
        raise
