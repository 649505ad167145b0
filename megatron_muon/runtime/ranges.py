# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranges of a profile, by phase of a step; they cost nothing where no profiler runs."""

import functools
from collections.abc import Callable

import torch
from torch.autograd import profiler


def in_range[**P, R](name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that shows calls of a function as ``Muon.NAME`` in profiles.

    ``torch.profiler`` and ``torch.autograd.profiler.emit_nvtx``, for Nsight Systems, set the flag.
    ``record_function`` itself does not ask: it would call into torch in every step.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        """Wrap the function."""

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            """Call it, in a range while a profiler runs."""
            if not profiler._is_profiler_enabled:
                return function(*args, **kwargs)
            with torch.profiler.record_function(f"Muon.{name}"):
                return function(*args, **kwargs)

        return call

    return decorate
