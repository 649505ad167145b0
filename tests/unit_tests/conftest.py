# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests, their device, marks of those that start ranks, and how many there were."""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from helpers import device, idle_commands, ranks

try:
    import hypothesis
except ImportError:  # environments of scripts/check_compat.py
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
    os.environ.pop("MEGATRON_MUON_DEVICE", None)
    if config.getoption("--device") == "cuda":
        # So that asking for a GPU does not use CUDA: ranks are forked.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: expected a GPU that torch can use, got none")
        os.environ["MEGATRON_MUON_DEVICE"] = "cuda"
    if config.getoption("--piece"):
        ranks.ends_at = _STARTED_AT + _LAST_END_S


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU without one, and end a piece in time."""
    # Here and not by a mark: all of them make one line.
    if item.get_closest_marker("cuda") and item.config.getoption("--device") == "cpu":
        pytest.skip("needs a GPU: --device cuda")
    if item.config.getoption("--piece") and time.monotonic() > _STARTED_AT + _LAST_START_S:
        pytest.skip("no time is left in this piece")


def _leave_out_other_devices(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what runs on a GPU, if that is asked for: the largest questions first."""
    if config.getoption("--device") == "cpu":
        return
    piece = config.getoption("--piece")
    files = [
        file for name in device.PIECES if piece in (None, name) for file in device.PIECES[name]
    ]
    kept = [
        item for item in items if _file(item) in files and not item.get_closest_marker("cpu_only")
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted(kept, key=lambda item: files.index(_file(item)))


def _file(item: pytest.Item) -> str:
    return os.path.relpath(item.path, Path(__file__).parent)


# After others have left out what was not asked for.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the commands that other tests leave time for, and run these others first."""
    _leave_out_other_devices(config, items)
    waiting = {item: list(_idle_commands(item)) for item in items}
    for commands in waiting.values():
        idle_commands.start(commands)
    items.sort(key=lambda item: bool(waiting[item]))


def _idle_commands(item: pytest.Item) -> Iterable[idle_commands.IdleCommand]:
    """Return the commands that a test asks for."""
    commands = getattr(item.module, "idle_commands", None)
    call = getattr(item, "callspec", None)
    name = getattr(item, "originalname", item.name)
    return commands(name, call.params if call is not None else {}) if commands else ()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave out commands that no test has asked for."""
    idle_commands.stop()


@pytest.fixture(autouse=True)
def _worlds_are_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that starts ranks without its mark: -m "not ranks" would start them too."""
    before = ranks.num_worlds
    yield
    is_marked = request.node.get_closest_marker("ranks") is not None
    assert is_marked or ranks.num_worlds == before, "expected pytest.mark.ranks on this test"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what ranks this process started; subprocesses of tests start some more."""
    for line in ranks.summary():
        terminalreporter.write_line(line)
