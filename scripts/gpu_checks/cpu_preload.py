# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Imported once by the server that checks without a GPU are forked from."""

import warnings

with warnings.catch_warnings():
    # Of what megatron does without Transformer Engine, which no check without a GPU has.
    warnings.simplefilter("ignore")
    try:
        # The tests' own: it also remembers what each run of Megatron would compute anew.
        import helpers.preloaded  # noqa: F401
    except ImportError:  # without pytest
        import os

        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        from megatron_muon import cpu_ranks

        cpu_ranks.enable(force=True)
        import megatron.training  # noqa: F401
