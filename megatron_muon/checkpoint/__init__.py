# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read, verify and convert saved checkpoints without a GPU, a process group or megatron.

Files, each importing only those above it::

    folders   find a checkpoint in a --save folder
    reading   its table of contents, tensors and objects, without running code from it; verify
    writing   a new checkpoint, of values that are computed while they are written
    from_ddp  Muon under DDP, as Megatron saves it, for Megatron-FSDP
    to_ddp    the other way
    __main__  python -m megatron_muon.checkpoint verify|convert DIR

The format is that of ``torch.distributed.checkpoint``. Megatron calls it ``fsdp_dtensor`` if
Megatron-FSDP wrote it.
"""
