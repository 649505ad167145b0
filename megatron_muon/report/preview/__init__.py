# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plans of jobs that do not run: from the shape of a model.

Files, each importing only those above it::

    model_shape     the matrices of a transformer, by layer, and published shapes
    fsdp_buffer     how Megatron-FSDP would shard the parameters of one unit
    simulation      plans of all domains of a job
"""
