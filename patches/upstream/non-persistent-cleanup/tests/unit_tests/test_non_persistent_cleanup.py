# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.

import pytest

from megatron.training.checkpointing import (
    cleanup_old_non_persistent_checkpoint,
    get_checkpoint_tracker_filename,
)


@pytest.mark.parametrize(
    "tracked, kept",
    [
        ('20', ['iter_0000020']),
        # The save of iteration 20 was killed: 10 is the only checkpoint that can be loaded.
        ('10', ['iter_0000010', 'iter_0000020']),
        (None, ['iter_0000020']),
    ],
)
def test_cleanup_keeps_the_tracked_checkpoint(tmp_path, tracked, kept):
    """The checkpoint that the tracker names is not removed in favor of an unfinished one."""
    for iteration in (5, 10, 20):
        (tmp_path / f'iter_{iteration:07d}').mkdir()
    if tracked is not None:
        with open(get_checkpoint_tracker_filename(str(tmp_path)), 'w') as f:
            f.write(tracked)

    cleanup_old_non_persistent_checkpoint(str(tmp_path), leave_ckpt_num=1, do_async=False)

    assert sorted(path.name for path in tmp_path.glob('iter_*')) == kept
