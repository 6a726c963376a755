"""The engine made from settings, and the progress that it reports."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.logging import set_tqdm_hook

from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.common.images import ImageText
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.config.cut import cuts_of
from kvrelay.engine.factory import load_engine, load_images, load_part, require_host_kv
from kvrelay.engine.kv import host_memory
from kvrelay.engine.load_progress import LoggedProgress, OthersProgress, log_begin
from kvrelay.engine.models.ranks import RankPart
from kvrelay.engine.ranks.messages import LoadSettings
from kvrelay.engine.settings import FakeSettings, Guessing, KvSettings, ModelSettings
from kvrelay.engine.torch_engine import TorchEngine
from tests.engine.conftest import VOCAB
from tests.tokenizer_files import save_tokenizer


def load(model: ModelSettings, **chosen: Any) -> Any:
    """Load an engine as a worker does, by default for one sequence."""
    options: dict[str, Any] = {
        "kv": KvSettings(), "fake": FakeSettings(), "max_num_seqs": 1, "max_batched_tokens": 64, "decodes": True,
        "progress": lambda done, total: None,
    }  # fmt: skip
    return load_engine(model, **{**options, **chosen})


def test_settings_reach_the_engine(llama: tuple[Path, Any]) -> None:
    heard: list[tuple[int, int]] = []
    engine = load(
        ModelSettings(model=str(llama[0]), dtype="bfloat16", device="cpu", max_model_len=100, threads=1),
        kv=KvSettings(block_size=8, kv_memory_mb=1),
        max_num_seqs=4,
        progress=lambda done, total: heard.append((done, total)),
    )
    assert engine.card.layout.model_id == llama[0].name
    assert (engine.card.layout.geometry.groups[0].dtype, engine.card.layout.block_size) == ("bfloat16", 8)
    assert engine.card.max_model_len == 100
    assert engine.card.num_blocks == 2**20 // engine.card.block_nbytes == engine.store.num_blocks
    assert engine.store.block_nbytes == engine.card.block_nbytes
    assert heard[-1][0] == heard[-1][1]
    assert torch.get_num_threads() == 1


def test_staging_memory_reaches_the_engine(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[EngineOptions] = []
    monkeypatch.setattr(TorchEngine, "load", lambda options, progress, part: heard.append(options))
    for staging_mb in (None, 300):
        load(ModelSettings(model=str(llama[0])), kv=KvSettings(staging_mb=staging_mb))
    assert [options.staging_bytes for options in heard] == [None, 300 * 2**20]


@pytest.mark.parametrize(
    ("chosen", "device_type", "tokens"), [(None, "cpu", 512), (None, "cuda", 2048), (64, "cuda", 64)]
)
def test_the_largest_step_suits_the_device_unless_it_is_chosen(
    chosen: int | None, device_type: str, tokens: int, llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[EngineOptions] = []
    monkeypatch.setattr(TorchEngine, "load", lambda options, progress, part: heard.append(options))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device_type == "cuda")
    load(ModelSettings(model=str(llama[0])), max_batched_tokens=chosen, decodes=False)
    assert heard[0].max_batched_tokens == tokens


def test_a_name_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    for name in ("demo", str(tmp_path / "nothing")):
        with pytest.raises(ModelError, match=f"{name!r} is not a model directory; start through the kvrelay command"):
            load(ModelSettings(model=name))


def test_a_load_is_logged_at_its_begin_every_ten_seconds_and_at_its_end(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    logger = logging.getLogger("x")
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00002.safetensors").write_bytes(bytes(1_500_000))
    (tmp_path / "broken.safetensors").symlink_to(tmp_path / "nowhere")  # the loader refuses it by name
    log_begin(logger, tmp_path)
    now_s = 100.0
    report = LoggedProgress(logger, lambda: now_s)
    for done in range(0, 1000, 10):  # 0.25 s each
        report(done * 10**6, 10**9)
        now_s += 0.25
    report(10**9, 10**9)
    report(10**9, 10**9)
    assert [record.message for record in caplog.records] == [
        f"loading {tmp_path.name}: 3 MB of weights in 2 files from {tmp_path}",
        "read 40 % of 1000 MB of weights in 10 s",
        "read 80 % of 1000 MB of weights in 20 s",
        "read 1000 MB of weights in 25.0 s",
    ]


def test_the_log_says_how_far_the_other_ranks_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now_s = 50.0
    report = OthersProgress(logging.getLogger("x"), lambda: now_s)
    for tenths in range(16):  # 2 s each
        report({1: min(1.0, tenths / 10), 2: min(1.0, tenths / 15), 3: min(1.0, tenths / 10)})
        now_s += 2
    assert [record.message for record in caplog.records] == [
        "of the other ranks, rank 2 has read least: 33 % of its weights",
        "of the other ranks, rank 2 has read least: 66 % of its weights",
    ]


def test_a_load_through_transformers_is_logged_as_one_of_ours(
    llama: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvrelay.engine.factory")
    directory, heard, times_s = llama[0], [], iter(range(0, 10_000, 6))
    report = LoggedProgress(logging.getLogger("kvrelay.engine.factory"), lambda: float(next(times_s)))

    def progress(done: int, total: int) -> None:
        heard.append((done, total))
        report(done, total)

    load(
        ModelSettings(model=str(directory), device="cpu", backend="transformers", threads=1),
        kv=KvSettings(kv_memory_mb=1),
        progress=progress,
    )
    num_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    done = [one for one, total in heard if total == num_bytes]
    assert len(done) == len(heard) > 10, "a call for each tensor"
    assert done == sorted(set(done)), "each tensor is counted once"
    assert (done[0], done[-1]) == (0, num_bytes)
    lines = [record.message for record in caplog.records]
    assert lines[0].startswith(f"loading {directory.name}: ")
    assert sum(" % of " in line for line in lines) == (len(heard) - 1) // 2, "a line for each two calls of 6 s"
    assert " MB of weights in " in lines[-1]
    assert set_tqdm_hook(None) is None, "transformers' bars are its own again"


def test_a_load_without_weights_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    LoggedProgress(logging.getLogger("x"), lambda: 0.0)(0, 0)
    assert [record.message for record in caplog.records] == ["read 0 MB of weights in 0.0 s"]


def test_a_fake_engine_has_the_models_limits_and_needs_no_torch(llama: tuple[Path, Any]) -> None:
    """Runs in its own process, because this one has loaded torch."""
    script = """
