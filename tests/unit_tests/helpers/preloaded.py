# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Imported once by the fork server, so that ranks start with torch and megatron already loaded.

Without megatron-core the server loads torch alone, which is enough for tests of plain FSDP2. For
GPUs nothing stands in for them, and CUDA is not used: forked ranks could not use it then.
"""

import contextlib
import gc
import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: F401
import torch.distributed.fsdp  # noqa: F401

from helpers.device import has_megatron

if has_megatron():
    import helpers.preloaded_megatron  # noqa: F401

# After CPU ranks have replaced names of torch.
import megatron_muon.fsdp2  # noqa: F401

with contextlib.suppress(ImportError):  # where scripts/check_compat.py tests other versions
    import hypothesis.strategies  # noqa: F401

# What is here now is never collected: a rank would copy its pages to do so.
gc.collect()
gc.freeze()
