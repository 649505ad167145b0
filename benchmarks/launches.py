# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Replace what a GPU would run by functions that count, so that the host alone is timed."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from operation_counts import OperationCounter


class Launches:
    """Replace what a GPU would run by functions that count, and do nothing."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._replaced: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, result: Callable[..., Any]) -> None:
        """Replace a function by one that counts, and returns ``result`` of its arguments."""
        self._replaced.append((owner, name, getattr(owner, name)))

        def counted(*args: Any, **kwargs: Any) -> Any:
            """Count instead of computing."""
            self.counts[name] += 1
            return result(*args, **kwargs)

        setattr(owner, name, counted)

    def restore(self) -> None:
        """Undo all replacements."""
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)


def replace_arithmetic(launches: Launches) -> None:
    """Replace the functions of torch that the step and AdamW call on lists and whole tensors."""
    import torch

    from megatron_muon.newton_schulz import BACKENDS

    numbers: dict[tuple[int, Any], Any] = {}

    def norms(tensors: Sequence[Any], *_: Any, dtype: Any = None, **__: Any) -> Any:
        """Return as many numbers as tensors."""
        key = len(tensors), dtype or tensors[0].dtype
        if key not in numbers:
            device = tensors[0].device
            numbers[key] = tuple(torch.ones((), dtype=key[1], device=device) for _ in tensors)
        return numbers[key]

    def same(first: Any, *_: Any, **kwargs: Any) -> Any:
        """Return the result where it is given, otherwise what is as large."""
        return kwargs.get("out", first)

    for name in dir(torch):
        if name == "_foreach_norm":
            launches.replace(torch, name, norms)
        elif name.startswith("_foreach_") and callable(getattr(torch, name)):
            launches.replace(torch, name, same)
    for name in ("div", "mul"):
        launches.replace(torch, name, same)
    for backend in BACKENDS.values():
        launches.replace(type(backend), "run", lambda self, stack, call: stack)
    try:
        from megatron_muon.runtime import row_kernel
    except ImportError:
        return
    launches.replace(row_kernel, "launch", lambda *_, **__: None)


def count_launches(launches: Launches, step: Callable[[], Any]) -> Counter[str]:
    """Count a step: what is replaced, and what else reaches the dispatcher."""
    launches.counts.clear()
    counter = OperationCounter()
    with counter.counting():
        step()
    others = Counter({"other": sum(counter.now.operations.values())})
    return Counter(launches.counts) + others
