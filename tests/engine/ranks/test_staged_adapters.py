"""Adapters of several stages: each stage has the adapter's parts for its own layers, and a load succeeds on all stages
or none."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrelay.common.adapter_files import AdapterAbsentError, AdapterError
from kvrelay.engine.ranks.messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.leader import Leader
from tests.adapters import linear_shapes, merge, write_adapter
from tests.engine.conftest import load, sequence, tokens
from tests.engine.models.test_adapters import generate

from .conftest import load_ranks
from .test_ranked_adapters import adapters_of, hand_over, load_all


@pytest.fixture(scope="module")
def staged(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine of three stages with one layer each, which serves adapters."""
    engine = load_ranks(model, 1, num_stages=3, adapters=str(tmp_path_factory.mktemp("none")), dtype="float32")
    yield engine
    engine.close()


def test_an_adapter_of_one_layer_is_on_its_stage_alone_and_equals_merged_weights(
    staged: Any, model: Path, tmp_path: Path
) -> None:
    """The first and the last stage have no part of the adapter, and still compute rows that use it."""
    shapes = {name: shape for name, shape in linear_shapes(model).items() if ".layers.1." in name}
    ref = write_adapter(tmp_path / "middle", shapes, size=0.6)
    merge(model, tmp_path / "middle", tmp_path / "merged")
    staged.adapters.load(1, tmp_path / "middle", ref.digest)
    try:
        changed, plain = generate(staged, [1]), generate(load(model), [0])
        assert changed == generate(load(tmp_path / "merged"), [0])
        assert changed != plain
    finally:
        staged.adapters.unload(1)


def test_a_stage_that_an_adapter_does_not_fit_refuses_it_for_all(staged: Any, model: Path, tmp_path: Path) -> None:
    """Each stage checks its own layers. The first stage refuses names that are in no layer."""
    shapes = linear_shapes(model)
    for number, module in ((1, "model.layers.1.mlp.down_proj"), (2, "model.layers.2.self_attn.q_proj")):
        wide = write_adapter(tmp_path / f"wide{number}", shapes | {module: (48, 96)})
        with pytest.raises(AdapterError, match=rf"^rank {number}: .*{module} is for a base of shape \(48, 96\)"):
            staged.adapters.load(1, tmp_path / f"wide{number}", wide.digest)
    for module in ("model.layers.3.self_attn.q_proj", "lm_head", "model.layers.10.mlp.up_proj"):
        other = write_adapter(tmp_path / module, shapes | {module: (48, 48)})
        with pytest.raises(AdapterError, match=rf"^{tmp_path}.*there is no {module} in this model"):
            staged.adapters.load(1, tmp_path / module, other.digest)
    (ref,) = adapters_of(model, tmp_path)[:1]
    load_all(staged, tmp_path, [ref])
    staged.adapters.unload(1)


def test_a_slot_is_freed_behind_the_steps_that_were_launched_before(staged: Any, model: Path, tmp_path: Path) -> None:
    """The last stage has not begun a step with the adapter when its slot is freed and given to another adapter."""
    all_layers, few, _ = adapters_of(model, tmp_path)
    load_all(staged, tmp_path, [all_layers])
    row = sequence(tokens(1, 30), [5, 9])
    row.adapter = 1
    (expected,) = Leader(staged).step([StepRow(row, 30)])
    last = staged._ranks.others[-1]
    os.kill(last.pid, signal.SIGSTOP)
    try:
        launched = Leader(staged).launch([StepRow(row, 30)])
        staged.adapters.unload(1)
        with pytest.raises(AdapterAbsentError):
            staged.adapters._own.load(1, tmp_path / "few", "0" * 32)
        loading = threading.Thread(target=staged.adapters.load, args=(1, tmp_path / "few", few.digest))
        loading.start()
    finally:
        os.kill(last.pid, signal.SIGCONT)
    (found,) = launched.wait()
    loading.join()
    assert found.tokens == expected.tokens
    (other,) = Leader(staged).step([StepRow(row, 30)])
    assert other.tokens != expected.tokens
    staged.adapters.unload(1)


def test_a_load_in_the_midst_of_a_step_that_fails_everywhere_disturbs_neither(
    staged: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks receive the load while they wait for the leader's report on the failed step."""
    (ref,) = adapters_of(model, tmp_path)[:1]
    launch, message = staged._own.launch, msgspec.msgpack.encode(LoadAdapter(1, str(tmp_path / "all"), ref.digest))

    def launch_later(plan: Any) -> Any:
        for rank in staged._ranks.others:
            rank.send(message)
        return launch(plan)

    monkeypatch.setattr(staged._own, "launch", launch_later)
    with pytest.raises(ValueError, match="33 tokens behind 0 do not fit 2 blocks of 16"):
        Leader(staged).launch([StepRow(sequence(tokens(0, 33), [1, 2]), 33)])
    assert [rank.take_adapter() for rank in staged._ranks.others] == [AdapterLoaded()] * 2
    monkeypatch.undo()
    staged.check_device()
    for rank in staged._ranks.others:
        rank.send(msgspec.msgpack.encode(UnloadAdapter(1)))
    load_all(staged, tmp_path, [ref])
    staged.adapters.unload(1)


def test_blocks_of_an_adapter_go_on_in_other_stages(staged: Any, model: Path, tmp_path: Path) -> None:
    """Blocks are copied in both directions between one stage and three."""
    refs = adapters_of(model, tmp_path)[:1]
    alone = load(model, model_id=model.name, adapter_bytes=1)
    load_all(staged, tmp_path, refs, 2)
    load_all(alone, tmp_path, refs, 7)
    try:
        hand_over(staged, 2, alone, 7)
        hand_over(alone, 7, staged, 2)
    finally:
        staged.adapters.unload(2)
