"""Every kernel compiles for every target within its limits; the numbers read back mean what they say.

In processes of their own: here the kernels may be interpreted, and an interpreted kernel cannot be compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SPILLING = """
import dataclasses, json
from kvrelay.kernels import compile_check as check
launch = next(l for l in check.launches() if l.kernel == "_sample_kernel")
few = dataclasses.replace(launch, options={**launch.options, "maxnreg": 24})
cuda = check.compile_launch(few, "cuda", 80)
text = ".private_segment_fixed_size: 0\\n.vgpr_count: 9\\n.vgpr_spill_count: 3\\n"
print(json.dumps([cuda.registers, cuda.spill_bytes, cuda.broken_limits(0), check.amdgcn_resources(text)]))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    return {**inherited, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}


def _run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_every_kernel_compiles_within_the_limits(environment: dict[str, str]) -> None:
    done = _run(environment, "-m", "kvrelay.kernels.compile_check", "--json", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["target"] for row in rows} == {"cuda:80", "cuda:90", "cuda:100", "hip:gfx942"}
    assert {row["kernel"] for row in rows} == {
        "_decode_combine_kernel",
        "_decode_split_kernel",
        "_penalties_kernel",
        "_prefill_attention_kernel",
        "_rms_norm_kernel",
        "_rotary_kv_write_kernel",
        "_sample_kernel",
        "_silu_mul_kernel",
    }
    assert all(row["registers"] > 0 for row in rows)


def test_spills_are_seen(environment: dict[str, str]) -> None:
    """A kernel held to 24 registers must spill; the parsers must say so."""
    done = _run(environment, "-c", _SPILLING)
    assert done.returncode == 0, done.stderr
    registers, spill_bytes, broken, from_text = json.loads(done.stdout)
    assert registers <= 32
    assert spill_bytes > 0
    assert broken
    assert from_text == [9, 12]


def test_the_interpreter_is_refused(environment: dict[str, str]) -> None:
    done = _run({**environment, "TRITON_INTERPRET": "1"}, "-m", "kvrelay.kernels.compile_check")
    assert done.returncode != 0
    assert "TRITON_INTERPRET is set" in done.stderr
