# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Ways to compute Newton-Schulz, each one file behind one interface.

A backend says what it costs, which the planner asks for, and what it needs, and runs on a stack of
matrices. Its file imports torch where it runs, and not before: plans are made without torch.

With n the shorter side of a matrix, m the longer one, a = m / n, floating-point operations of five
steps with quintic coefficients, in units of n^3:

==============  ==========  ========================================================================
standard        20 a + 10   emerging-optimizers' own steps: Gram matrix, its square, their product
                            with the matrix
symmetric       15 a + 5    the same steps; Triton kernels compute half of each symmetric product
gram            8 a + 28    iterates on the n x n Gram matrix, and multiplies the matrix at the end
gram_symmetric  6 a + 14    the same; quack's kernels compute half of each symmetric product
==============  ==========  ========================================================================

Of split matrices ``transformer_engine`` leaves the standard steps to cuSOLVERMp.

Files, each importing only those above it::

    settings        steps, coefficients, precision and scale
    coefficients    emerging-optimizers' sets
    call            what a stack is orthogonalized as
    stack_run       a stack that arrives and leaves portion by portion
    backend         the interface
    normalize       the norm of the fp32 wire
    standard        the steps as they are
    symmetric       half of each symmetric product
    restarts        how many steps the Gram form may take at once
    gram            the Gram form
    gram_symmetric  half of each symmetric product of it
    transformer_engine  the standard steps of split matrices, by cuSOLVERMp
    registry        all of them by name, and which a job may use
"""
