# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Hook of mkdocs and extension of griffe for the documentation site.

Search ranks titles high: pasted error messages and questions would not lead to their page, and the
reference would hide all others. griffe would take the first line of ``Communication: ...`` for the
title of a note, and Markdown shows both colons of ``::``.
"""

import inspect
import re
from typing import Any

import griffe

_BOOSTS = {"docs/README.md": 10, "docs/api.md": 0.5}
_SECTION = re.compile(r"^(Communication|Memory|Source|Method): (.*(?:\n +.*)*)", re.MULTILINE)


def _paragraph(section: re.Match[str]) -> str:
    return f"\n**{section[1]}:** {inspect.cleandoc(section[2])}\n"


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Rank a page in searches."""
    page.meta["search"] = {"boost": _BOOSTS.get(page.file.src_uri, 1)}
    return markdown


class DocstringSections(griffe.Extension):
    """Turn sections that only this project has into paragraphs with a bold heading."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object once it is loaded."""
        if obj.docstring:
            text = _SECTION.sub(_paragraph, obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
