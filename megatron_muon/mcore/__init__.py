# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The part of megatron-muon that imports megatron.

Order of the modules, each importing only those before it::

    support          what Muon under Megatron-FSDP refuses, and why
    fsdp_model       reads Megatron-FSDP: parameters, row shards, groups
    muon             FSDPZeROTensorParallelMuon
    chained_optimizer  FSDPMuonChainedOptimizer
    factory          build_megatron_fsdp_emerging_optimizer
    arguments        command-line flags and their checks
    repairs          upstream defects of HFSDP
    patches          the list of what :func:`megatron_muon.enable` changes
"""
