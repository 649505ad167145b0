# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's flags in place of the arguments that errors of shared code name.

Code that plain FSDP2 runs too names arguments, as ``exchange.wire``. Who set them by flags reads
flags.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Others of ``exchange`` are --muon-fsdp-NAME.
_FLAGS = {
    "exchange.mode": "--muon-fsdp-exchange",
    "fp32_matmul_prec": "--muon-fp32-matmul-prec",
    "Set num_ns_steps": "Set --muon-num-ns-steps",
    "Leave the matrix whole": "Leave the matrix whole (--muon-no-split-qkv)",
}
_ARGUMENT = re.compile("|".join([*map(re.escape, _FLAGS), r"exchange\.\w+"]))


def in_flags(text: str) -> str:
    """Return an error's text with flags in place of arguments."""
    return _ARGUMENT.sub(lambda found: _FLAGS.get(found[0]) or _flag(found[0]), text)


def _flag(argument: str) -> str:
    return "--muon-fsdp-" + argument.removeprefix("exchange.").replace("_", "-")


@contextmanager
def naming_flags() -> Iterator[None]:
    """Let errors of what runs inside name flags: ``ValueError`` and ``RuntimeError``."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        # Subclasses of other libraries may have more than a text.
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (in_flags(error.args[0]),)
        raise
