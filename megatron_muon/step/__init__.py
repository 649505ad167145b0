# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The optimizer step of both front ends, on parameters described by ``megatron_muon.rows``.

``MuonStep`` plans the exchange of an optimizer's matrices, creates its state, and steps it.
``mcore`` and ``fsdp2`` check their arguments and parameters, and build one each.

Files, each importing only those above it::

    elementwise     weight decay and momentum of a group at once, scale factors; memory of others
    lion            Lion on local rows
    dependencies    names of torch and emerging-optimizers that the step relies on
    stored_state    momentum in bfloat16, and float32 copies of bfloat16 parameters
    offload         state in CPU memory between steps
    plan_inputs     parameters that share a plan, and their process groups
    hooks           additions to a step, and their order; cautious weight decay and AdaMuon
    matrix_step     decay, momentum, exchange and update of local tensors
    owner_state     state that the owner of a matrix keeps
    metrics         norms of a step
    muon_step       MuonStep
    owned_matrix    a whole matrix on its owner, with an optimizer of its own
    whole_matrix    optimizers of whole matrices, which owners step in place of Muon
    second_moments  methods that divide results by second moments; settings of Muon
"""
