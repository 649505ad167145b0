# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Import megatron, on CPU ranks unless tests compute on GPUs, for the server of ranks.

What every rank of every world would compute anew, with the same result, is remembered: the help
texts that Megatron reads out of its sources, and the lines of them that patches rely on.
"""

import argparse
import contextlib
import functools

import cpu_ranks

from helpers.device import kind

if kind() == "cpu":
    cpu_ranks.enable()

import megatron.core.models.gpt.gpt_layer_specs
import megatron.training
from megatron.training import argument_utils, arguments

import megatron_muon
import megatron_muon.mcore.patches

with contextlib.suppress(ImportError):  # a run imports these when it needs them
    import megatron.core.datasets.blended_megatron_dataset_builder
    import megatron.core.datasets.helpers
    import megatron.core.models.mimo
    import megatron.core.tokenizers.text.libraries
    import megatron.training.yaml_arguments  # noqa: F401


def _remember_help_texts() -> None:
    factory = argument_utils.ArgumentGroupFactory
    original = factory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    @functools.wraps(original)
    def _get_field_docstrings(self: object, config: type) -> dict[str, str]:
        if config not in known:
            known[config] = original(self, config)
        return dict(known[config])

    factory._get_field_docstrings = _get_field_docstrings
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


with contextlib.suppress(AttributeError):  # another release of megatron-core may have others
    _remember_help_texts()
with contextlib.suppress(megatron_muon.IncompatibleMegatronError):
    # Finds the source lines of all targets once.
    megatron_muon.enable()
    megatron_muon.disable()
