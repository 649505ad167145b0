# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""``--optimizer adaptive_muon``: Muon whose results are divided by a second moment.

Files, each importing only those above it::

    second_moment  settings of a moment, and the scale
    adamuon        a moment per element
    held_blocks    a rank's rows of blocks, and sums over the ranks that hold a block
    equal_blocks   blocks of one shape, and moments of all of them
    block_muon     normalizes the results of whole blocks at the end of a step
    normuon        a moment per row, or per column
    namo           a moment per block, of its norm
    methods        the classes for --adaptive-muon-moment2-method
"""
