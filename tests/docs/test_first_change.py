"""``docs/first-change.md``: each section's patches apply to these sources, and its programs run on the result."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import DOCS, ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

_SECTIONS = {
    title: body
    for title, body in re.findall(
        r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", (DOCS / "first-change.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    if "```diff" in body
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the sources and tests in their current state. Packages are found by the links in ``src``."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", "*.py", "*.cpp", "*.h", "src"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    for name in filter(None, listed):
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.exists():
            target.write_bytes(source.read_bytes())
    return tmp_path


def run(command: list[str], directory: Path, text: str = "") -> str:
    """Run ``command`` and return its output. Fails with that output if the exit code is not 0."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{directory / 'src'}:{directory}"
    done = subprocess.run(
        command, cwd=directory, env=environment, input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_are_four() -> None:
    assert list(_SECTIONS) == ["A routing policy", "A format of tool calls", "A model family", "A kernel"]


@pytest.mark.parametrize("title", _SECTIONS)
def test_the_change_does_what_the_page_says(title: str, copy: Path) -> None:
    patches = re.findall(r"^```diff\n(.*?)^```", _SECTIONS[title], re.DOTALL | re.MULTILINE)
    programs = re.findall(r"^```python\n(.*?)^```", _SECTIONS[title], re.DOTALL | re.MULTILINE)
    assert patches
    assert programs
    for patch in patches:
        run(["git", "apply", "-C1", "-"], copy, patch)
    where = "import kvrelay.gateway.settings as found; print(found.__file__)"
    assert str(copy) in run([sys.executable, "-P", "-c", where], copy), "the programs must run on the changed copy"
    for number, program in enumerate(programs):
        (copy / f"program_{number}.py").write_text(program, encoding="utf-8")
        run([sys.executable, "-P", f"program_{number}.py"], copy)
