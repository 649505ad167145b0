# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz backends behind one interface.

A backend runs on a stack of matrices, and returns its cost for the planner. Files import torch only
inside of functions, as plans are made without torch.

With n the shorter side of a matrix, m the longer one, a = m / n, the floating-point operations of
five steps with quintic coefficients, in units of n^3:

========  =========  ===============================================================================
standard  20 a + 10  emerging-optimizers' own steps: Gram matrix, its square, their product with the
                     matrix
gram      8 a + 28   iterates on the n x n Gram matrix, and multiplies the matrix at the end
========  =========  ===============================================================================

Files, each importing only those above it::

    settings  steps, coefficients, precision and scale; functions of owners, NorMuon
    backend   the interface
    standard  the steps of emerging-optimizers
    gram      the Gram form, and its restarts
"""

from typing import Literal

from megatron_muon.newton_schulz.backend import Backend
from megatron_muon.newton_schulz.gram import Gram
from megatron_muon.newton_schulz.standard import Standard

BackendChoice = Literal["standard", "gram"]

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (Standard(), Gram())}
