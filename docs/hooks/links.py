# SPDX-License-Identifier: Apache-2.0
"""One set of links for the repository and the site.

Pages link to each other, and to files outside of ``docs/``, by relative paths, as a reader of the
repository follows them. The site has the same files at the same places, but for ``docs/`` itself,
whose pages are at its top::

    README.md                          README.md, the first page
    docs/moe.md                        moe.md
    benchmarks/results/compare.md      benchmarks/results/compare.md

So every file that a page links to is brought in, pages that these link to as well, and each link is
written anew from its page's place. A link to what is not there stays, and a strict build fails.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START = "README.md"
LINK = re.compile(r"(\]\()(?!\w+:)([^)#\s]+)(#[^)\s]*)?(\))")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
APART = re.compile(r"^<!-- not on the site -->\n(?:.+\n)+", re.MULTILINE)
MARK = re.compile(r"^<!-- (?:run|recipe|not run: .*|file: (?P<name>.*)) -->\n```(\w+)", re.M)


def slug(heading: str, separator: str = "-") -> str:
    """The anchor that GitHub gives a heading; the site gives the same.

    >>> slug("Read, or *not*? `--serve` & more")
    'read-or-not---serve--more'
    """
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", separator)


def place(path: str) -> str:
    """Where a file of the repository lies on the site."""
    return path.removeprefix("docs/")


def target(page: str, link: str) -> str:
    """The file of the repository that a link of a page leads to; a folder means its README."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path


def links(page: str) -> Iterator[str]:
    """Files that a page of the repository links to."""
    text = CODE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for match in LINK.finditer(text):
        yield target(page, match[2])


def linked() -> set[str]:
    """All files of the repository that are reached from the pages."""
    found: set[str] = set()
    waiting = [START, *(str(one.relative_to(ROOT)) for one in (ROOT / "docs").rglob("*.md"))]
    while waiting:
        page = waiting.pop()
        if page not in found and (ROOT / page).is_file():
            found.add(page)
            waiting += links(page) if page.endswith(".md") else ()
    return found


# ------------------------------------------------------------------- events of MkDocs


def on_config(config: Any) -> Any:
    """Give headings the anchors of GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Any, config: Any) -> Any:
    """Bring in what lies outside of ``docs/``."""
    from mkdocs.structure.files import File

    for path in sorted(linked()):
        if files.get_file_from_path(place(path)) is None:
            files.append(File.generated(config, place(path), abs_src_path=os.fspath(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Rewrite links; take out what is not for the site, and the marks that tests read."""
    del files
    markdown = APART.sub("", markdown)
    uri = page.file.src_uri
    source = uri if page.file.abs_src_path == os.fspath(ROOT / uri) else f"docs/{uri}"
    folder = posixpath.dirname(uri) or "."

    def rewritten(match: re.Match[str]) -> str:
        to = posixpath.relpath(place(target(source, match[2])), folder)
        return f"{match[1]}{to}{match[3] or ''}{match[4]}"

    def titled(match: re.Match[str]) -> str:
        title = f' title="{match["name"]}"' if match["name"] else ""
        return f"```{match[2]}{title}"

    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(rewritten, markdown[end : code.start()]), code[0]]
        end = code.end()
    return MARK.sub(titled, "".join([*parts, LINK.sub(rewritten, markdown[end:])]))
