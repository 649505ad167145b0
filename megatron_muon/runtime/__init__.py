# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Run a plan: torch.distributed, no megatron.

Files, each importing only those before it::

    agreement       ranks compare what they know, and fail together
    domain          which ranks exchange matrices
    exchange        the collectives that move rows and results
    newton_schulz   emerging-optimizers' maths on stacks of matrices
    norms           sums of squares in float64
    engine          runs a plan: local rows in, orthogonalized local rows out
    owner_compute   domain, plan and engine for the parameters of one optimizer
    dtensor_layout  row shards of a DTensor that lies in no buffer of Megatron-FSDP
"""
