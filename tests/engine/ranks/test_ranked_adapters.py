"""Adapters on several ranks: results equal one rank's, and a load that fails on one rank leaves nothing on any."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers

from kvrelay.common.adapter_files import AdapterAbsentError, AdapterError, AdapterFiles, AdapterRef
from kvrelay.engine.fake.adapters import FakeAdapters
from kvrelay.engine.ranks.adapters import RankAdapters, RankedAdapters
from kvrelay.engine.ranks.messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from kvrelay.engine.step.interface import Engine, StepRow
from tests.adapters import linear_shapes, write_adapter
from tests.engine.conftest import SIZES, VOCAB, assert_same_tokens, load, save_model, sequence, tokens
from tests.engine.led import step
from tests.engine.models.test_adapters import PATTERN, generate

from .conftest import load_ranks
from .rig import ROUNDING, SOON_S

MODELS: dict[str, tuple[Any, int, dict[str, Any]]] = {  # model, ranks of a stage, and how they are cut
    "llama-2": (transformers.LlamaConfig(**{**SIZES, "attention_bias": True, "mlp_bias": True}), 2, {}),
    "qwen3-3": (transformers.Qwen3Config(**{**SIZES, "num_key_value_heads": 1}), 3, {}),  # all ranks have the K/V head
    "gpt_oss-2": (
        transformers.GptOssConfig(
            **SIZES, num_experts_per_tok=2, num_local_experts=5, attention_bias=True, sliding_window=None
        ), 2, {"expert_parallel": True},
    ),
    "glm4_moe-2": (  # with an MLP beside whole experts, and instead of them
        transformers.Glm4MoeConfig(
            **{**SIZES, "rope_parameters": dict(SIZES["rope_parameters"])}, n_routed_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=32,
        ), 2, {"expert_parallel": True},
    ),
    "mistral-1x2": (transformers.MistralConfig(**SIZES, sliding_window=19), 1, {"num_stages": 2}),
    "llama-2x2": (transformers.LlamaConfig(**{**SIZES, "attention_bias": True, "mlp_bias": True}), 2, {"num_stages": 2}),
}  # fmt: skip


def adapters_of(base: Path, directory: Path) -> list[AdapterRef]:
    """Adapters for all possible layers, for a few, and with a different rank for each layer."""
    shapes = linear_shapes(base)
    few = {name: shape for name, shape in shapes.items() if name.endswith(("v_proj", "o_proj", "down_proj"))}
    return [
        write_adapter(directory / "all", shapes, seed=1),
        write_adapter(directory / "few", few, rank=7, seed=2, use_rslora=True, alpha=3),
        write_adapter(directory / "patterns", shapes, seed=3, ranks=PATTERN, alpha_pattern={"v_proj": 30}),
    ]


def load_all(engine: Engine, directory: Path, refs: list[AdapterRef], first_slot: int = 1) -> None:
    assert engine.adapters is not None
    for slot, ref in enumerate(refs, start=first_slot):
        engine.adapters.load(slot, directory / ref.name, ref.digest)


def hand_over(source: Any, its_slot: int, target: Any, other_slot: int) -> None:
    """Copy a prompt's blocks from one engine to the other, and check that both give the same next token."""
    row = sequence(tokens(1, 45), [5, 9, 2], num_logprobs=VOCAB)
    row.adapter = its_slot
    (first,) = step(source, [StepRow(row, 45)])
    assert first is not None
    row.num_computed_tokens = 45
    row.token_ids.append(first.token_id)
    moved = sequence(row.token_ids, [60, 61, 62], num_logprobs=VOCAB)
    moved.adapter = other_slot
    for ours, theirs in zip(row.block_tables[0], moved.block_tables[0], strict=True):
        given = source.store.open_read(ours, 0)
        target.store.open_write(theirs, 0)[:] = given if isinstance(given, memoryview) else given.wait(None, 1)
        target.store.close_write(theirs)
    moved.num_computed_tokens = 45
    (found,), (expected,) = step(target, [StepRow(moved, 1)]), step(source, [StepRow(row, 1)])
    assert found is not None
    assert expected is not None
    assert_same_tokens([found], [expected], ROUNDING)


