"""Fixtures of the gateway's tests: event loops, a model directory without weights, and an application."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
import uvloop

from kvrelay.gateway.text.tokenizer import Tokenizer

from ..simulation.clock import SimLoop
from ..tokenizer_files import save_tokenizer
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
    text = "one relay hands the baton to the next one, and the next one runs"
    save_tokenizer(directory, 300, ["<eos>", "<user>"], text, CHAT_TEMPLATE)
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
