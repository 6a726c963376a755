"""The source of compiled code on a machine without a compiler, such as an image: libraries compiled ahead."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from kvrelay.engine.backends.cpu.native import CpuKernels, CpuKernelsError, compiled, prebuild


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (compiled.VARIANTS[0].needs | {"amx_bf16"}, "x86-64-v4-bf16"),
        (compiled.VARIANTS[1].needs, "x86-64-v4"),
        (compiled.VARIANTS[2].needs | {"avx512f"}, "x86-64-v3"),
    ],
)
def test_without_compiler_the_best_that_was_compiled_ahead_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: frozenset[str], expected: str
) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiled, "processor_flags", lambda: flags)
    for variant in compiled.VARIANTS:
        compiled.prebuilt_path(tmp_path, variant).touch()
    assert compiled.find_library(tmp_path, tmp_path).name.startswith(f"cpu-{expected}-")


def test_kernels_of_other_sources_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiled, "processor_flags", lambda: compiled.VARIANTS[0].needs)
    (tmp_path / "cpu-x86-64-v4-bf16-0000000000000000.so").touch()
    with pytest.raises(CpuKernelsError, match=r"no g\+\+ .* nothing compiled ahead"):
        compiled.find_library(tmp_path, tmp_path)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_what_is_compiled_ahead_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries for an image are compiled ahead. The one for the oldest processor is loaded without a compiler and
    runs."""
    built = prebuild.prebuild(tmp_path)
    assert [path.name.rsplit("-", 1)[0] for path in built] == [f"cpu-{variant.name}" for variant in compiled.VARIANTS]
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiled, "processor_flags", lambda: compiled.VARIANTS[-1].needs)
    kernels = CpuKernels(ctypes.CDLL(str(compiled.find_library(tmp_path, tmp_path))))
    assert not kernels.has_bf16_dot_products
    gate_up = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    torch.testing.assert_close(kernels.silu_mul(gate_up), torch.nn.functional.silu(gate_up[:, :32]) * gate_up[:, 32:])
