# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Read saved checkpoints without a GPU, a process group or megatron.

Files, each importing only those above it::

    folders    which checkpoints a --save folder holds, and which of them are finished
    storage    what a finished one holds, and where; runs no code from it
    verify     reads every byte, and compares checksums
    report     iteration, optimizer, world; shape, dtype and norm of every tensor
    __main__   python -m megatron_muon.checkpoint inspect|verify DIR

The format is that of ``torch.distributed.checkpoint``. Megatron calls it ``fsdp_dtensor`` if
Megatron-FSDP wrote it.
"""
