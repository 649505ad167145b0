# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Patches of the installed megatron: verified before any is applied, and reversible.

A function is replaced in the module that defines it, and in the modules of megatron that have
imported it by name. Modules that are imported later get the replacement. A patch that names a
module that imports the function changes this module alone.

No other file of this package replaces an object of another one.
"""

import functools
import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_muon.mcore.versions import IncompatibleMegatronError

logger = logging.getLogger(__name__)

# A parameter of main's configuration: releases with it have Megatron-FSDP v2 in Megatron's flags.
_V2_FLAG = "megatron.core.distributed:DistributedDataParallelConfig.megatron_fsdp_version"


@dataclass(frozen=True)
class Patch:
    """One change to megatron, or a symbol that is relied on without a change.

    Args:
        symbol: Function or class, as "module:name".
        purpose: Why, in a sentence.
        replacement: Called in place of the original, which is its first argument; None for no
            change.
        source_lines: Lines that its source must contain, without indentation.
        repaired_text: Text in the target's class or module, in a later release that needs no
            repair; empty if there is no such release.
        applies_to: ``later``: to releases that have the symbol; ``v2``: to releases with
            Megatron-FSDP v2; ``call``: while a call runs (``replaced()``). Patches of
            Megatron-Bridge apply once their module is imported.
    """

    symbol: str
    purpose: str
    replacement: Callable[..., Any] | None = field(default=None, repr=False)
    source_lines: tuple[str, ...] = ()
    repaired_text: str = ""
    applies_to: Literal["all", "later", "v2", "call"] = "all"

    def holder(self) -> tuple[str, str]:
        """Return the symbol of the module or class with the target, and the target's last name."""
        name = self.symbol.replace(":", ".").rpartition(".")[2]
        return self.symbol[: -len(name) - 1], name

    def is_needed(self) -> bool:
        """Return whether the imported megatron needs this change."""
        if self.symbol.startswith("megatron.bridge."):
            return self.symbol.partition(":")[0] in sys.modules
        if self.applies_to == "call" or self.is_repaired():
            return False
        symbol = {"v2": _V2_FLAG, "later": self.symbol}.get(self.applies_to)
        return symbol is None or _find(symbol) is not None

    def is_repaired(self) -> bool:
        """Return whether the imported megatron has made this change itself."""
        holder = _find(self.holder()[0]) if self.repaired_text else None
        return holder is not None and self.repaired_text in inspect.getsource(holder)

    def problems(self) -> list[str]:
        """Return one sentence for each difference between the target and the tested ones."""
        if (target := _find(self.symbol)) is None:
            return [f"{self.symbol}: expected it to exist, found none."]
        source = inspect.getsource(target) if self.source_lines else ""
        lines = {line.strip() for line in source.splitlines()}
        return [
            f"{self.symbol}: expected the source line {line!r}, found none."
            for line in self.source_lines
            if line not in lines
        ]


def _find(symbol: str) -> Any:
    """Import a symbol, or return None if the installed release lacks it."""
    try:
        return pkgutil.resolve_name(symbol)
    except (ImportError, AttributeError):
        return None


@dataclass
class Patches:
    """Patches of a process.

    Args:
        known: All patches.
        applied: Patches that were applied, or found as they are relied on.
        v2_problems: Differences of Megatron-FSDP v2 from the tested releases, one sentence each,
            for which it is refused.
    """

    known: Sequence[Patch] = ()
    applied: list[Patch] = field(default_factory=list)
    v2_problems: list[str] = field(default_factory=list)
    # Holder, name, value before and value after of every replacement.
    _replaced: list[tuple[Any, str, Any, Any]] = field(default_factory=list)

    def update(self) -> None:
        """Apply the known patches that are needed by now, as of modules that were imported since.

        Raises:
            IncompatibleMegatronError: A target differs from the tested ones; nothing was changed.
        """
        needed = [patch for patch in self.known if patch not in self.applied and patch.is_needed()]
        of_v2 = [patch for patch in needed if patch.applies_to == "v2"]
        if problems := [text for p in needed if p not in of_v2 for text in p.problems()]:
            raise IncompatibleMegatronError(problems)
        self.v2_problems = [text for patch in of_v2 for text in patch.problems()]
        if self.v2_problems:
            logger.warning("Megatron-FSDP v2 is refused: %s", " ".join(self.v2_problems))
            needed = [patch for patch in needed if patch not in of_v2]
        self.apply(needed)

    def apply(self, patches: Sequence[Patch]) -> None:
        """Replace the targets of verified patches; the originals stay in ``__wrapped__``."""
        self.applied += patches
        for patch in patches:
            if patch.replacement is None:
                continue
            symbol, name = patch.holder()
            holder = pkgutil.resolve_name(symbol)
            original = getattr(holder, name)
            replacement = _replacement(patch, original)
            self._set(holder, name, replacement)
            if original.__module__ != holder.__name__:
                continue
            for module in [m for key, m in sys.modules.items() if key.startswith("megatron.")]:
                for key in [key for key, value in vars(module).items() if value is original]:
                    self._set(module, key, replacement)

    def _set(self, holder: Any, name: str, after: Any) -> None:
        before = inspect.getattr_static(holder, name)
        # A static method must stay one, or instances would pass themselves.
        after = staticmethod(after) if isinstance(before, staticmethod) else after
        setattr(holder, name, after)
        self._replaced.append((holder, name, before, after))

    def revert(self) -> None:
        """Restore the originals.

        Modules that were imported since keep the replacements, and so does code that wrapped one.
        """
        for holder, name, before, after in self._replaced:
            if inspect.getattr_static(holder, name) is after:
                setattr(holder, name, before)
        self.known, self.applied, self._replaced = (), [], []


PATCHED = Patches()


def _replacement(patch: Patch, original: Any) -> Callable[..., Any]:
    # Tracebacks, help() and inspect.signature show the original.
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        """Call the function of the patch, with the original as its first argument."""
        return patch.replacement(original, *args, **kwargs)  # type: ignore[misc]

    return replacement


@contextmanager
def replaced(patch: Patch) -> Iterator[None]:
    """Apply a patch of ``call`` while a block runs."""
    patches = Patches()
    patches.apply([patch])
    try:
        yield
    finally:
        patches.revert()
