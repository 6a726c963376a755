"""Engines of several ranks over tiny models, loaded as a worker loads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrelay.engine.factory import load_engine
from kvrelay.engine.ranks.nodes import OtherNodes
from kvrelay.engine.settings import FakeSettings, Guessing, KvSettings, ModelSettings
from kvrelay.engine.step.interface import Engine
from tests.ports import reserved_port
from tests.processes import is_alive

from .rig import pids


def load_ranks(
    directory: Path,
    num_ranks: int,
    *,
    num_stages: int = 1,
    num_blocks: int = 96,
    block_size: int = 16,
    nodes: OtherNodes | None = None,
    decodes: bool = True,
    guessing: Guessing | None = None,
    **model: Any,
) -> Engine:
    """Load an engine of ``num_ranks`` ranks in each stage, with a CPU thread for each rank. The caller closes it.
    ``nodes``: the other nodes that have some of the ranks."""
    sizes = {"tensor_parallel": num_ranks, "pipeline_parallel": num_stages}
    chosen: dict[str, Any] = {"device": "cpu", "threads": num_ranks * num_stages, **sizes, **model}
    return load_engine(
        ModelSettings(model=str(directory), **chosen),
        KvSettings(num_blocks=num_blocks, block_size=block_size),
        FakeSettings(),
        max_num_seqs=16,
        max_batched_tokens=None,
        decodes=decodes,
        reads_images=not decodes,
        progress=lambda done, total: None,
        nodes=nodes,
        guessing=guessing or Guessing(),
    )


@pytest.fixture(scope="session")
def model(llama: tuple[Path, Any]) -> Path:
    return llama[0]


@pytest.fixture
def port() -> Iterator[int]:
    """Where a leader listens for ranks of other nodes."""
    with reserved_port("127.0.0.2") as found:
        yield found


@pytest.fixture
def engine(model: Path) -> Iterator[Any]:
    """An engine of two ranks, which a test may kill."""
    loaded = load_ranks(model, 2)
    started = pids()
    assert len(started) == 1
    yield loaded
    loaded.close()
    assert not any(map(is_alive, started)), "a rank outlives its engine"
