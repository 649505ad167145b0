# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests, marks of those that start ranks, and how many worlds there were."""

from collections.abc import Iterable, Iterator

import pytest
from helpers import idle_commands, ranks

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


# After others have left out what was not asked for.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the commands that other tests leave time for, and run these others first."""
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
    """Print how many worlds this process started; subprocesses of tests start some more."""
    if ranks.num_worlds:
        terminalreporter.write_line(f"{ranks.num_worlds} worlds of ranks")
