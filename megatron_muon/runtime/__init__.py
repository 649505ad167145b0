# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run a plan: torch.distributed, no megatron. The words are those of :mod:`megatron_muon.plan`.

Files, each importing only those above it::

    dtensor_layout      the local rows of a DTensor
    agreement           ranks compare what they know, and fail together
    groups              process groups by their ranks
    domain              the ranks that exchange matrices
    exchange            the collectives that move rows and results
    machine_cost        the costs that all ranks plan with
    arena               memory that exists while a step runs
    adjacent            tensors that are adjacent in memory, as few long ones
    row_table           rectangles that one kernel moves, listed on the device
    row_kernel          that kernel, in Triton
    row_moves           moves a list of rectangles, by the kernel or by torch
    ranges              ranges of a profile, by phase
    stacks              the parts that a rank owns, in memory
    moments             the state of a method, block by block
    norms               norms of blocks, summed in float64
    local_rows          this rank's rows: read normalized, written scaled
    plan_runner         gathers, orthogonalizes and scatters the buckets of one plan
    engine              runs the plans of a rank: local rows in, orthogonalized local rows out
    owner_compute       plans, groups and engine for the matrices of an optimizer
    weight_decay        emerging-optimizers' rules, all parameters at once
    momentum            weight decay, momentum and Nesterov, all parameters at once
    finite              which gradients are not finite
    lion                Lion on local rows
    dependencies        what is relied on in torch and emerging-optimizers
"""