@pytest.mark.parametrize("family", MODELS)
def test_ranks_give_the_tokens_of_one(tmp_path: Path, family: str) -> None:
    config, num_ranks, cut = MODELS[family]
    base = tmp_path / "base"
    save_model(base, config)
    refs = adapters_of(base, tmp_path)
    alone = load(base, adapter_bytes=1)
    load_all(alone, tmp_path, refs)
    expected = generate(alone, [0, 1, 2, 3])
    engine: Any = load_ranks(base, num_ranks, adapters=str(tmp_path), dtype="float32", **cut)
    try:
        before = generate(engine, [0] * 4)
        load_all(engine, tmp_path, refs)
        assert generate(engine, [0, 1, 2, 3]) == expected
        assert before[0] == expected[0]
        for changed, unchanged in zip(expected[1:], before[1:], strict=True):
            assert changed != unchanged, "the adapters change nothing"
        # The slot gets another adapter. Nothing of the one before remains on any rank.
        engine.adapters.unload(1)
        engine.adapters.load(1, tmp_path / "few", refs[1].digest)
        alone.adapters.unload(1)  # type: ignore[union-attr]
        alone.adapters.load(1, tmp_path / "few", refs[1].digest)  # type: ignore[union-attr]
        assert generate(engine, [1, 0]) == generate(alone, [1, 0])
    finally:
        engine.close()


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine of two ranks that serves adapters."""
    engine = load_ranks(model, 2, adapters=str(tmp_path_factory.mktemp("none")), dtype="float32")
    yield engine
    engine.close()


def test_a_pool_of_other_ranks_goes_on_with_an_adapters_blocks(pair: Any, model: Path, tmp_path: Path) -> None:
    """Blocks are copied in both directions between one rank and two. The adapter has different slots in the two
    engines."""
    refs = adapters_of(model, tmp_path)[:1]
    alone = load(model, model_id=model.name, adapter_bytes=1)
    load_all(alone, tmp_path, refs, 9)
    load_all(pair, tmp_path, refs, 4)
    try:
        hand_over(alone, 9, pair, 4)
        hand_over(pair, 4, alone, 9)
    finally:
        pair.adapters.unload(4)


def test_a_rank_that_cannot_load_fails_the_load_and_nothing_else(pair: Any, model: Path, tmp_path: Path) -> None:
    """The path names a descriptor of the leader's process, so the rank finds no files."""
    (ref,) = adapters_of(model, tmp_path)[:1]
    before = generate(pair, [0])
    descriptor = os.open(tmp_path / ref.name, os.O_RDONLY)
    try:
        with pytest.raises(AdapterError, match=f"rank 1: /proc/self/fd/{descriptor}/adapter_config.json"):
            pair.adapters.load(1, Path(f"/proc/self/fd/{descriptor}"), ref.digest)
    finally:
        os.close(descriptor)
    assert generate(pair, [0]) == before
    load_all(pair, tmp_path, [ref])  # the slot is free on both ranks
    assert generate(pair, [1]) != before
    pair.adapters.unload(1)


def test_what_no_rank_can_load_is_refused_as_by_one(pair: Any, model: Path, tmp_path: Path) -> None:
    wide = write_adapter(tmp_path / "wide", linear_shapes(model) | {"model.layers.2.mlp.down_proj": (48, 96)})
    with pytest.raises(AdapterError, match=r"layers.2.mlp.down_proj is for a base of shape \(48, 96\)"):
        pair.adapters.load(1, tmp_path / "wide", wide.digest)
    refs = adapters_of(model, tmp_path)[:1]
    with pytest.raises(AdapterAbsentError, match="its files were changed"):
        pair.adapters.load(1, tmp_path / "all", "0" * 32)
    with pytest.raises(ValueError, match="slots"):
        generate(pair, [1])
    load_all(pair, tmp_path, refs)
    pair.adapters.unload(1)


class Failing(FakeAdapters):
    """A rank's slots, whose load raises ``fails`` if set."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: Exception | None = None

    def load(self, slot: int, directory: Path, digest: str) -> None:
        if self.fails is not None:
            raise self.fails
        super().load(slot, directory, digest)

    @property
    def taken(self) -> set[int]:
        return set(self._roots)


class Connected:
    """Implements OtherRank by a rank in this process."""

    def __init__(self) -> None:
        self.slots = Failing()
        self._answers: queue.SimpleQueue[AdapterLoaded] = queue.SimpleQueue()
        self._rank = RankAdapters(self.slots, None, self._answers.put)

    def send(self, message: bytes) -> None:
        told: Any = msgspec.msgpack.decode(message, type=LoadAdapter | UnloadAdapter)
        self._rank.take(told)

    def take_adapter(self) -> AdapterLoaded:
        return self._answers.get(timeout=SOON_S)


@pytest.fixture
def three(tmp_path: Path) -> tuple[RankedAdapters, list[Failing], AdapterRef]:
    """The adapters of three ranks, the leader's first, their slots, and an adapter on disk."""
    ref = write_adapter(tmp_path / "a", {"model.layers.0.self_attn.q_proj": (8, 8)})
    own, ranks = Failing(), [Connected(), Connected()]
    return RankedAdapters(own, ranks), [own, *(rank.slots for rank in ranks)], ref


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (AdapterAbsentError("gone"), AdapterAbsentError, "gone"),
        (AdapterError("wrong"), AdapterError, "wrong"),
        (MemoryError("too much"), RuntimeError, "MemoryError: too much"),
    ],
)
def test_a_slot_has_an_adapter_on_all_ranks_or_on_none(
    three: Any, tmp_path: Path, rank: int, error: Exception, kind: type[Exception], text: str
) -> None:
    adapters, slots, ref = three
    slots[rank].fails = error
    with pytest.raises(type(error) if rank == 0 else kind, match=str(error) if rank == 0 else f"^rank {rank}.*{text}"):
        adapters.load(3, tmp_path / "a", ref.digest)
    assert [one.taken for one in slots] == [set()] * 3
    slots[rank].fails = None
    assert AdapterFiles.read(tmp_path / "a").num_parameters * 2 == adapters.nbytes(AdapterFiles.read(tmp_path / "a"))
    adapters.load(3, tmp_path / "a", ref.digest)
    assert [one.taken for one in slots] == [{3}] * 3
    adapters.unload(3)
    adapters.load(4, tmp_path / "a", ref.digest)
    assert [one.taken for one in slots] == [{4}] * 3
