# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Imported once by the fork server, so that ranks start with megatron already loaded."""

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_muon import cpu_ranks  # noqa: E402

cpu_ranks.enable(force=True)

import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402, F401
import megatron.training  # noqa: E402, F401

import megatron_muon.mcore.patches  # noqa: E402, F401
