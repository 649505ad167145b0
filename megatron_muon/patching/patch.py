# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Patches as data: what is replaced, what it relies on, and why.

==============  ================================================================================
target          a function or class of megatron, found by module and name at call time
requirement     a target that is relied on but not replaced
patch           a target and the function that wraps it
source tree     a megatron whose source contains the patches (``patches/``), not the released wheel
==============  ================================================================================
"""

import functools
import hashlib
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_muon.patching.versions import IncompatibleMegatronError

# Marks our replacements, to notice if a target was replaced again.
_MARK = "__megatron_muon_patch__"


def names(parameters: str) -> tuple[str, ...]:
    """Return the names of parameters that are separated by commas."""
    return tuple(parameters.split(", "))


@dataclass(frozen=True)
class Target:
    """A symbol of another package, and what the patches rely on in it.

    Args:
        module: Module that holds the symbol.
        name: Dotted name inside of the module.
        parameters: Names of its parameters in order; None for symbols that are not called.
        source_lines: Lines its source must contain, without indentation.
        later_parameters: Names that a later release adds at the end, and that do not matter.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    source_lines: tuple[str, ...] = ()
    later_parameters: tuple[str, ...] = ()

    @property
    def symbol(self) -> str:
        """Dotted path, for messages."""
        return f"{self.module}.{self.name}"

    def holder(self) -> Any:
        """Import the object that the symbol is an attribute of."""
        return pkgutil.resolve_name(f"{self.module}:{self.name.rpartition('.')[0]}")

    @property
    def attribute(self) -> str:
        """Last part of the name."""
        return self.name.rpartition(".")[2]

    def found(self) -> Any:
        """Import the symbol."""
        return getattr(self.holder(), self.attribute)

    def exists(self) -> bool:
        """Return whether the imported release has the symbol."""
        try:
            self.found()
        except (ImportError, AttributeError):
            return False
        return True

    def problems(self) -> list[str]:
        """Return one sentence for each difference between the symbol and what is relied on."""
        try:
            found = self.found()
        except (ImportError, AttributeError) as error:
            return [f"{self.symbol}: expected it to exist, found {type(error).__name__}: {error}."]
        problems = []
        if self.parameters is not None:
            parameters = tuple(inspect.signature(found).parameters)
            if parameters not in (self.parameters, self.parameters + self.later_parameters):
                problems.append(
                    f"{self.symbol}: expected parameters {self.parameters}, found {parameters}."
                )
        if self.source_lines:
            try:
                source = _source(found)
            except (OSError, TypeError) as error:
                return [*problems, f"{self.symbol}: expected readable source, found {error}."]
            lines = _lines(found)
            digest = hashlib.sha256(textwrap.dedent(source).encode()).hexdigest()[:12]
            problems += [
                f"{self.symbol}: expected the source line {line!r}, found none (source {digest})."
                for line in self.source_lines
                if line not in lines
            ]
        return problems


@dataclass(frozen=True)
class Patch:
    """One change to megatron.

    Args:
        target: What is wrapped.
        purpose: Why, in a sentence.
        wrap: Takes the original, returns the replacement.
        tree_line: Line, without indentation, that the diff in ``patches/`` adds to megatron's
            source for the same change; empty if there is no diff.
        tree_module: Module that the diff adds it to; None for the target's.
        repaired_text: Text in the target's class or module, in a later release that needs no
            repair; None if there is no such release.
    """

    target: Target
    purpose: str
    wrap: Callable[[Any], Any] = field(repr=False)
    tree_line: str = ""
    tree_module: str | None = None
    repaired_text: str | None = None

    def is_repaired(self) -> bool:
        """Return whether the imported megatron no longer needs this change."""
        if self.repaired_text is None:
            return False
        try:
            return self.repaired_text in _source(self.target.holder())
        except (ImportError, AttributeError, OSError, TypeError):
            return False

    def is_in_tree(self) -> bool:
        """Return whether the source of the imported megatron already contains this change."""
        try:
            module = importlib.import_module(self.tree_module or self.target.module)
            return self.tree_line in _lines(module)
        except (ModuleNotFoundError, OSError, TypeError):
            return False


# Several patches read one module, and finding the end of a function takes milliseconds.
@functools.cache
def _source(found: Any) -> str:
    return inspect.getsource(found)


@functools.cache
def _lines(found: Any) -> frozenset[str]:
    return frozenset(line.strip() for line in _source(found).splitlines())


def verify_all(targets: Sequence[Target]) -> None:
    """Check all targets.

    Raises:
        IncompatibleMegatronError: With all differences of all targets.
    """
    problems = [problem for target in targets for problem in target.problems()]
    if problems:
        raise IncompatibleMegatronError(problems)


def apply_all(patches: Sequence[Patch]) -> None:
    """Replace the targets of verified patches; the originals stay in ``__wrapped__``."""
    for patch in patches:
        original = patch.target.found()
        replacement = patch.wrap(original)
        replacement.__wrapped__ = original
        setattr(replacement, _MARK, patch.target.symbol)
        _replace(patch.target, replacement)


def revert_all(patches: Sequence[Patch]) -> None:
    """Restore the originals of patches that :func:`apply_all` applied.

    Raises:
        RuntimeError: A target is no longer our replacement; nothing was restored.
    """
    current = [patch.target.found() for patch in patches]
    for patch, found in zip(patches, current, strict=True):
        if getattr(found, _MARK, None) != patch.target.symbol:
            raise RuntimeError(
                f"{patch.target.symbol}: expected the replacement of megatron-muon, got {found!r}. "
                "Undo the later change first; nothing was restored."
            )
    for patch, found in zip(patches, current, strict=True):
        _replace(patch.target, found.__wrapped__)


def _replace(target: Target, function: Any) -> None:
    """Set an attribute; a static method must stay one, or instances would pass themselves."""
    holder, name = target.holder(), target.attribute
    is_static = isinstance(inspect.getattr_static(holder, name, None), staticmethod)
    setattr(holder, name, staticmethod(function) if is_static else function)
