# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The only code that imports megatron; :mod:`megatron_muon.cpu_ranks` replaces some of it.

Files, each importing only those above it::

    refusal                 one refused setting
    pipeline_settings       what pipeline stages cannot have
    unsupported             what Muon under Megatron-FSDP refuses, and why
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
    flags                   command-line flags
    arguments               checks of the command line, and settings read from it
    splits                  tags the rows that are orthogonalized separately
    pipeline_repairs        upstream defects of pipeline stages
    routing                 which optimizer steps a parameter
    fsdp_dtensor/           checkpoints: state by name, checks before a load, safe saves, repairs
    chained_optimizer       FSDPMuonChainedOptimizer
    factory                 build_megatron_fsdp_emerging_optimizer
    unsharded               the flags under DDP, with upstream's Muon
    gradient_repairs        upstream defects of gradients: scale and norm
    fused_gradient_repairs  upstream defects of gradients: fused accumulation
    pipeline_patches        the list of what is changed for pipeline stages
    patches                 the list of what is changed in megatron
    later_patches           that of what later releases alone have
    requirements            the list of what is relied on
    enable                  applies the patches, and reverts them
"""
