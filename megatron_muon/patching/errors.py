# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The error that says which part of an installed Megatron is not what was tested."""

from collections.abc import Sequence

TESTED_VERSIONS: dict[str, tuple[str, ...]] = {
    "megatron-core": ("0.19.2",),
    "emerging-optimizers": ("0.3.0",),
}


class IncompatibleMegatronError(RuntimeError):
    """The installed packages differ from those that the patches were written for.

    Args:
        problems: One sentence for each difference: symbol, expected, found.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        tested = "; ".join(f"{name} {', '.join(known)}" for name, known in TESTED_VERSIONS.items())
        super().__init__(
            "megatron-muon cannot be enabled, nothing was changed:\n  "
            + "\n  ".join(self.problems)
            + f"\nTested with {tested}. Install one of these versions."
        )
