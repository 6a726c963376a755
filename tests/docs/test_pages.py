"""The pages are readable and current: short sentences, existing paths, and every page and decision linked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from .pages import DOCS, PAGES, ROOT, num_words, rows, sentences

MOST_WORDS = 30
FOLDERS = (
    "common", "kernels", "engine", "wire", "worker", "prefill_worker", "decode_worker", "gateway", "executor", "launcher",
)  # fmt: skip
TROUBLES = DOCS / "troubleshooting.md"
GENERATED = {"settings.md", "metrics.md"}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@every_page
def test_no_sentence_is_long(page: Path) -> None:
    if page.name in GENERATED:
        pytest.skip("its sentences are those of the code")
    text = page.read_text(encoding="utf-8")
    long = [sentence for sentence in sentences(text) if num_words(sentence) > MOST_WORDS]
    assert not long, f"cut in two what has more than {MOST_WORDS} words: {long}"


@every_page
def test_a_row_of_a_table_is_on_one_line(page: Path) -> None:
    """Markdown ends a table at the first line that is not a complete row."""
    broken = [line for line in page.read_text(encoding="utf-8").splitlines() if re.match(r"\|(?!.*\|$)", line)]
    assert not broken, f"join these rows with the lines after them: {broken}"


@every_page
def test_what_a_page_names_is_there(page: Path) -> None:
    """Every path of a source or test file on a page exists."""
    named = re.findall(r"`((?:tests|benchmarks|tools|" + "|".join(FOLDERS) + r")/[\w./-]*)`", page.read_text("utf-8"))
    gone = [path for path in named if not (ROOT / path).exists()]
    assert not gone, f"the page names what is not there: {gone}"


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


def test_every_decision_is_in_the_list() -> None:
    listed = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (DOCS / "decisions" / "index.md").read_text(encoding="utf-8"))
    there = sorted(path.name for path in (DOCS / "decisions").glob("[0-9]*.md"))
    assert sorted(listed) == there


def test_every_page_is_in_the_navigation() -> None:
    """Every page but the single decisions is in ``mkdocs.yml``. (`make docs` finds entries without a page.)"""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    reachable = {path for part in yaml.safe_load(nav) for path in _leaves(part)}
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert {path for path in pages - reachable if not re.match(r"decisions/\d", path)} == set()


def _leaves(part: object) -> list[str]:
    if isinstance(part, dict):
        part = list(part.values())
    if isinstance(part, list):
        return [leaf for one in part for leaf in _leaves(one)]
    return [str(part)]


def _sources() -> str:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "helm" / "templates").rglob("*.yaml")]
    # Join adjacent literals, so that a message of several literals is one text.
    return re.sub(r"[\"']\s*\n\s*f?[\"']", "", "\n".join(texts))


def test_messages_that_are_looked_up_are_said() -> None:
    """Every message in the first column of the symptom tables is in the sources, word for word."""
    sources = _sources()
    quoted = [
        text
        for cells in rows(TROUBLES)
        for text in re.findall(r"`([^`]+)`", cells[0])
        if not text.startswith(("--", "Insufficient"))  # flags, and a message of Kubernetes
    ]
    assert len(quoted) > 50
    missing = [text for text in quoted if text.removeprefix("kvrelay_").removesuffix("_total") not in sources]
    assert not missing, f"nobody says this: {missing}"
