# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Commands that no training process imports; the core and ``mcore`` know none of them.

``plan/``
    estimated time, bytes and memory of jobs that do not run: ``python -m megatron_muon.plan``
``check/``
    checks of a machine, and its rates: ``python -m megatron_muon.check``
``checkpoint/``
    verification and conversion of checkpoints: ``python -m megatron_muon.checkpoint``
"""
