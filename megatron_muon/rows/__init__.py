# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Descriptions of the rows of a parameter by rank, for both front ends.

It does not import megatron; attributes of Megatron-FSDP's parameters are read in ``megatron_fsdp``.

A *parameter* has a name and a view; plans use mesh, placements and shape of the view. A *box*
is a rectangle of rows and columns; the boxes of all ranks of the mesh follow from placements, from
Megatron-FSDP's buffer or from the sizes of plain tensors. The *matrices* of a parameter and their
*regions* follow from boxes alone; ranks with equal boxes hold the same regions. The *domain*
that exchanges a matrix, and its replicas, follow from mesh and placements of the view::

    parameter -> boxes by rank -> matrices -> one plan input per domain with its replicas (step/)

Files, each importing only those above it::

    megatron_fsdp  the rows of a parameter in the buffer of Megatron-FSDP, versions 1 and 2
    parameters     planned views of parameters, and their boxes, from placements or a buffer
    matrices       the matrices of a parameter, and this rank's rows of them
"""
