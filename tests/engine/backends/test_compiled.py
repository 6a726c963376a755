"""Where compiled code comes from: libraries compiled ahead, as in an image, and torch's operations where there are none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.backends.cpu.build import cpu_ops, why_no_cpu_kernels
from kvrelay.engine.backends.cpu.native import CpuKernels, CpuKernelsError, compiled
from kvrelay.engine.backends.cpu.ops import CpuOps
from kvrelay.engine.backends.options import EngineOptions
from tests.engine.backends.test_native import config_of


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


def test_a_machine_without_compiler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(CpuKernelsError, match=r"no g\+\+"):
        CpuKernels.load(tmp_path)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_source_that_does_not_compile_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main( {")
    monkeypatch.setattr(compiled, "_SOURCES", (broken,))
    with pytest.raises(CpuKernelsError, match=r"(?s)fails: .*broken\.cpp"):
        CpuKernels.load(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_kernels_the_engine_runs_on_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: Path) -> CpuKernels:
        raise CpuKernelsError("there is no g++ (apt install g++)")

    monkeypatch.setattr(CpuKernels, "load", fails)
    pool = torch.zeros(1, 2, 2, 2, 16, 64, dtype=torch.bfloat16)
    config = config_of((4, 2), 64)

    def ops(cpu_kernels: str) -> object:
        options = EngineOptions(Path(), "m", cpu_kernels=cpu_kernels)
        return cpu_ops(options, config, pool, 64)

    assert isinstance(ops("auto"), CpuOps)
    assert "the slower torch operations instead: there is no g++" in caplog.text
    with pytest.raises(ModelError, match=r"--cpu-kernels is native, but there is no g\+\+"):
        ops("native")
    assert isinstance(ops("torch"), CpuOps)
    assert why_no_cpu_kernels(EngineOptions(Path(), "m"), config) == "there is no g++ (apt install g++)"
