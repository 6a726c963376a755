"""That what the command line asks for reaches the load, and what was measured reaches the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvrelay.launcher import cli
from kvrelay.launcher.bench.cpu import machine_times
from kvrelay.launcher.bench.records import RunResult, read_result
from tests.launcher.bench.stub_server import StubServer


def measured(server: StubServer, tmp_path: Path, *arguments: str) -> RunResult:
    """`kvrelay bench` with ``arguments`` against ``server``, of which every request succeeded."""
    output = tmp_path / "run.json"
    assert cli.run(["bench", "--url", server.url, "--warmup", "0", "--output", str(output), *arguments]) == 0
    return read_result(output)


def prompts(server: StubServer) -> list[list[int]]:
    return [request.body["prompt"] for request in server.requests]


def test_a_trace_is_replayed_with_its_lengths_and_shared_blocks(server: StubServer, tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1, 2, 3]},
        {"timestamp": 100, "input_length": 12, "output_length": 5, "hash_ids": [1, 2, 4]},
        {"timestamp": 200, "input_length": 6, "output_length": 3, "hash_ids": [7, 8]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = measured(server, tmp_path, "--trace", str(trace), "--trace-block-tokens", "4")
    assert [round(record.due_s - found.requests[0].due_s, 6) for record in found.requests] == [0.0, 0.1, 0.2]
    assert [record.output_tokens for record in found.requests] == [2, 5, 3]
    first, second, third = sorted(prompts(server), key=lambda prompt: (len(prompt) == 6, len(prompt)))
    assert [len(first), len(second), len(third)] == [10, 12, 6]
    assert first[:8] == second[:8]
    assert first[8:10] != second[8:10]
    assert first[:4] != third[:4]


def test_a_burst_comes_on_top_of_the_load(server: StubServer, tmp_path: Path) -> None:
    load = ["--rate", "20", "--arrival", "constant", "--duration-s", "0.5", "--input-len", "8", "--output-len", "2"]
    found = measured(server, tmp_path, *load, "--burst", "every=0.2s,n=3,input=40,output=4")
    bursts = [record for record in found.requests if record.stream == "burst"]
    assert [record.prompt_tokens for record in bursts] == [40] * 6
    assert [record.output_tokens for record in bursts] == [4] * 6
    assert len({record.due_s for record in bursts}) == 2
    assert sorted(len(prompt) for prompt in prompts(server)) == [8] * 10 + [40] * 6


def test_prompts_of_a_group_share_a_prefix(server: StubServer, tmp_path: Path) -> None:
    load = ["--rate", "100", "--requests", "12", "--input-len", "8", "--output-len", "2"]
    measured(server, tmp_path, *load, "--prefix-tokens", "5", "--prefix-groups", "2")
    found = prompts(server)
    assert {len(prompt) for prompt in found} == {13}
    assert len({tuple(prompt[:5]) for prompt in found}) == 2
    assert len({tuple(prompt[5:]) for prompt in found}) == 12


def test_the_servers_cpu_is_told_apart_if_its_process_is_named(server: StubServer, tmp_path: Path) -> None:
    load = ["--rate", "20", "--requests", "10", "--input-len", "8", "--output-len", "2"]
    unknown = measured(server, tmp_path, *load).cpu
    assert unknown is not None
    assert unknown.server is None
    # Its work is done by a child.
    spin = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {'while True: pass'!r}])"
    with subprocess.Popen([sys.executable, "-c", spin]) as busy:
        process = psutil.Process(busy.pid)
        try:
            while not (children := process.children()):
                assert busy.poll() is None
            known = measured(server, tmp_path, *load, "--server-pid", str(busy.pid)).cpu
        finally:
            busy.kill()
            for child in children:
                child.kill()
    assert known is not None
    assert known.server is not None
    assert known.server > 0.0


def test_the_machines_times_are_those_of_the_kernel(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 4000 50 6 7 800 9 9\ncpu0 1 1 1 1 1 1 1 1 0 0\ncpu1 1 1 1 1 1 1 1 1 0 0\nintr 5\n")
    times = machine_times(stat)
    ticks = os.sysconf("SC_CLK_TCK")
    assert times is not None
    assert times.busy_s == pytest.approx((100 + 20 + 30 + 6 + 7) / ticks)
    assert times.stolen_s == pytest.approx(800 / ticks)
    assert times.num_cores == 2
    assert machine_times(tmp_path / "nothing") is None
