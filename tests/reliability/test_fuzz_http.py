"""A short run of the fuzzing of the gateway's HTTP port.

It has its own process. In pytest's process schemathesis is a plugin whose modules are rewritten at their first use, while
hypothesis reads its strategies' sources on another thread. CPython 3.11 cannot build two syntax trees at a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = 3


@pytest.mark.timeout(300)
def test_whatever_is_sent_gets_a_documented_answer_and_hurts_no_neighbour() -> None:
    sizes = ["--seed", str(SEED), "--examples", "30", "--connections", "600"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.reliability.fuzz_http", *sizes],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    assert "times 200" in done.stdout  # some requests were served
    assert "times 400" in done.stdout
    assert "600 connections with garbage" in done.stdout
