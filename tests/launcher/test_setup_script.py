"""The messages of ``make setup`` on machines that lack something, with fake interpreters on the path."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "dirname", "id", "grep", "sed", "cat", "pwd", "mkdir", "rm", "flock", "printf")

OLD_PYTHON = """#!/bin/sh
case "$*" in
    --version) echo "Python 3.9.2" ;;
    *) exit 1 ;;
esac
"""

PYTHON_WITHOUT_VENV = """#!/bin/sh
case "$*" in
    --version) echo "Python 3.12.0" ;;
    *"import venv, ensurepip"*) exit 1 ;;
esac
"""

# Makes a .venv whose pip refuses every install, or lists a CUDA package among those to install.
PYTHON_WITH_BAD_PIP = """#!/bin/sh
case "$*" in
    --version) echo "Python 3.12.0" ;;
    "-m venv "*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"pip"*"--dry-run"*) echo "ERROR: no route to the index" >&2; exit 1 ;;
    *"pip"*" install "*) echo "nothing may be installed" >&2; exit 9 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout, with a folder beside it that is the whole PATH."""
    directory = tmp_path / "checkout"
    (directory / "tools").mkdir(parents=True)
    for name in ("tools/setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, directory / name)
    path = tmp_path / "bin"
    path.mkdir()
    for tool in (*TOOLS, "cp"):
        if found := shutil.which(tool):
            (path / tool).symlink_to(found)
    return directory


def run_setup(checkout: Path, python: str | None, **variables: str) -> subprocess.CompletedProcess[str]:
    path = checkout.parent / "bin"
    if python is not None:
        (path / "python3").write_text(python)
        (path / "python3").chmod(0o755)
    return subprocess.run(
        ["sh", "tools/setup.sh"],
        cwd=checkout,
        env={"PATH": str(path), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("python", "found"), [(OLD_PYTHON, "found: Python 3.9.2"), (None, "found: no python3 at all")])
def test_no_python_that_is_new_enough(checkout: Path, python: str | None, found: str) -> None:
    done = run_setup(checkout, python)
    assert done.returncode == 1
    assert f"Python 3.11 or newer is needed; {found}" in done.stderr
    assert not (checkout / ".venv").exists()


def test_no_venv_module(checkout: Path) -> None:
    done = run_setup(checkout, PYTHON_WITHOUT_VENV)
    assert done.returncode == 1
    assert "has no venv module" in done.stderr
    assert "apt install python3-venv" in done.stderr


def test_no_cpu_build_of_torch_downloads_nothing(checkout: Path) -> None:
    done = run_setup(checkout, PYTHON_WITH_BAD_PIP)
    assert done.returncode == 1
    assert "no CPU build of torch" in done.stderr
    assert "ERROR: no route to the index" in done.stderr
    assert "nothing may be installed" not in done.stderr
    assert (checkout / ".venv" / ".setup-running").exists()
    assert "the last set-up was interrupted; starting over" in run_setup(checkout, PYTHON_WITH_BAD_PIP).stdout


def test_choices_that_cannot_be(checkout: Path) -> None:
    assert "TORCH=rocm; it must be cpu, cuda or unset" in run_setup(checkout, OLD_PYTHON, TORCH="rocm").stderr
    assert "PYTHON=/no/python is not a working" in run_setup(checkout, OLD_PYTHON, PYTHON="/no/python").stderr


def test_every_make_target_has_help() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = next(line.split()[1:] for line in makefile.splitlines() if line.startswith(".PHONY:"))
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split()[1] for line in done.stdout.splitlines() if line.startswith("make ")} == set(targets)
