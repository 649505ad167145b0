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
        wrap: Takes the original, returns the replacement; None for no change.
        source_lines: Lines that its source must contain, without indentation.
        repaired_text: Text in the target's class or module, in a later release that needs no
            repair; empty if there is no such release.
        applies_to: ``later`` for releases that have the symbol, ``v2`` for releases with
            Megatron-FSDP v2, ``call`` for the time of a call (``replaced()``). Those of
            Megatron-Bridge apply once their module is imported.
    """

    symbol: str
    purpose: str
    wrap: Callable[[Any], Any] | None = field(default=None, repr=False)
    source_lines: tuple[str, ...] = ()
    repaired_text: str = ""
    applies_to: Literal["all", "later", "v2", "call"] = "all"

    def holder(self) -> tuple[Any, str]:
        """Import the module or class that has the target, and return it with the last name."""
        name = self.symbol.replace(":", ".").rpartition(".")[2]
        return pkgutil.resolve_name(self.symbol[: -len(name) - 1]), name

    def is_needed(self) -> bool:
        """Return whether the imported megatron needs this change."""
        if self.symbol.startswith("megatron.bridge."):
            applies = self.symbol.partition(":")[0] in sys.modules
        elif self.applies_to in ("later", "v2"):
            applies = exists(_V2_FLAG if self.applies_to == "v2" else self.symbol)
        else:
            applies = self.applies_to == "all"
        return applies and not self.is_repaired()

    def is_repaired(self) -> bool:
        """Return whether the imported megatron has made this change itself."""
        if not self.repaired_text:
            return False
        try:
            return self.repaired_text in inspect.getsource(self.holder()[0])
        except (ImportError, AttributeError, OSError, TypeError):
            return False

    def problems(self) -> list[str]:
        """Return one sentence for each difference between the target and the tested ones."""
        try:
            target = pkgutil.resolve_name(self.symbol)
            source = inspect.getsource(target) if self.source_lines else ""
        except (ImportError, AttributeError, OSError, TypeError) as error:
            found = f"{type(error).__name__}: {error}"
            return [f"{self.symbol}: expected it to exist, found {found}."]
        lines = {line.strip() for line in source.splitlines()}
        return [
            f"{self.symbol}: expected the source line {line!r}, found none."
            for line in self.source_lines
            if line not in lines
        ]


def exists(symbol: str) -> bool:
    """Return whether the imported release has a symbol."""
    try:
        pkgutil.resolve_name(symbol)
    except (ImportError, AttributeError):
        return False
    return True


@dataclass
class Patches:
    """Patches of a process.

    Args:
        known: All patches.
        applied: Patches that were applied, or found as they are relied on.
        replaced: Holder, name, value before and value after of every replacement.
        v2_problems: Differences of Megatron-FSDP v2 from the tested releases, one sentence each,
            for which it is refused.
    """

    known: Sequence[Patch] = ()
    applied: list[Patch] = field(default_factory=list)
    replaced: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    v2_problems: list[str] = field(default_factory=list)

    def update(self, known: Sequence[Patch] | None = None) -> None:
        """Apply the patches that are needed by now, as of modules that were imported since.

        Args:
            known: All patches; None for those of the call before.

        Raises:
            IncompatibleMegatronError: A target differs from the tested ones; nothing was changed.
        """
        self.known = self.known if known is None else known
        needed = [patch for patch in self.known if patch not in self.applied and patch.is_needed()]
        found = {patch: patch.problems() for patch in needed}
        if problems := [text for p in needed for text in found[p] if p.applies_to != "v2"]:
            raise IncompatibleMegatronError(problems)
        self.v2_problems = [text for texts in found.values() for text in texts]
        if self.v2_problems:
            logger.warning("Megatron-FSDP v2 is refused: %s", " ".join(self.v2_problems))
            needed = [patch for patch in needed if patch.applies_to != "v2"]
        self.apply(needed)

    def apply(self, patches: Sequence[Patch]) -> None:
        """Replace the targets of verified patches; the originals stay in ``__wrapped__``."""
        replaced, by_id = [], {}
        for patch in patches:
            self.applied.append(patch)
            if patch.wrap is None:
                continue
            holder, name = patch.holder()
            before = inspect.getattr_static(holder, name)
            original = getattr(holder, name)
            # Tracebacks, help() and inspect.signature show the original.
            after: Any = functools.update_wrapper(patch.wrap(original), original)
            # A static method must stay one, or instances would pass themselves.
            is_static = isinstance(before, staticmethod)
            replaced.append((holder, name, before, staticmethod(after) if is_static else after))
            if getattr(original, "__module__", None) == getattr(holder, "__name__", ""):
                by_id[id(original)] = after
        for module in [m for name, m in sys.modules.items() if name.startswith("megatron.")]:
            replaced += [
                (module, name, value, by_id[id(value)])
                for name, value in vars(module).items()
                if id(value) in by_id
            ]
        # All or none: a wrap may raise.
        for holder, name, _, after in replaced:
            setattr(holder, name, after)
        self.replaced += replaced

    def revert(self) -> None:
        """Restore the originals.

        Modules that were imported since keep the replacements, and so does who wrapped one.
        """
        for holder, name, before, after in self.replaced:
            if inspect.getattr_static(holder, name) is after:
                setattr(holder, name, before)
        self.known, self.applied, self.replaced = (), [], []


PATCHED = Patches()


@contextmanager
def replaced(patch: Patch) -> Iterator[None]:
    """Apply a patch of ``call`` while a block runs."""
    holder, name = patch.holder()
    before = getattr(holder, name)
    assert patch.wrap is not None
    setattr(holder, name, patch.wrap(before))
    try:
        yield
    finally:
        setattr(holder, name, before)
