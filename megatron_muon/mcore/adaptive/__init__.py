# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""``--optimizer adaptive_muon``: Muon whose results are divided by a second moment.

Files, each importing only those above it::

    second_moment  settings of a moment, and the scale
    adamuon        a moment for each element
    held_blocks    the rows of blocks that a rank holds, and sums over all that hold some
    block_muon     normalizes the results of whole blocks at the end of a step
    normuon        a moment for each row, or each column
    namo           a moment for the norm of a block
    methods        the class of each --adaptive-muon-moment2-method
"""
