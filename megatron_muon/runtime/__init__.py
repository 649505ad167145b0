# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run a plan: torch.distributed, no megatron. ``megatron_muon.plan`` defines the terms.

Files, each importing only those above it::

    tensors         local tensors: of a DTensor, adjacent in memory, not finite
    agreement       process groups, and checks by which all ranks go on or raise together
    exchange        the collectives that move rows and results
    arena           memory of a step
    row_kernel      one kernel that moves the rectangles of a table, in Triton
    row_moves       moves the rectangles of a table, by the kernel or by torch
    norms           norms of blocks, summed in float64
    stack_task      Newton-Schulz of one stack, and the owner's function
    plan_runner     gathers, orthogonalizes and scatters the buckets of one plan
    engine          runs the plans of a rank: local rows in, orthogonalized local rows out
    engine_builder  settings of all ranks, plans, process groups, connections
"""
