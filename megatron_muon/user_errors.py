# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Errors that the user can repair, as opposed to bugs; imports nothing of this package.

They are raised before training, on all ranks, and say what to do. Compiling the dataset helpers
fails on rank 0 alone; the launcher then ends the other ranks through torchrun.
"""


class UserError(Exception):
    """The installed packages, or the user's settings, cannot work."""


class SettingsError(UserError, ValueError):
    """A flag, a variable of the environment or a path cannot work."""
