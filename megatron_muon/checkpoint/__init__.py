# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read and convert saved checkpoints without a GPU, a process group or megatron.

Files, each importing only those above it::

    folders        which checkpoints a --save folder holds, and which of them are finished
    storage        what a finished one holds, and where; runs no code from it
    verify         reads every byte, and compares checksums
    writing        a new checkpoint, chunk by chunk
    torch_dist     Muon under DDP, as Megatron saves it, for Megatron-FSDP
    to_torch_dist  the other way
    convert        one for the other
    __main__       python -m megatron_muon.checkpoint verify|convert DIR

The format is that of ``torch.distributed.checkpoint``. Megatron calls it ``fsdp_dtensor`` if
Megatron-FSDP wrote it.
"""
