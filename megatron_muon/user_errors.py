# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Errors that the user can repair, as opposed to crashes; imports nothing of this package.

Such an error is raised before training and says what to do, mostly on every rank alike. Compiling
the dataset helpers fails on rank 0 alone; there the launcher ends the other ranks through torchrun.
"""


class UserError(Exception):
    """What is installed, or what the user asked for, cannot work."""


class SettingsError(UserError, ValueError):
    """A flag, a variable of the environment or a path cannot work."""
