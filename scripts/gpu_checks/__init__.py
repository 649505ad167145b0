# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The checks of ``scripts/gpu_checks.py``, each importing only files above it.

======================  ========================================================================
report                  what a check finds out, on disk after each entry
catalogue               the list of checks: number, name, limit, where it is
tables                  lines and figures as markdown and JSON
runner                  runs a check in a process of its own, until its limit
cpu_preload             what checks without a GPU have imported when they start
bounce                  collectives that gloo lacks for CUDA tensors, through the CPU
ranks                   ranks of one check, all on the one GPU or on the CPU
toy_model               a tiny GPT under Megatron-FSDP
reference               Newton-Schulz of emerging-optimizers on whole matrices
exact                   float64, matrices that are hard, products as another dtype rounds
owner_layouts           random layouts, and owner compute over them
machine                 card, driver and versions
gradients               1: main gradients against those of the unsharded model
norms                   2: sums of squares on the device
newton_schulz_bits      3: stacks against singles, neighbours, slots, NaN, alignment
elementwise             4: fused element-wise forms against separate ones
engine                  5: owner compute on 2, 4 and 8 ranks against whole matrices
host_reads              6: where a step makes the host wait
newton_schulz_speed     7: TFLOP/s by shape and batch
newton_schulz_backends  3, 7: each way to compute it against float64, and its time
launches                7: kernels and host time of a matrix
memory                  8: staging memory; out of memory on one rank
scripts                 9: training scripts on megatron-core alone, and on plain FSDP2
scalar_optimizers       9: Adam and Lion beside Muon
pretraining             10: runs through the launcher
nccl                    10: NCCL with one rank
command                 the command line
======================  ========================================================================
"""
