# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest

from megatron.training import checkpointing


@pytest.mark.parametrize("load", [None, 'empty'])
def test_metadata_of_the_pretrained_checkpoint_is_read(tmp_path, monkeypatch, load):
    """Metadata are read from the checkpoint that is loaded, which may not be that of --load."""
    pretrained = tmp_path / 'pretrained'
    pretrained.mkdir()
    (pretrained / 'latest_checkpointed_iteration.txt').write_text('10')
    args = SimpleNamespace(
        load=None if load is None else str(tmp_path / load),
        pretrained_checkpoint=str(pretrained),
        ckpt_format='fsdp_dtensor',
        auto_detect_ckpt_format=False,
    )

    class PathIsRead(Exception):
        pass

    def read(path):
        raise PathIsRead(path)

    loaded = ({}, 'checkpoint', False, checkpointing.CheckpointType.FSDP_DTENSOR)
    monkeypatch.setattr(checkpointing, 'get_args', lambda: args)
    monkeypatch.setattr(checkpointing, 'unwrap_model', lambda model: model)
    monkeypatch.setattr(checkpointing, '_load_base_checkpoint', lambda *_, **kwargs: loaded)
    monkeypatch.setattr(checkpointing, '_maybe_setup_gpt_to_hybrid_load', lambda *_: (None, False))
    monkeypatch.setattr(checkpointing, 'FileSystemReader', read)

    with pytest.raises(PathIsRead) as error:
        checkpointing.load_checkpoint([], None, None)
    assert error.value.args == (str(pretrained / 'iter_0000010'),)
