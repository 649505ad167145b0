# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

import torch

from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync


def test_preloaded_tensors_of_the_cpu_are_copies(monkeypatch):
    """A step that is taken while a checkpoint is written does not change what is written."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
    step = torch.tensor(10.0)
    bucket = ('file', 'key', ([], [('step', step)]))

    (_, _, (_, [(_, staged)])) = FileSystemWriterAsync.preload_tensors([bucket])[0]
    step += 1

    assert staged == 10
    assert staged.untyped_storage().data_ptr() != step.untyped_storage().data_ptr()
