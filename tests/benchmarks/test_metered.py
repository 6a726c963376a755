from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from peers.metered import run_metered

# A generator whose work is done by a child that is gone when it ends.
BUSY = "import time; end = time.process_time() + 1.0\nwhile time.process_time() < end: pass"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}]); sys.exit(3)"


def test_helpers_of_a_generator_are_the_generators_and_not_others(tmp_path: Path) -> None:
    command = (sys.executable, "-c", PARENT)
    status, cpu = run_metered(command, environment=os.environ, log=tmp_path / "log", limit_s=60.0, server_pids=list)
    assert status == 3
    assert cpu is not None
    assert cpu.generator > 0.2


def test_what_takes_too_long_is_killed(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    status, _ = run_metered(command, environment=os.environ, log=tmp_path / "log", limit_s=0.5, server_pids=list)
    assert status is None


def test_a_program_that_is_not_there_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        run_metered(("/nowhere/at-all",), environment={}, log=tmp_path / "log", limit_s=1.0, server_pids=list)


def test_a_program_runs_in_the_folder_of_its_log_not_in_ours(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import os; print(os.getcwd())")
    run_metered(command, environment=os.environ, log=tmp_path / "log", limit_s=60.0, server_pids=list)
    assert (tmp_path / "log").read_text().split() == [str(tmp_path)]
