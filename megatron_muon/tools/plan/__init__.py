# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Plans of jobs that do not run: ``python -m megatron_muon.plan``.

Torch is imported for models of transformers alone.

Files, each importing only those above it::

    sizes               elements that all ranks send, receive and stage
    timeline            the step of one rank on its GPU and links, and a picture
    rank_report         numbers of every rank
    model_shape         the matrices of a transformer of Megatron-LM, and published shapes
    simulation          plans of all domains of a job, under Megatron from the shape of a model
    summary             memory and time beside AdamW, and the limits of a step
    transformers_model  plans of a config.json under ``fully_shard``
    command             flags and output
"""
