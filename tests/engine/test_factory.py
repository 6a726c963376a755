"""From settings to an engine, and the progress it reports."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.factory import load_engine
from kvrelay.engine.progress import LoggedProgress
from kvrelay.engine.settings import KvSettings, ModelSettings


def test_settings_reach_the_engine(llama: tuple[Path, Any]) -> None:
    heard: list[tuple[int, int]] = []
    engine = load_engine(
        ModelSettings(model=str(llama[0]), dtype="bfloat16", device="cpu", max_model_len=100, threads=1),
        KvSettings(block_size=8, kv_memory_mb=1),
        max_num_seqs=4,
        progress=lambda done, total: heard.append((done, total)),
    )
    assert engine.card.layout.model_id == llama[0].name
    assert (engine.card.layout.kv_dtype, engine.card.layout.block_size) == ("bfloat16", 8)
    assert engine.card.max_model_len == 100
    assert engine.card.num_blocks == 2**20 // engine.card.block_nbytes == engine.store.num_blocks
    assert engine.store.block_nbytes == engine.card.block_nbytes
    assert heard[-1][0] == heard[-1][1]
    assert torch.get_num_threads() == 1


def test_a_name_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    for name in ("demo", str(tmp_path / "nothing")):
        with pytest.raises(ModelError, match=f"{name!r} is not a model directory; start through the kvrelay command"):
            load_engine(ModelSettings(model=name), KvSettings(), max_num_seqs=1, progress=lambda done, total: None)


def test_progress_is_logged_by_quarters(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    report = LoggedProgress(logging.getLogger("x"))
    for done in range(0, 1001, 10):
        report(done * 10**6, 1000 * 10**6)
    report(10**9, 10**9)
    assert [record.message for record in caplog.records] == [
        f"loading weights: {percent} % of 1000 MB" for percent in (25, 50, 75, 100)
    ]
    caplog.clear()
    report = LoggedProgress(logging.getLogger("x"))
    report(90, 100)
    report(0, 0)
    report(100, 100)
    assert [record.message[:21] for record in caplog.records] == ["loading weights: 90 %", "loading weights: 100 "]