import sys
from pathlib import Path
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.prefill_worker.worker import PrefillWorker
from kvrelay.engine.factory import load_engine, load_images
from kvrelay.engine.settings import FakeSettings, KvSettings, ModelSettings

engine = load_engine(
    ModelSettings(model=sys.argv[1], max_model_len=100),
    KvSettings(block_size=8, kv_memory_mb=1),
    FakeSettings(engine="fake", fake_token_bytes=64),
    max_num_seqs=4,
    max_batched_tokens=64,
    decodes=True,
    progress=lambda done, total: None,
)
card = engine.card
assert {"torch", "numpy", "triton"}.isdisjoint(sys.modules), sorted(sys.modules)
print(card.layout.model_id, card.vocab_size, card.max_model_len, card.num_blocks, card.block_nbytes)
"""
    command = [sys.executable, "-P", "-c", script, str(llama[0])]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert output.split() == [f"fake-{llama[0].name}", str(VOCAB), "100", str(2**20 // 512), "512"]


def test_a_fake_engine_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not tell vocab_size"):
        load(ModelSettings(model=str(tmp_path)), fake=FakeSettings(engine="fake"))


@pytest.mark.parametrize("reads_images", [False, True])
def test_fake_workers_read_images_if_they_should_and_the_tokenizer_has_a_token_for_them(
    tmp_path: Path, reads_images: bool
) -> None:
    fake, model = FakeSettings(engine="fake"), ModelSettings(model=str(tmp_path))
    (tmp_path / "config.json").write_text('{"vocab_size": 320, "max_position_embeddings": 64}')
    engine = load(model, fake=fake, reads_images=reads_images)
    assert engine.card.no_images
    assert load_images(model, fake, engine.card) is None
    save_tokenizer(tmp_path, 320, ["<eos>", "<pad>"], "a fox", "")
    engine = load(model, fake=fake, reads_images=reads_images)
    reader = load_images(model, fake, engine.card)
    assert (reader is None, engine.card.no_images == "") == (not reads_images, reads_images)
    if reader is not None:
        told = reader.texts([(64, 130)])
        assert (told.placeholder, told.texts) == (1, [ImageText("<pad>\n<pad>\n<pad>", 3)])


def test_kv_is_kept_in_the_hosts_memory_only_below_a_gpus_pool_and_if_there_is_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_host_kv(0, ModelSettings(device="cpu"), FakeSettings())
    for model, fake in ((ModelSettings(device="cpu"), FakeSettings()), (ModelSettings(), FakeSettings(engine="fake"))):
        with pytest.raises(
            SettingsError,
            match="--host-kv-mb is 64, but the KV pool is in the host's memory already: raise --kv-memory-mb",
        ):
            require_host_kv(64, model, fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 64 * 2**20)
    require_host_kv(64, ModelSettings(device="cuda"), FakeSettings())
    with pytest.raises(ModelError, match="--host-kv-mb is 65, and 64 MiB of memory are left here: lower it"):
        require_host_kv(65, ModelSettings(device="cuda"), FakeSettings())


def test_only_the_first_rank_leaves_memory_for_a_head(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(TorchEngine, "load", lambda options, *_: seen.append(options.head_bytes))
    settings = LoadSettings(
        ModelSettings(model=str(llama[0])), KvSettings(), None, None, decodes=True, guessing=Guessing(5)
    )
    nothing: Any = None
    for part in (None, *(RankPart(cut, nothing, nothing, 2) for cut in cuts_of(2, 2))):
        load_part(settings, part, nothing)
    assert seen == [5, 5, 0, 0, 0]
