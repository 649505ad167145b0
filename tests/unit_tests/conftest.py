# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests, and their device."""

import os
import time
from pathlib import Path

import pytest
from helpers import device, ranks

try:
    import hypothesis
except ImportError:  # environments of check_compat.py
    pass
else:
    # Whether a test passes must not depend on how fast the machine is.
    hypothesis.settings.register_profile(
        "any_machine",
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("any_machine")


# With --piece no test starts later than this, and ranks of one that runs are ended soon after.
_LAST_START_S, _LAST_END_S = 400.0, 460.0
_STARTED_AT = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the device be chosen."""
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where ranks compute (cpu)"
    )
    parser.addoption(
        "--piece",
        choices=device.PIECES,
        help="a part of what runs with --device cuda, of eight minutes at most",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the device of this process and of all that it starts."""
    os.environ.pop("MEGATRON_MUON_TEST_DEVICE", None)
    if config.getoption("--device") == "cuda":
        # So that asking for a GPU does not use CUDA: ranks are forked.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: expected a GPU that torch can use, got none")
        os.environ["MEGATRON_MUON_TEST_DEVICE"] = "cuda"
    elif config.getoption("--piece"):
        raise pytest.UsageError("--piece: expected --device cuda, of which it is a part, got cpu")
    if config.getoption("--piece"):
        ranks.ends_at = _STARTED_AT + _LAST_END_S


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that lack a GPU or megatron-core, and end a piece in time."""
    # Here and not by a mark: all of them make one line.
    if item.get_closest_marker("cuda") and item.config.getoption("--device") == "cpu":
        pytest.skip("needs a GPU: --device cuda")
    if item.get_closest_marker("megatron") and not device.has_megatron():
        pytest.skip("needs megatron-core")
    if item.config.getoption("--piece") and time.monotonic() > _STARTED_AT + _LAST_START_S:
        pytest.skip("no time is left in this piece")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes run tests: one more than cores, since ranks wait for each other.

    Each holds a server that has imported megatron. On GPUs one process runs all, in their order.
    """
    is_on_gpu = config.getoption("--device") == "cuda"
    return 0 if is_on_gpu else min(len(os.sched_getaffinity(0)) + 1, 8)


def _files_on_gpu(config: pytest.Config) -> list[str]:
    """Return the files that run with ``--device cuda``, the largest questions first."""
    pieces = [config.getoption("--piece")] if config.getoption("--piece") else device.PIECES
    return [file for piece in pieces for file in device.PIECES[piece]]


def _below_tests(path: Path) -> str:
    return os.path.relpath(path, Path(__file__).parent)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that do not run on a GPU, if that is asked for."""
    if config.getoption("--device") == "cpu" or collection_path.suffix != ".py":
        return None
    return _below_tests(collection_path) not in _files_on_gpu(config) or None


# After others have left out what was not asked for.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put tests on a GPU into the order of the pieces, without those of CPU ranks."""
    if config.getoption("--device") == "cpu":
        return
    files = _files_on_gpu(config)
    kept = [item for item in items if not item.get_closest_marker("cpu_only")]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted(kept, key=lambda item: files.index(_below_tests(item.path)))
