# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon for Megatron-FSDP: whole-matrix orthogonalization of row-sharded momentum.

Importing this package changes nothing. :func:`enable` patches an installed megatron-core so that
``--optimizer muon --use-megatron-fsdp`` trains; :func:`disable` takes the patches back.

Each layer imports only the ones above it::

    layout          integers: which rank holds which rows of a matrix
    cost            seconds of Newton-Schulz by shape, seconds of traffic by link
    placement       matrices on ranks up to a capacity
    assignment      owner of each matrix: one function of the layouts, the same on every rank
    plan/           buckets, stacks and messages; ``python -m megatron_muon.plan`` reports them
    settings        what the ``--muon-fsdp-*`` flags say
    agreement       ranks compare what they know, and fail together
    domain          which ranks exchange matrices
    exchange        the collectives that move rows and results
    newton_schulz   emerging-optimizers' maths on stacks of matrices
    engine          runs a plan: local rows in, orthogonalized local rows out
    owner_compute   domain, plan and engine for the parameters of one optimizer
    chunk_layout    row shards of a DTensor that lies in no buffer of Megatron-FSDP
    checkpoint/     reads and verifies checkpoints; ``python -m megatron_muon.checkpoint``
    mcore/          the only code that imports megatron: optimizer, factory, arguments, repairs
    patching/       verifies and applies what changes in megatron
    launcher        ``torchrun ... -m megatron_muon SCRIPT ARGS``; without a GPU on ``cpu_ranks/``
"""

from megatron_muon.mcore.enable import disable, enable, is_enabled
from megatron_muon.patching import IncompatibleMegatronError

__version__ = "0.1.0"
__all__ = ["IncompatibleMegatronError", "__version__", "disable", "enable", "is_enabled"]
