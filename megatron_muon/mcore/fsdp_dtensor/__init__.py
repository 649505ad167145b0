# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Megatron's ``fsdp_dtensor`` checkpoints: state by name, checks before a load, safe saves.

Files, each importing only those above it::

    stages   layers of pipeline stages by their position in the whole model
    state    state and settings of parameters by name, as checkpoints hold them
    steps    a checkpoint of one Adam, loaded by another
    loading  a checkpoint is compared with the run before it is loaded
    saving   an interrupted save leaves what was there
    repairs  upstream defects of these checkpoints
"""
