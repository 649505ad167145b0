# SPDX-FileCopyrightText: Copyright (c) 2026 megatron-muon contributors
# SPDX-License-Identifier: Apache-2.0
"""Hook of mkdocs and extension of griffe for the documentation site.

Documents name others by file, as on GitHub; here links have the titles of pages. Search ranks
titles high: pasted error messages and questions would not lead to their page, and the reference
would hide all others. griffe would take the first line of ``Communication: ...`` for the title of a
note, and Markdown shows both colons of ``::``.
"""

import inspect
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe

_BOOSTS = {"docs/README.md": 10, "docs/api.md": 0.5}
_LINK = re.compile(r"\[[\w/]+\.md(,[^\]]*)?\]\(([\w./]+\.md)")
_LICENCE = '<a href="https://www.apache.org/licenses/LICENSE-2.0">Apache-2.0</a>'
_SECTION = re.compile(r"^(Communication|Memory|Source|Method): (.*(?:\n +.*)*)", re.MULTILINE)


def _paragraph(section: re.Match[str]) -> str:
    return f"\n**{section[1]}:** {inspect.cleandoc(section[2])}\n"


def on_config(config: Any) -> None:
    """Put version and licence below every page."""
    package = Path("megatron_muon/__init__.py").read_text()
    version = re.search(r'^__version__ = "(.*)"', package, re.MULTILINE)[1]  # type: ignore[index]
    config.copyright = f"megatron-muon {version}, {_LICENCE}"


def on_page_markdown(markdown: str, page: Any, files: Any, **kwargs: Any) -> str:
    """Rank a page in searches, and name the pages that it links to by title."""
    page.meta["search"] = {"boost": _BOOSTS.get(page.file.src_uri, 1)}
    folder = posixpath.dirname(page.file.src_uri)

    def titled(link: re.Match[str]) -> str:
        target = files.get_file_from_path(posixpath.normpath(posixpath.join(folder, link[2])))
        # mkdocs reports a link to a missing page.
        return f"[{target.page.title}{link[1] or ''}]({link[2]}" if target else link[0]

    return _LINK.sub(titled, markdown)


class DocstringSections(griffe.Extension):
    """Turn sections that only this project has into paragraphs with a bold heading."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object once it is loaded."""
        if obj.docstring:
            text = _SECTION.sub(_paragraph, obj.docstring.value)
            # Links from docs/api.md, which has all docstrings.
            text = re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", text)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
