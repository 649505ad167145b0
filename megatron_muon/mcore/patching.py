# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Patches of the installed megatron: verified before any is applied, and reversible.

A function is replaced in the module that defines it, and in the modules of megatron that have
imported it by name. Modules that are imported later get the replacement. A patch that names a
module that imports the function changes this module alone.
"""

import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_muon.mcore.versions import IncompatibleMegatronError

# Marks our replacements, to notice if a target was replaced again.
_MARK = "__megatron_muon_patch__"


@dataclass(frozen=True)
class Patch:
    """One change to megatron.

    Args:
        symbol: Function or class that is replaced, as "module:name".
        purpose: Why, in a sentence.
        wrap: Takes the original, returns the replacement.
        source_lines: Lines that its source must contain, without indentation.
        repaired_text: Text in the target's class or module, in a later release that needs no
            repair; empty if there is no such release.
    """

    symbol: str
    purpose: str
    wrap: Callable[[Any], Any] = field(repr=False)
    source_lines: tuple[str, ...] = ()
    repaired_text: str = ""

    @property
    def module(self) -> str:
        """Name of the module with the definition."""
        return self.symbol.partition(":")[0]

    @property
    def attribute(self) -> str:
        """Last part of the name."""
        return self.symbol.replace(":", ".").rpartition(".")[2]

    def holder(self) -> Any:
        """Import the module or class that has the target as an attribute."""
        return pkgutil.resolve_name(self.symbol[: -len(self.attribute) - 1])

    def is_repaired(self) -> bool:
        """Return whether the imported megatron no longer needs this change."""
        if not self.repaired_text:
            return False
        try:
            return self.repaired_text in _source(self.holder())
        except (ImportError, AttributeError, OSError, TypeError):
            return False

    def problems(self) -> list[str]:
        """Return one sentence for each difference between the target and the tested ones."""
        return symbol_problems(self.symbol, self.source_lines)


def exists(symbol: str) -> bool:
    """Return whether the imported release has a symbol."""
    try:
        pkgutil.resolve_name(symbol)
    except (ImportError, AttributeError):
        return False
    return True


def symbol_problems(symbol: str, source_lines: Sequence[str] = ()) -> list[str]:
    """Return one sentence for each difference between a symbol and the tested ones.

    Args:
        symbol: "module:name".
        source_lines: As in ``Patch``.
    """
    try:
        installed = pkgutil.resolve_name(symbol)
        lines = _lines(installed) if source_lines else frozenset()
    except (ImportError, AttributeError) as error:
        return [f"{symbol}: expected it to exist, found {type(error).__name__}: {error}."]
    except (OSError, TypeError) as error:
        return [f"{symbol}: expected readable source, found {error}."]
    return [
        f"{symbol}: expected the source line {line!r}, found none."
        for line in source_lines
        if line not in lines
    ]


# Several patches read one module, and finding the end of a function takes milliseconds.
@functools.cache
def _source(target: Any) -> str:
    return inspect.getsource(target)


@functools.cache
def _lines(target: Any) -> frozenset[str]:
    return frozenset(line.strip() for line in _source(target).splitlines())


@dataclass
class Patches:
    """Patches of a process.

    Args:
        applied: In the order of their application.
        waiting: Patches of modules that are not imported yet.
        v2_problems: Differences of Megatron-FSDP v2 from the tested releases, one sentence each,
            for which it is refused.
    """

    applied: list[Patch] = field(default_factory=list)
    waiting: list[Patch] = field(default_factory=list)
    v2_problems: list[str] = field(default_factory=list)


PATCHED = Patches()


def apply_to_imported() -> None:
    """Apply the patches whose modules were imported after ``enable()``.

    Raises:
        IncompatibleMegatronError: A target differs from the tested ones; nothing was changed.
    """
    patches = [patch for patch in PATCHED.waiting if patch.module in sys.modules]
    if problems := [problem for patch in patches for problem in patch.problems()]:
        raise IncompatibleMegatronError(problems)
    apply_all(patches)
    PATCHED.applied += patches
    PATCHED.waiting = [patch for patch in PATCHED.waiting if patch not in patches]


def apply_all(patches: Sequence[Patch]) -> None:
    """Replace the targets of verified patches; the originals stay in ``__wrapped__``."""
    pairs = []
    for patch in patches:
        original = pkgutil.resolve_name(patch.symbol)
        # Tracebacks, help() and inspect.signature show the original.
        replacement = functools.update_wrapper(patch.wrap(original), original)
        setattr(replacement, _MARK, patch.symbol)
        pairs.append((original, replacement))
    # All or none: a wrap may raise.
    _replace_all(patches, pairs)


def revert_all(patches: Sequence[Patch]) -> None:
    """Restore the originals of patches that ``apply_all()`` applied.

    Raises:
        RuntimeError: A target is no longer our replacement; nothing was restored.
    """
    current = [pkgutil.resolve_name(patch.symbol) for patch in patches]
    for patch, replacement in zip(patches, current, strict=True):
        if getattr(replacement, _MARK, None) != patch.symbol:
            raise RuntimeError(
                f"{patch.symbol}: expected the replacement of megatron-muon, got {replacement!r}. "
                "Undo the later change first; nothing was restored."
            )
    _replace_all(patches, [(each, each.__wrapped__) for each in current])


def _replace_all(patches: Sequence[Patch], pairs: Sequence[tuple[Any, Any]]) -> None:
    """Replace the first object of each pair by the second, wherever megatron has it by name."""
    for patch, (_, replacement) in zip(patches, pairs, strict=True):
        holder, name = patch.holder(), patch.attribute
        # A static method must stay one, or instances would pass themselves.
        is_static = isinstance(inspect.getattr_static(holder, name, None), staticmethod)
        setattr(holder, name, staticmethod(replacement) if is_static else replacement)
    replacements = {
        id(old): new
        for patch, (old, new) in zip(patches, pairs, strict=True)
        if getattr(old, "__module__", None) == patch.module
    }
    for module in [m for name, m in sys.modules.items() if name.startswith("megatron.")]:
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                setattr(module, name, replacements[id(value)])
