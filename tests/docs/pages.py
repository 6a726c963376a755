"""The pages as tests read them: sentences, blocks of code, rows of tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_OUTSIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "benchmarks/README.md")
PAGES = sorted([*(ROOT / name for name in _OUTSIDE), *DOCS.rglob("*.md")])

_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"^\s*([-*]|\d+\.)\s+")
_END = re.compile(r"(?<=\w\w[.!?])\s+|(?<=[.!?:;])\s+(?=[A-Z\"(0-9])|(?<=\.\))\s+|\s→\s")
_WORD = re.compile(r"[^\W_][^\s()]*")


def code_blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of ``language``, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def rows(page: Path) -> Iterator[list[str]]:
    """The cells of each table row, without the rule below a head."""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("| ").split(" | ")]


def sentences(text: str) -> Iterator[str]:
    """The sentences of paragraphs, items and cells, in plain words. A run of code counts as one word. Headings and code
    blocks are left out."""
    for part in _parts(_BLOCK.sub("", text)):
        plain = re.sub(r"(`[^`]*`[,→ ]*)+", "Code ", _LINK.sub(r"\1", part)).replace("*", "")
        yield from _END.split(plain)


def num_words(sentence: str) -> int:
    """The number of words in a sentence."""
    return len(_WORD.findall(sentence))


def _parts(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        is_item, is_row = _ITEM.match(line) is not None, line.startswith("|")
        if lines and (not line.strip() or is_item or is_row or line.startswith("#")):
            yield " ".join(lines)
            lines = []
        if is_row:
            yield from line.strip("| ").split(" | ")
        elif line.strip() and not line.startswith(("#", "    ")):
            lines.append(_ITEM.sub("", line, count=1).strip())
        elif line.startswith("    ") and lines:  # an item's next line
            lines.append(line.strip())
