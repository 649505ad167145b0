# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Reports of plans: estimated times, bytes and memory of every rank, also for jobs that do not run.

It imports no torch, and no plan depends on it.

Files, each importing only those above it::

    timeline     the step of one rank on its GPU and links, and a picture
    rank_report  numbers of every rank, and their table
    model_shape  the matrices of a transformer of Megatron-LM, by layer, and published shapes
    simulation   plans of all domains of a job, under Megatron from the shape of a model
    summary      memory and time beside AdamW, and what limits a step
"""
