"""Fixtures of the gateway's tests: event loops, a model directory without weights, and an application."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers
import uvloop

from kvrelay.gateway.text.tokenizer import Tokenizer

from ..simulation.clock import SimLoop
from .clock import Clock
from .http_app import CHAT_TEMPLATE, App, app_for, saying


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests of sockets also run on uvloop, which gateways use and which has its own transports.

    Tests of admission run in virtual time.
    """
    if item.path.stem == "test_admission":
        return {"simulated": lambda: SimLoop(0)}
    if item.path.stem not in ("test_http_protocol", "test_http_server", "test_slow_clients", "test_sse", "test_tls"):
        return {"asyncio": asyncio.new_event_loop}
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def clock() -> Clock:
    """A clock that the test moves."""
    return Clock()


@pytest.fixture
def tokenizer(model_directory: Path) -> Callable[[], Tokenizer]:
    """Loads the tokenizer of the model directory."""
    return lambda: Tokenizer.load(model_directory)


@pytest.fixture
async def app(model_directory: Path) -> AsyncIterator[App]:
    """An application in front of a worker that answers "x" to every request."""
    async with app_for(model_directory, saying("x")) as made:
        yield made


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer of 300 ids and a chat template."""
    directory = tmp_path_factory.mktemp("tiny")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>", "<user>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["one relay hands the baton to the next one, and the next one runs"] * 9, trainer)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


THINKING = (
    "{% for m in messages %}<user>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
    "{# the answer follows </think> #}"
)


@pytest.fixture
def thinking_directory(model_directory: Path, tmp_path: Path) -> Path:
    """The directory of a model whose answers begin with thoughts."""
    directory = tmp_path / "thinking"
    shutil.copytree(model_directory, directory)
    (directory / "chat_template.jinja").write_text(THINKING)
    return directory
