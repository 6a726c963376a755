"""tools/gpu.sh: all that is run on a GPU, in order, whatever fails."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "gpu.sh"
# Stand-ins for Python, which write down their calls. The first fails the kernels' tests.
FAILING = """#!/bin/sh
case "$1" in -c) exit 0 ;; esac
echo "$PYTHONPATH $*" >>"$(dirname "$0")/calls"
case "$*" in *"-m gpu"*tests/kernels) exit 3 ;; esac
"""
WITHOUT_PACKAGES = f"""#!/bin/sh
case "$1" in -c) exec "{sys.executable}" -IS "$@" ;; esac
echo "$*" >>"$(dirname "$0")/calls"
"""
HANGING = f"""#!{sys.executable} -IS
import pathlib, signal, sys, time
words = " ".join(sys.argv[1:])
with pathlib.Path(sys.argv[0]).with_name("calls").open("a") as calls:
    print(words, file=calls)

def end(*_):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pathlib.Path(sys.argv[sys.argv.index("--junitxml") + 1]).write_text("what it had")
    sys.exit(2)

if "tests/engine/kv" in words:
    signal.signal(signal.SIGINT, end)
    pathlib.Path(sys.argv[0]).with_name("hangs").touch()
    time.sleep(60)
"""
# The time of the part that hangs is over when it hangs: SIGALRM is how timeout(1) hears of it.
IMPATIENT = """#!/bin/sh
case "$*" in *tests/engine/kv*) ;; *) exec {timeout} "$@" ;; esac
{timeout} "$@" &
until [ -e {hangs} ]; do sleep 0.01; done
kill -ALRM $!
wait $!
"""


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def run(tmp_path: Path, python: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": str(program(tmp_path / "python", python)), **variables}
    return subprocess.run(
        ["sh", SCRIPT, tmp_path / "out"],
        env=environment,
        cwd=SCRIPT.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_part_that_fails_keeps_no_other_from_running(tmp_path: Path) -> None:
    done = run(tmp_path, FAILING, PYTHONPATH="/others")
    assert done.returncode == 1, done.stderr
    assert "kernels' tests that need a GPU FAILED with status 3" in done.stdout
    assert done.stdout.count("FAILED") == 1
    calls = (tmp_path / "calls").read_text().splitlines()
    root = SCRIPT.parents[1]  # without its own folder on the path, gpu.py needs it there
    assert all(call.startswith(f"{root}/src:{root}/benchmarks:/others ") for call in calls)
    gpu_kernels, gpu_kv, gpu_workers, gpu_models, figures, kernels = calls
    out = tmp_path / "out"
    for call, results, folder in ((gpu_kernels, "gpu-kernels.xml", "kernels"), (gpu_kv, "gpu-kv.xml", "engine/kv")):
        assert f"--junitxml {out}/{results} -m gpu" in call
        assert call.endswith(f" tests/{folder}")
    assert f"--junitxml {out}/gpu-workers.xml -m gpu" in gpu_workers
    assert "tests/models/test_types.py" in gpu_models
    assert "-m not full and not gpu" in kernels
    # A file that cannot be imported ends no other's tests.
    assert all(
        "--continue-on-collection-errors" in call for call in (gpu_kernels, gpu_kv, gpu_workers, gpu_models, kernels)
    )
    budget_s = int(figures.split("--budget-s ")[1].split()[0])
    assert 430 < budget_s <= 450  # the tests took no time
    assert f"== numerics and figures, at most {budget_s + 20} s" in done.stdout
    left_s = int(done.stdout.split("kernels against their references, at most ")[1].split()[0])
    assert left_s + 15 < 600  # with the time to end, still less than ten minutes
    assert figures.endswith(f"--json {out}/gpu.json")


def test_all_missing_modules_are_named_before_the_first_part(tmp_path: Path) -> None:
    done = run(tmp_path, WITHOUT_PACKAGES)
    assert done.returncode == 1
    told = done.stdout.split("== kernels' tests")[0]
    assert "cannot import torch (No module named 'torch'), triton" in told
    assert all(f"'{name}'" in told for name in ("msgspec", "zmq", "llguidance", "pytest_asyncio", "xdist")), told
    assert "imports FAILED with status 1" in told
    assert len((tmp_path / "calls").read_text().splitlines()) == 6  # the others may need none of them


def test_the_modules_that_are_asked_for_exist() -> None:
    found = re.search(r'modules="(.*?)"', SCRIPT.read_text(), re.DOTALL)
    assert found is not None
    modules = found[1].replace("\\\n", " ").split()
    assert "pytest_asyncio" in modules
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_a_part_that_is_stopped_leaves_its_results(tmp_path: Path) -> None:
    timeout = shutil.which("timeout")
    if timeout is None:
        pytest.skip("there is no timeout")
    program(tmp_path / "bin" / "timeout", IMPATIENT.format(timeout=timeout, hangs=tmp_path / "hangs"))
    done = run(tmp_path, HANGING, PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 1, done.stderr
    assert "the KV pool's tests that need a GPU FAILED with status 124" in done.stdout
    assert (tmp_path / "out" / "gpu-kv.xml").read_text() == "what it had"
    assert "tests/kernels" in (tmp_path / "calls").read_text().splitlines()[-1]  # the last part ran
