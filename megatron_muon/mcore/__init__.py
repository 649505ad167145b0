# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The only code that imports megatron; :mod:`megatron_muon.cpu_ranks` replaces some of it.

Files, each importing only those above it::

    versions                accepted and tested releases
    patching                verifies, applies and reverts patches
    relied_on               symbols that are relied on and not replaced
    unsupported             refused settings, with reasons
    fsdp_v2_model           reads parameters of Megatron-FSDP v2
    fsdp_model              reads them, and groups, of whichever version a model has
    gradient_check          checks that gradients are complete and finite on all ranks
    local_gradients         the gradients of this rank's rows
    gradient_norm           norm, clipping and check, with one host synchronization
    muon                    FSDPZeROTensorParallelMuon, and its step
    adaptive_muon           Muon whose results are divided by a second moment
    outer_reductions        checks that HSDP reduced all gradients over the outer ranks
    qk_clip                 clips main weights between step and installation
    sharded_chunks          what a step does to the model, in both versions
    arguments               command-line flags, their checks, and settings read from them
    splits                  tags the rows that are orthogonalized separately
    pipeline_repairs        upstream defects of pipeline stages
    routing                 which optimizer steps a parameter
    fsdp_dtensor/           checkpoints: state by name, checks before a load, safe saves, repairs
    chained_optimizer       FSDPMuonChainedOptimizer
    unsharded               the flags under DDP, with upstream's Muon
    factory                 build_megatron_fsdp_emerging_optimizer
    gradient_repairs        upstream defects of gradients: scale and norm
    fused_gradient_repairs  upstream defects of gradients: fused accumulation
    patches                 the patches of megatron
    enable                  applies the patches, and reverts them
"""
