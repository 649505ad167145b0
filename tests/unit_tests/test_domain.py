# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Process groups of the exchange."""

from ranks import run_ranks


def _timeouts() -> list[float]:
    import datetime

    import torch
    import torch.distributed as dist

    from megatron_muon.runtime.domain import new_groups

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=77))
    groups = new_groups([(0, 1), (dist.get_rank(),)])
    return [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        for group in groups.values()
    ]


def test_new_groups_have_the_timeout_of_the_job():
    """They once waited for half an hour, torch's default, whatever the job had asked for."""
    assert run_ranks(2, _timeouts).check().results == [[77.0, 77.0]] * 2
