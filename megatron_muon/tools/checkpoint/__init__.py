# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Verify and convert checkpoints: ``python -m megatron_muon.checkpoint``.

Neither a GPU, a process group nor megatron is needed.

Files, each importing only those above it::

    reading       values, and bytes compared with their checksums
    writing       writes values that are read from another checkpoint
    names         a parameter in the tensor of all layers and experts
    conversion    Muon under DDP, as Megatron saves it, for Megatron-FSDP, and back
    command       flags and output

The format is ``torch.distributed.checkpoint``. Megatron calls it ``fsdp_dtensor`` if Megatron-FSDP
wrote it.
"""
