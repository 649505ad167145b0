# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The only code of the package that imports megatron.

Files, each importing only those above it::

    checkpoint_folders  finds the finished checkpoint of a --save folder; no megatron
    checkpoint_reading  its table of contents; no megatron
    versions            accepted and tested releases
    patching            verifies, applies and reverts patches
    relied_on           symbols that are relied on and not replaced
    unsupported         refused settings, with reasons
    torch_fsdp2         models that Megatron shards by PyTorch's FSDP2
    fsdp_model          reads the parameters and groups of a model
    sharded_matrices    base of optimizers of matrices; SOAP and others
    muon                FSDPZeROTensorParallelMuon, and the step of all of them
    qk_clip             clips main weights between step and installation
    options             settings without a field in OptimizerConfig
    gradient_repairs    upstream defects of gradients: scale, norm and fused accumulation
    chunks              operations of a step on a model chunk
    arguments           command-line flags, and their checks
    splits              tags the rows that are orthogonalized separately; routes parameters
    pipeline_repairs    upstream defects of pipeline stages
    checkpoint_state    optimizer state and layers by name, as checkpoints hold them
    checkpoint_repairs  upstream defects of checkpoints
    chunk_offsets       offsets of shards in the tensors of a checkpoint
    checkpoint_load     finds a checkpoint, and compares it with the run
    checkpoint_save     an interrupted save leaves the checkpoint before it
    async_save          a thread writes a checkpoint while training goes on
    non_persistent      which of two checkpoints is loaded, and which are deleted
    metrics_log         writes metrics of steps to TensorBoard and W&B
    chained_optimizer   FSDPMuonChainedOptimizer, and its check of gradients
    bridge_trainer      functions of Megatron-Bridge that are wrapped
    factory             build_megatron_fsdp_emerging_optimizer
    patches             the patches of megatron
    enable              applies the patches, and reverts them
"""
