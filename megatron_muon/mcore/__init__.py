# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The part of megatron-muon that imports megatron.

Order of the modules, each importing only those before it::

    support          what Muon under Megatron-FSDP refuses, and why
    fsdp_model       reads Megatron-FSDP: parameters, row shards, groups
    muon             FSDPZeROTensorParallelMuon
    arguments        command-line flags and their checks
    optimizer_state  state and settings of parameters by name, as checkpoints hold them
    chained_optimizer    FSDPMuonChainedOptimizer
    factory          build_megatron_fsdp_emerging_optimizer
    repairs          upstream defects of gradients
    checkpoint_repairs   upstream defects of ``fsdp_dtensor`` checkpoints
    checkpoint_loading   a checkpoint is compared with the run before it is loaded
    checkpoint_saving    a save that is cut short leaves what was there
    patches          the list of what :func:`megatron_muon.enable` changes
"""
