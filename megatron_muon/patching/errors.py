# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""The error that says which part of an installed Megatron is not what was tested."""

from collections.abc import Sequence

from megatron_muon.patching.versions import table_text
from megatron_muon.user_errors import UserError


class IncompatibleMegatronError(UserError, RuntimeError):
    """The installed packages differ from those that the patches were written for.

    Args:
        problems: One sentence for each difference: symbol, expected, found.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(
            "megatron-muon cannot be enabled, nothing was changed:\n  "
            + "\n  ".join(self.problems)
            + f"\n{table_text()}"
        )
