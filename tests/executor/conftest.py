"""A model directory without weights, and fake engines whose steps a test can hold."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvrelay.common.settings import build
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.engine.fake.step import Share
from kvrelay.executor.executor import Executor
from kvrelay.executor.local import LocalBackend, LocalSettings

from ..relay.http_gateway import VOCAB, write_model

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer of ``VOCAB`` ids, a chat template, and a config with a fake engine's sizes."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    directory.mkdir()
    write_model(directory)
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "max_position_embeddings": 2048}))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


@pytest.fixture
def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that holds only this test's temporary directories."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


MakeExecutor = Callable[..., tuple[Executor, LocalBackend]]


@pytest.fixture
def make_executor(tiny_model: Path) -> Iterator[MakeExecutor]:
    """``make_executor(on_step, max_queued=…)``: a started executor over a fake engine in this process, shut down afterwards."""
    made: list[Executor] = []

    def make(
        on_step: Callable[[Sequence[Share]], None] = lambda rows: None,
        *,
        directory: Path = tiny_model,
        num_blocks: int = 256,
        **options: object,
    ) -> tuple[Executor, LocalBackend]:
        settings = build(LocalSettings, {"model": str(directory), **options})
        engine = FakeEngine(fake_card(vocab_size=VOCAB, num_blocks=num_blocks), on_step)
        backend = LocalBackend(engine, directory, settings)
        executor = Executor(backend)
        made.append(executor)
        executor.start()
        return executor, backend

    yield make
    for executor in made:
        executor.shutdown()


def wait_until_free(worker: DecodeWorker, timeout_s: float = 30.0) -> None:
    """Wait until the worker knows no request, and check that every block is free or cached."""
    deadline_s = time.monotonic() + timeout_s
    while worker.service.entries:
        assert time.monotonic() < deadline_s, worker.debug_kv()
        time.sleep(0.002)  # polls for a state, bounded by the line above
    worker.blocks.check_integrity()
    ledger = worker.blocks.ledger()
    assert ledger.num_free + ledger.num_cached == ledger.num_blocks, ledger
