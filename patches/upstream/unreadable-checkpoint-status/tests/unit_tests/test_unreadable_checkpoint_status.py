# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

from types import SimpleNamespace

import pytest

from megatron.training.checkpointing import _load_base_checkpoint, get_checkpoint_tracker_filename


def exit_status_of_loading(load_dir):
    args = SimpleNamespace(
        non_persistent_ckpt_type=None, non_persistent_global_ckpt_dir=None, ckpt_step=None
    )
    with pytest.raises(SystemExit) as error:
        _load_base_checkpoint(str(load_dir), args, rank0=True)
    return error.value.code


def test_invalid_tracker_fails_the_job(tmp_path):
    """An invalid tracker ends the job with a status that a launcher takes for a failure."""
    with open(get_checkpoint_tracker_filename(str(tmp_path)), 'w') as f:
        f.write('10 ten')
    assert exit_status_of_loading(tmp_path) == 1


def test_truncated_checkpoint_fails_the_job(tmp_path):
    """So does a checkpoint of --ckpt-format torch that was written in part."""
    with open(get_checkpoint_tracker_filename(str(tmp_path)), 'w') as f:
        f.write('10')
    folder = tmp_path / 'iter_0000010' / 'mp_rank_00'
    folder.mkdir(parents=True)
    (folder / 'model_optim_rng.pt').write_bytes(b'PK')
    assert exit_status_of_loading(tmp_path) == 1
