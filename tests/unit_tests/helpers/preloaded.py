# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Imported once by the fork server, so that ranks start with torch and megatron already loaded.

Without megatron-core the server loads torch alone, which is enough for tests of plain FSDP2. For
GPUs nothing stands in for them, and CUDA is not used: forked ranks could not use it then.
"""

import argparse
import contextlib
import gc
import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: F401
import torch.distributed.fsdp  # noqa: F401

from helpers.device import has_megatron, kind


def _import_megatron() -> None:
    """Import megatron, on CPU ranks unless tests compute on GPUs.

    What every rank of every world would compute anew, with the same result, is remembered: the help
    texts that Megatron reads out of its sources, and the lines of them that patches rely on.
    """
    import cpu_ranks

    if kind() == "cpu":
        cpu_ranks.enable()

    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.training

    import megatron_muon
    import megatron_muon.launcher
    import megatron_muon.mcore.patches

    with contextlib.suppress(ImportError):  # a run imports these when it needs them
        import megatron.core.datasets.blended_megatron_dataset_builder
        import megatron.core.datasets.helpers
        import megatron.core.models.mimo
        import megatron.core.tokenizers.text.libraries
        import megatron.core.tokenizers.text.models
        import megatron.training.yaml_arguments  # noqa: F401
    with contextlib.suppress(AttributeError):  # another release of megatron-core may have others
        _remember_help_texts()
    with contextlib.suppress(megatron_muon.IncompatibleMegatronError):
        # Finds the source lines of all targets once.
        megatron_muon.enable()
        megatron_muon.disable()


def _remember_help_texts() -> None:
    from megatron.training import argument_utils, arguments

    factory = argument_utils.ArgumentGroupFactory
    original = factory._get_field_docstrings
    texts: dict[type, dict[str, str]] = {}

    def _get_field_docstrings(self: object, config: type) -> dict[str, str]:
        if config not in texts:
            texts[config] = original(self, config)
        return dict(texts[config])

    factory._get_field_docstrings = _get_field_docstrings
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


if has_megatron():
    _import_megatron()

# After CPU ranks have replaced names of torch.
import megatron_muon.fsdp2  # noqa: E402, F401

with contextlib.suppress(ImportError):  # where check_compat.py tests other versions
    import hypothesis.strategies  # noqa: F401

# What is here now is never collected: a rank would copy its pages to do so.
gc.collect()
gc.freeze()
