"""The programs of ``examples/``, as they are."""

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

pytestmark = pytest.mark.timeout(300)


def run(program: str, url: str = "") -> str:
    """What ``program`` prints."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / program],
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
    assert re.search(expected, run(program, deployment.url))
    wait_until_idle(deployment)


def test_a_batch_in_one_process() -> None:
    assert "The capital of France is Paris" in run("batch.py")


def test_failover_is_a_pause() -> None:
    assert re.search(r"\[decode-\d is killed\].*\nthe same text: True; the longest pause took ", run("failover.py"))


def test_every_example_is_tested() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in here] == []
