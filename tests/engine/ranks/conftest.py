"""Engines of several ranks over tiny models, by the very way that a worker loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvrelay.engine.factory import load_engine
from kvrelay.engine.ranks.nodes import OtherNodes
from kvrelay.engine.settings import FakeSettings, KvSettings, ModelSettings
from kvrelay.engine.step.interface import Engine


def load_ranks(
    directory: Path,
    num_ranks: int,
    *,
    num_stages: int = 1,
    num_blocks: int = 96,
    block_size: int = 16,
    nodes: OtherNodes | None = None,
    **model: Any,
) -> Engine:
    """An engine on one CPU thread for each rank; whoever loads it closes it. ``num_ranks``: of each stage. ``nodes``: where some
    of them are."""
    sizes = {"tensor_parallel": num_ranks, "pipeline_parallel": num_stages}
    chosen: dict[str, Any] = {"device": "cpu", "threads": num_ranks * num_stages, **sizes, **model}
    return load_engine(
        ModelSettings(model=str(directory), **chosen),
        KvSettings(num_blocks=num_blocks, block_size=block_size),
        FakeSettings(),
        max_num_seqs=16,
        max_batched_tokens=None,
        decodes=True,
        progress=lambda done, total: None,
        nodes=nodes,
    )
