# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""One setting that is refused, and how it is found in a command line or in configurations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Unsupported:
    """One setting that cannot work.

    Args:
        flag: How the user asked for it.
        is_requested: Whether these settings ask for it.
        reason: Why it cannot work.
        instead: What to do.
        found: What was given; None where ``flag`` says it all.
    """

    flag: str
    is_requested: Callable[[Settings], bool]
    reason: str
    instead: str
    found: Callable[[Settings], str] | None = None

    def sentence(self, settings: Settings) -> str:
        """Return what was asked for and given, why it cannot work, and what to do."""
        given = f", got {self.found(settings)}" if self.found is not None else ""
        return f"{self.flag}{given}: {self.reason}; {self.instead}."


def value(name: str) -> Callable[[Settings], str]:
    """Return a ``found`` that is the value of one setting."""
    return lambda settings: str(settings.get(name)).removeprefix("torch.")


def flags(*names: str) -> Callable[[Settings], str]:
    """Return a ``found`` that spells those settings that were given as flags."""

    def spelled(settings: Settings) -> str:
        """Spell the flags that were given."""
        given = []
        for name in names:
            found = settings.get(name)
            # A flag without a value is False where it was not given; 0 may have been given.
            if found is None or found is False:
                continue
            flag = "--" + name.replace("_", "-")
            given.append(flag if found is True else f"{flag} {value(name)(settings)}")
        return " ".join(given)

    return spelled


def asks_for(*names: str) -> Callable[[Settings], bool]:
    """Return an ``is_requested`` for some names of ``--optimizer``."""
    return lambda settings: settings.get("optimizer") in names


CHECKPOINTS = ("save", "load", "pretrained_checkpoint")


def has_checkpoints(settings: Settings) -> bool:
    """Return whether a checkpoint is saved or loaded."""
    return any(settings.get(key) is not None for key in CHECKPOINTS)
