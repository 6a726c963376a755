"""``docs/sizing.md``: its simulation runs as printed there, and every row that it prints is on the page."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .pages import DOCS, ROOT, code_blocks


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_simulation_prints_the_table() -> None:
    page = DOCS / "sizing.md"
    [program] = code_blocks(page, "python")
    command = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert len(printed) == 4
    assert all(row in page.read_text(encoding="utf-8") for row in printed), done.stdout
