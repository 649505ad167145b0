# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Imported once by the fork server, so that ranks start with megatron already loaded.

What every rank of every world would compute anew, with the same result, is remembered: the help
texts that Megatron reads out of its sources, and the shuffled order of its 12 million mock samples.
"""

import argparse
import contextlib
import functools
import gc
import hashlib
import os
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_muon import cpu_ranks  # noqa: E402

cpu_ranks.enable(force=True)

import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402, F401
import megatron.training  # noqa: E402, F401
import numpy  # noqa: E402
import pytest  # noqa: E402, F401
from megatron.core.datasets import gpt_dataset  # noqa: E402
from megatron.training import argument_utils, arguments  # noqa: E402

import megatron_muon.mcore.patches  # noqa: E402, F401

with contextlib.suppress(ImportError):  # where scripts/check_compat.py tests other versions
    import hypothesis.strategies  # noqa: F401

MEMORY = "MEGATRON_MUON_TEST_MEMORY"


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


def _remember_shuffles(folder: Path) -> None:
    original = gpt_dataset._build_shuffle_index

    @functools.wraps(original)
    def _build_shuffle_index(
        num_samples: int, total_size: int, random: numpy.random.RandomState
    ) -> numpy.ndarray:
        _, keys, *rest = random.get_state()
        what = repr((num_samples, total_size, rest)).encode() + keys.tobytes()
        path = folder / f"{hashlib.sha256(what).hexdigest()}.npy"
        if not path.exists():
            written = folder / f"{os.getpid()}_{path.name}"
            numpy.save(written, original(num_samples, total_size, random))
            written.replace(path)
        return numpy.load(path, mmap_mode="r")

    gpt_dataset._build_shuffle_index = _build_shuffle_index


with contextlib.suppress(AttributeError):  # another release of megatron-core may have others
    _remember_help_texts()
if MEMORY in os.environ:
    _remember_shuffles(Path(os.environ[MEMORY]))
# What is here now is never collected: a rank would copy its pages to do so.
gc.collect()
gc.freeze()
