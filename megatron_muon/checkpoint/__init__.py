# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read, verify and convert saved checkpoints without a GPU, a process group or megatron.

Files, each importing only those above it::

    folders       finds the finished checkpoint of a --save folder
    reading       table of contents, tensors and objects, without running code
    verification  compares chunks, files and checksums
    writing       writes values that are read from another checkpoint
    names         a parameter in the tensor of all layers and experts
    conversion    Muon under DDP, as Megatron saves it, for Megatron-FSDP, and back
    __main__      python -m megatron_muon.checkpoint verify|convert DIR

The format is ``torch.distributed.checkpoint``. Megatron calls it ``fsdp_dtensor`` if Megatron-FSDP
wrote it.
"""
