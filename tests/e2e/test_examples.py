"""The programs of ``examples/`` and of the quickstart run unchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay.launcher.local.deployment import LocalDeployment

from .conftest import wait_until_idle

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICKSTART = Path(__file__).parents[2] / "docs" / "quickstart.md"

pytestmark = pytest.mark.timeout(300)


def run(program: Path, url: str = "") -> str:
    """Run ``program`` and return its output."""
    done = subprocess.run(
        [sys.executable, program],
        env={**os.environ, "KVRELAY_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("chat.py", r"> What is the capital of France\?\nThe capital of France is Paris\.\n> And of Italy\?\n.*Rome"),
        ("json_by_schema.py", r"lies in (France|Germany|Italy) and has \d+ inhabitants"),
        ("tools.py", r'weather\(\{"city": ?"Paris.*\nIn Paris.* it is (20 degrees celsius|68 degrees fahrenheit)'),
        ("models_and_adapters.py", r"^SmolLM2-135M-Instruct: \S"),
    ],
)
def test_asks_a_server(program: str, expected: str, deployment: LocalDeployment) -> None:
    assert re.search(expected, run(EXAMPLES / program, deployment.url))
    wait_until_idle(deployment)


def test_a_batch_in_one_process() -> None:
    assert "The capital of France is Paris" in run(EXAMPLES / "batch.py")


def test_speculation_changes_no_text() -> None:
    assert run(EXAMPLES / "guesses.py").endswith("the same text: True\n")


def test_failover_is_a_pause() -> None:
    printed = run(EXAMPLES / "failover.py")
    assert re.search(r"\[decode-\d is killed\]", printed)
    assert "\nthe same text: True; the longest pause took " in printed


def test_the_quickstart_gets_an_answer(deployment: LocalDeployment, tmp_path: Path) -> None:
    [program] = re.findall(r"```python\n(.*?)```", QUICKSTART.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "program.py").write_text(program.replace("http://127.0.0.1:8000", deployment.url))
    assert run(tmp_path / "program.py") == "The capital of France is Paris."
    wait_until_idle(deployment)


def test_every_example_is_tested() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in here] == []
