# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon for Megatron-FSDP: whole-matrix orthogonalization of row-sharded momentum.

Importing this package changes nothing. :func:`enable` patches an installed megatron-core so that
``--optimizer muon --use-megatron-fsdp`` trains; :func:`disable` takes the patches back.

Each layer imports only the ones above it::

    layout      integers: which rank holds which rows of a matrix
    exchange    the collectives that assemble matrices from row shards
    mcore/      the only code that imports megatron: optimizer, factory, arguments, repairs
    patching/   verifies and applies what changes in megatron
    launcher    ``torchrun ... -m megatron_muon SCRIPT ARGS``; without a GPU on ``cpu_ranks/``
"""

from megatron_muon.patching import IncompatibleMegatronError, disable, enable, is_enabled

__version__ = "0.1.0"
__all__ = ["IncompatibleMegatronError", "__version__", "disable", "enable", "is_enabled"]
