# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Errors that the user repairs, told from crashes; imports nothing of this package.

Every rank raises such an error alike, before it trains, and its text says what to do. Under the
launcher rank 0 ends with that text alone; everything else ends with its traceback. A script that
calls the package itself gets an exception as any other.
"""


class UserError(Exception):
    """What is installed, or what the user asked for, cannot work."""


class SettingsError(UserError, ValueError):
    """A flag, a variable of the environment or a path cannot work."""
