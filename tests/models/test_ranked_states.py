"""Recurrent layers on several ranks: each has some heads and their states, and any ranks hand over to any others."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.cut import Cut
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.engine.models.hf.gate import probe_layers
from kvrelay.engine.models.hf.model import TransformersModel, shape_of
from kvrelay.engine.models.hf.ranks import recurrent
from kvrelay.engine.models.hf.ranks.cut import cut_model
from kvrelay.engine.models.hf.ranks.cuts import find_cuts
from kvrelay.engine.models.hf.ranks.ranges import shares
from tests.decode_worker.rig import Rig, greedy
from tests.engine.conftest import assert_same_tokens
from tests.engine.ranks.conftest import load_ranks

from .played_ranks import PlayedCollectives, ThreadedRanks
from .test_kept import save_stored
from .test_kernels import Run, relayed
from .test_quantised import ours
from .test_ranks import TOLERANCE, answer
from .test_states import PROMPT
from .test_types import again, engine_of, saved
from .tiny import generate, tiny_model

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # transformers warns of what tiny configurations leave out
]
TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
EIGHT_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}


@pytest.mark.parametrize("model_type", [TYPES[0], *(pytest.param(one, marks=pytest.mark.full) for one in TYPES[1:])])
def test_two_and_four_ranks_hand_over_to_each_other(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eight value heads a key head has two. Each rank's channels are three ranges."""
    saved(model_type, tmp_path, **EIGHT_HEADS)
    with ThreadedRanks(tmp_path, 2, monkeypatch) as two, ThreadedRanks(tmp_path, 4, monkeypatch) as four:
        assert all(len(its.divided_states) == 3 for its in (*two.ranks, *four.ranks))
        one = again(tmp_path)
        assert two.card.layout.geometry == four.card.layout.geometry == one.card.layout.geometry
        expected = list(relayed(Run(one), Run(again(tmp_path))))
        for prefill, decode in ((two, four), (four, two), (one, four)):
            for given, wanted in zip(relayed(Run(prefill), Run(decode)), expected, strict=True):  # type: ignore[arg-type]
                assert_same_tokens(given, wanted, TOLERANCE)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_rank_has_all_of_its_heads_and_nothing_of_others(model_type: str) -> None:
    """Joined in order, the ranks' parts of each projection have every row once. Only norms are on all ranks."""
    model = tiny_model(model_type, **EIGHT_HEADS)
    layers = probe_layers(model)
    whole = TransformersModel(model, layers, shape_of(model, layers, torch.float32))
    cuts = [find_cuts(whole, Cut(rank, 4)) for rank in range(4)]
    parameters = {name: one for name, one in model.named_parameters() if ".linear_attn." in name}
    assert parameters
    for name, parameter in parameters.items():
        size = parameter.shape[int(name.endswith("out_proj.weight"))]
        rows = [[*range(size)]] if name.endswith("norm.weight") else []
        if not rows:
            rows = [[row for part in its.parameters[name].ranges for row in part] for its in cuts]
        assert sorted(row for of_rank in rows for row in of_rank) == [*range(size)], name
        assert len({len(of_rank) for of_rank in rows}) == 1, name


def test_what_ranks_do_not_divide_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two key heads, four ranks."""
    saved("qwen3_next", tmp_path)
    with ThreadedRanks(tmp_path, 4, monkeypatch) as four:
        assert not any(its.divided_states for its in four.ranks)
        one = again(tmp_path)
        expected = relayed(Run(one), Run(again(tmp_path)))
        for given, wanted in zip(relayed(Run(four), Run(one)), expected, strict=True):  # type: ignore[arg-type]
            assert_same_tokens(given, wanted, TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize(("model_type", "name"), [("qwen3_next", "gptq"), ("qwen3_5_text", "fp8-blocks")])
def test_ranks_expand_their_parts_of_quantised_weights(
    model_type: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_stored(model_type, name, tmp_path, linear_key_head_dim=16, linear_value_head_dim=16)
    wanted = ours(engine_of(directory))
    with ThreadedRanks(directory, 2, monkeypatch) as two:
        torch.testing.assert_close(ours(two), wanted, rtol=0, atol=TOLERANCE)  # type: ignore[arg-type]


def test_channels_in_another_order_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank takes as many channels of the convolution, but those that follow each other."""
    saved("qwen3_next", tmp_path)

    def in_one_range(sections: Seq[int], rank: int, num_ranks: int) -> tuple[range, ...]:
        return shares((sum(sections),), rank, num_ranks)

    monkeypatch.setattr(recurrent, "shares", in_one_range)
    with pytest.raises(ModelError, match="over paged K/V is not what transformers computes"):
        ThreadedRanks(tmp_path, 2, monkeypatch)


def test_states_that_a_part_does_not_keep_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks would hand over other bytes than they compute."""
    model = tiny_model("qwen3_next")
    layers = probe_layers(model)
    whole = TransformersModel(model, layers, shape_of(model, layers, torch.float32))
    monkeypatch.setattr(recurrent.RecurrentCut, "divided", lambda _, tensors: tensors)
    with pytest.raises(ModelError, match="a part of Qwen3NextForCausalLM does not keep the part of its states: take 1"):
        cut_model(whole, Cut(1, 2))


def test_a_recurrent_layer_sums_once_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes a prompt block by block."""
    saved("qwen3_next", tmp_path)
    sums: list[int] = []
    add_up = PlayedCollectives.sum

    def counted(self: PlayedCollectives, partial: torch.Tensor) -> torch.Tensor:
        sums.append(partial.numel() // partial.shape[-1])  # tokens
        return add_up(self, partial)

    with ThreadedRanks(tmp_path, 2, monkeypatch) as two:
        monkeypatch.setattr(PlayedCollectives, "sum", counted)
        answer(two, list(range(3, 9)))  # type: ignore[arg-type]
    assert len(sums) % sums.count(6) == 0, "a step has more sums than another"
    assert set(sums) == {6, 1}


def test_ranks_continue_behind_cached_blocks_and_after_a_preemption(tmp_path: Path) -> None:
    """In processes of their own. The first 40 tokens are ten blocks, whose states ranks have in parts."""
    model = saved("qwen3_next", tmp_path)
    answer = generate(model, PROMPT, 20)[0]
    two = load_ranks(tmp_path, 2, num_blocks=40, block_size=4, backend="transformers", dtype="float32")
    try:
        rig, lease = Rig(two), Owner(OwnerKind.LEASE, "x")
        rig.local("first", PROMPT, greedy(20))
        assert rig.run()["first"] == answer
        rig.local("second", PROMPT, greedy(20))
        assert rig.step() == [("second", 1)]
        while rig.num_preemptions == 0 and rig.scheduler.running:
            rig.blocks.release(lease)
            rig.blocks.allocate(lease, rig.blocks.num_allocatable // rig.blocks.num_groups, is_whole=True)
            rig.step()
        rig.blocks.release(lease)
        assert rig.run()["second"] == answer
        assert rig.num_preemptions == 1
    finally:
        two.close()
