"""`kvrelay bench --serve` starts the deployment that it measures, reports the server's CPU use, and leaves no process
behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvrelay.launcher.bench.records import read_result

pytestmark = pytest.mark.timeout(300)


def test_a_served_run_has_the_servers_cpu_and_the_parts_of_its_ttft(model_directory: Path, tmp_path: Path) -> None:
    output, mark = tmp_path / "run.json", str(tmp_path)
    serve = "engine=fake,prefill=1,decode=1,local_prefill=fallback,fake_step_ms=1"
    command = [
        sys.executable,
        "-P",
        "-m",
        "kvrelay.launcher",
        "bench",
        "--serve",
        serve,
        "--model",
        str(model_directory),
    ]
    command += ["--rate", "10", "--arrival", "constant", "--duration-s", "1", "--input-len", "40", "--output-len", "4"]
    command += ["--warmup", "0"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
    environment = {**kept, "BENCH_TEST_MARK": mark}
    ended = subprocess.run(
        [*command, "--output", str(output)], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    result = read_result(output)
    assert [record.error for record in result.requests] == [None] * 10
    assert result.cpu is not None
    assert result.cpu.server is not None
    assert result.cpu.server > 0.0
    for record in result.requests:
        assert record.parts is not None
        assert record.parts.prefill_s > 0.0
        assert record.parts.transfer_s is not None
    assert "prefill" in ended.stdout
    assert "transfer wait" in ended.stdout
    latest_s = time.monotonic() + 20
    while left := [process.pid for process in psutil.process_iter() if _mark_of(process) == mark]:
        assert time.monotonic() < latest_s, f"the run has ended, and left the processes {left}"
        time.sleep(0.05)  # one that ends may take a moment


def _mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("BENCH_TEST_MARK")
    except psutil.Error:
        return None
