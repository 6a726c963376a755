"""tools/gpu.sh: all that is run on a GPU, in order, whatever fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu.sh"
PLAYED = """#!/bin/sh
echo "$PYTHONPATH $*" >>"$(dirname "$0")/calls"
case "$*" in *"-m gpu"*) exit 3 ;; esac
"""


def test_a_part_that_fails_keeps_no_other_from_running(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PLAYED)
    python.chmod(0o755)
    out = tmp_path / "out"
    environment = {**os.environ, "PYTHON": str(python), "PYTHONPATH": "/others"}
    done = subprocess.run(
        ["sh", SCRIPT, out], env=environment, cwd=SCRIPT.parents[1], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "tests that need a GPU FAILED with status 3" in done.stdout
    gpu_tests, figures, kernels = (tmp_path / "calls").read_text().splitlines()
    root = SCRIPT.parents[1]  # without its own folder on the path, gpu.py needs it there
    assert all(call.startswith(f"{root}/src:{root}/benchmarks:/others ") for call in (gpu_tests, figures, kernels))
    assert f"--junitxml {out}/gpu-tests.xml" in gpu_tests
    assert "-m not full and not gpu" in kernels
    budget_s = int(figures.split("--budget-s ")[1].split()[0])
    assert 500 < budget_s <= 530  # the tests took no time
    assert figures.endswith(f"--json {out}/gpu.json")
