# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Extension of griffe: docstring sections of this project on the documentation site.

griffe would take the first line of ``Communication: ...`` for the title of a note, and Markdown
shows both colons of ``::``.
"""

import inspect
import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(Communication|Memory|Source|Method): (.*(?:\n +.*)*)", re.MULTILINE)


def _paragraph(section: re.Match[str]) -> str:
    return f"\n**{section[1]}:** {inspect.cleandoc(section[2])}\n"


class DocstringSections(griffe.Extension):
    """Turn sections that only this project has into paragraphs with a bold heading."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object once it is loaded."""
        if obj.docstring:
            text = _SECTION.sub(_paragraph, obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
