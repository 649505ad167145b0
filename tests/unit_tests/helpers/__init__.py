# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""What tests share. Rank processes import it by this name, and tests import no other test.

==================  ============================================================================
device              where ranks compute: CPU ranks, a GPU each, or one GPU for all
ranks               runs a function, or a training script, on ranks forked from a server
preloaded           what that server imports, once
layouts             random layouts and orders of a step for property tests
sharded_muon        Muon on hand-made row shards, beside upstream's on whole matrices
toy_fsdp            a tiny GPT under Megatron-FSDP, from megatron-core alone
toy_gpt             flags of the toy GPT that runs train, by layout
parity              losses and norms of runs beside those of DDP
repairs             runs without one repair of upstream's code
checkpoint_runs     runs that save and load, and kills of them
broken_optimizers   ways to break Muon on purpose
collective_timing   collectives that arrive late, or at once
fused_linear        a stand-in for Transformer Engine's linear layer with fused gradients
whole_matrices      Muon and Newton-Schulz of emerging-optimizers, on whole matrices
exact               Newton-Schulz in float64, and matrices that are hard for it
stacks              Newton-Schulz on a stack, with settings by name
fsdp2_models        matrices in every layout that FSDP2 makes, and plain ones
megatron_fsdp       models that Megatron-FSDP has sharded, of versions 1 and 2
kernel_bits         the kernel that moves rows, beside functions of torch
fake_cuda           CUDA tensors without a GPU, and what a step asks of it
later_releases      later releases of emerging-optimizers
commands            commands that tests run as users do
==================  ============================================================================
"""
