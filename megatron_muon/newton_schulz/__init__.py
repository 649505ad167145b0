# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Ways to compute Newton-Schulz: one file per backend, behind one interface.

A backend runs on a stack of matrices, returns its cost for the planner, and its requirements. Its
file imports torch only inside of functions, as plans are made without torch.

With n the shorter side of a matrix, m the longer one, a = m / n, the floating-point operations of
five steps with quintic coefficients, in units of n^3:

==============  ==========  ========================================================================
standard        20 a + 10   emerging-optimizers' own steps: Gram matrix, its square, their product
                            with the matrix
symmetric       15 a + 5    the same; Triton kernels compute half of a symmetric product
gram            8 a + 28    iterates on the n x n Gram matrix, and multiplies the matrix at the end
gram_symmetric  6 a + 14    the same; quack's kernels compute half of a symmetric product
==============  ==========  ========================================================================

``transformer_engine`` runs the standard steps of split matrices by cuSOLVERMp.

Files, each importing only those above it::

    methods         what changes results: NorMuon, NAMO
    settings        steps, coefficients, precision and scale
    call            settings, shape and parts of a stack
    backend         the interface
    normalize       the norm of the fp32 wire
    standard        the steps as they are
    symmetric       half of the symmetric products
    gram            the Gram form
    gram_symmetric  half of its symmetric products
    transformer_engine  the standard steps of split matrices, by cuSOLVERMp
    registry        all of them by name, and which a job may use
"""
