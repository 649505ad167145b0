# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run a plan: torch.distributed, no megatron. The words are those of ``megatron_muon.plan``.

Files, each importing only those above it::

    tensors         local tensors: of a DTensor, adjacent in memory, not finite
    agreement       process groups, and checks by which all ranks go on or raise together
    exchange        the collectives that move rows and results
    arena           memory of a step
    row_kernel      one kernel that moves rectangles, in Triton, and their table on the device
    row_moves       moves a list of rectangles, by the kernel or by torch
    moments         second moments of blocks, the state of a method
    norms           norms of blocks, summed in float64
    local_rows      transfers of local rows, normalized or scaled, and stacks of an owner
    plan_runner     gathers, orthogonalizes and scatters the buckets of one plan
    engine          runs the plans of a rank: local rows in, orthogonalized local rows out
    engine_builder  settings of all ranks, plans, process groups, connections
"""
