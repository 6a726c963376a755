"""A hook of mkdocs (``mkdocs.yml``): adds pages from outside ``docs/``, and rewrites the links between pages.

Pages keep their places in the repository, but ``docs/`` is the site's root. So the hook rewrites repository links as site links. A
link to a file that is not a page, such as an example of values, becomes the file's name.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parent.parent
_PAGES = {"README.md": "index.md"} | {
    path: path
    for path in (
        "SECURITY.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "examples/README.md",
        "helm/README.md",
        "benchmarks/README.md",
    )
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs: add the pages from outside ``docs/``."""
    for source, page in _PAGES.items():
        files.append(File.generated(config, page, content=(_ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Called by mkdocs: rewrite the repository's links as the site's. Raises PluginError on a dead link."""
    del config, files
    sources = {site: source for source, site in _PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewritten(link: re.Match[str]) -> str:
        picture, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        if ":" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (_ROOT / path).exists():
            raise PluginError(f"{source} links to {target}, and there is no {path}")
        there = _PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if there is None:
            return text if text.startswith("`") else f"{text} (`{path}`)"
        here = posixpath.dirname(page.file.src_uri) or os.curdir
        return f"{picture}[{text}]({posixpath.relpath(there, here)}{anchor})"

    return _LINK.sub(rewritten, markdown)
