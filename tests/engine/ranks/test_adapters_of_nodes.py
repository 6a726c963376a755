"""Adapters of a worker on several nodes: each node reads its own directory, and all must find the same files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvrelay.common.adapter_files import WEIGHTS_FILE, AdapterAbsentError
from kvrelay.common.errors import ModelError
from tests.engine.conftest import load
from tests.engine.models.test_adapters import generate

from .conftest import load_ranks
from .test_ranked_adapters import adapters_of, load_all
from .test_several_nodes import others, place, running_host


class Nodes(NamedTuple):
    """An engine of two nodes with a stage each, and each node's directory of adapters."""

    engine: Any
    own: Path
    other: Path


@pytest.fixture
def nodes(model: Path, tmp_path: Path, port: int) -> Iterator[Nodes]:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    with running_host(place(port, 1), model, adapters=other):
        engine = load_ranks(model, 1, num_stages=2, adapters=str(own), dtype="float32", nodes=others(place(port)))
        yield Nodes(engine, own, other)
        engine.close()


def test_a_node_reads_adapters_in_a_directory_of_its_own_and_finds_the_same_digest(
    nodes: Nodes, model: Path, tmp_path: Path
) -> None:
    refs = adapters_of(model, nodes.own)
    names = [ref.name for ref in refs]
    alone = load(model, adapter_bytes=1)
    load_all(alone, nodes.own, refs)
    expected = generate(alone, [0, 1, 2, 3])
    with pytest.raises(AdapterAbsentError, match=rf"^rank 1: {nodes.other}/all is missing"):
        nodes.engine.adapters.load(1, nodes.own / "all", refs[0].digest)
    for name in names:
        shutil.copytree(nodes.own / name, nodes.other / name)
    config = nodes.other / "all" / "adapter_config.json"
    text = config.read_text()
    config.write_text(text + " ")
    with pytest.raises(AdapterAbsentError, match=rf"^rank 1: {nodes.other}/all has digest .*, not {refs[0].digest}"):
        nodes.engine.adapters.load(1, nodes.own / "all", refs[0].digest)
    config.write_text(text)
    weights = nodes.other / "all" / WEIGHTS_FILE
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AdapterAbsentError, match=rf"^rank 1: {nodes.other}/all has digest .* not all there yet"):
        nodes.engine.adapters.load(1, nodes.own / "all", refs[0].digest)
    assert generate(nodes.engine, [0]) == expected[:1]
    weights.write_bytes(whole)
    load_all(nodes.engine, nodes.own, refs)
    assert generate(nodes.engine, [0, 1, 2, 3]) == expected


def test_a_rank_that_is_gone_fails_each_load(nodes: Nodes, model: Path) -> None:
    (ref,) = adapters_of(model, nodes.own)[:1]
    (rank,) = nodes.engine._ranks.others
    rank.lose("is gone")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^rank 1 has not loaded an adapter: .*rank 1 \(process .*\) is gone"):
            nodes.engine.adapters.load(1, nodes.own / "all", ref.digest)
    assert not nodes.engine._own.adapters._loaded


def test_a_node_without_adapters_is_named_at_the_start(model: Path, tmp_path: Path, port: int) -> None:
    with (
        running_host(place(port, 1), model),
        pytest.raises(
            ModelError,
            match=rf"^rank 1 .* part: the leader has --adapters {tmp_path}, and this node none: start all",
        ),
    ):
        load_ranks(model, 1, num_stages=2, adapters=str(tmp_path), nodes=others(place(port)))
