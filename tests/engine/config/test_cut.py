"""The parts of all ranks, and of all stages, are together the whole model, and their sizes differ little."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.common.errors import ModelError
from kvrelay.engine.config.cut import Cut, cuts_of, require_fit, require_stages
from kvrelay.engine.config.model import ModelConfig, parse_config

from .test_model_config import LLAMA


def model(num_q_heads: int, num_kv_heads: int, **more: Any) -> ModelConfig:
    sizes = {"num_attention_heads": num_q_heads, "num_key_value_heads": num_kv_heads, "head_dim": 16}
    return parse_config({**LLAMA, **sizes, **more}, "here")


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads"), [(12, 12), (12, 4), (12, 2), (12, 1), (9, 3), (64, 8), (8, 8)]
)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8])
def test_each_query_head_is_on_one_rank_with_the_kv_head_that_it_attends_to(
    num_q_heads: int, num_kv_heads: int, num_ranks: int
) -> None:
    config = model(num_q_heads, num_kv_heads)
    try:
        require_fit(config, num_ranks)
    except ModelError:
        return
    cuts = [Cut(rank, num_ranks) for rank in range(num_ranks)]
    assert [head for cut in cuts for head in cut.heads(num_q_heads)] == list(range(num_q_heads))
    assert {head for cut in cuts for head in cut.heads(num_kv_heads)} == set(range(num_kv_heads))
    for cut in cuts:
        q_heads, kv_heads, own = cut.heads(num_q_heads), cut.heads(num_kv_heads), cut.config(config)
        assert (own.num_q_heads, own.num_kv_heads) == (len(q_heads), len(kv_heads))
        for place, head in enumerate(q_heads):
            needed = head * num_kv_heads // num_q_heads
            assert kv_heads[place * len(kv_heads) // len(q_heads)] == needed
    assert len({cut.config(config).kv_size for cut in cuts}) == 1


@pytest.mark.parametrize("num_columns", [80, 96, 128, 1536, 11008, 7])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_columns_and_tokens_are_each_on_one_rank(num_columns: int, num_ranks: int) -> None:
    cuts = [Cut(rank, num_ranks) for rank in range(num_ranks)]
    columns = [cut.columns(num_columns) for cut in cuts]
    assert [column for one in columns for column in one] == list(range(num_columns))
    assert max(map(len, columns)) - min(map(len, columns)) <= 64
    tokens = [cut.vocab(199) for cut in cuts]
    assert [token for one in tokens for token in one] == list(range(199))
    assert {cut.vocab_part(199) for cut in cuts} == {-(-199 // num_ranks)}


def test_ranks_that_do_not_divide_the_heads_are_refused_with_those_that_fit() -> None:
    with pytest.raises(
        ModelError, match=r"--tensor-parallel is 2; .* 9 query and 3 K/V heads, which fit 1, 3, 9 ranks"
    ):
        require_fit(model(9, 3), 2)
    with pytest.raises(ModelError, match="6 query and 2 K/V heads, which fit 1, 2, 6 ranks"):
        require_fit(model(6, 2), 3)  # one rank would need both K/V heads, the others one
    require_fit(model(9, 3), 3)
    require_fit(model(12, 1), 4)


@pytest.mark.parametrize("num_layers", [3, 4, 30, 61])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_have_each_layer_once_and_the_last_one_never_more_than_another(num_layers: int, num_stages: int) -> None:
    cuts = cuts_of(1, num_stages)
    layers = [cut.layers(num_layers) for cut in cuts]
    assert [layer for one in layers for layer in one] == list(range(num_layers))
    assert len(layers[0]) - 1 <= len(layers[-1]) <= len(layers[0])
    assert [cut.is_first for cut in cuts].index(True) == 0
    assert [cut.is_last for cut in cuts].index(True) == num_stages - 1


def test_ranks_of_a_stage_are_neighbours_and_have_its_heads_among_them() -> None:
    config = model(12, 4, num_hidden_layers=5)
    cuts = cuts_of(2, 3)
    assert [(cut.stage, cut.rank) for cut in cuts] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    for cut in cuts:
        own = cut.config(config)
        assert (own.num_q_heads, own.num_kv_heads, own.stage_layers) == (6, 2, cut.layers(5))
    assert cuts_of(2, 1)[1].config(config).stage_layers is None


def test_more_stages_than_layers_are_refused() -> None:
    require_stages(model(12, 4, num_hidden_layers=3), 3)
    with pytest.raises(ModelError, match=r"--pipeline-parallel is 4; .* has 3 layers: take at most as many stages"):
        require_stages(model(12, 4, num_hidden_layers=3), 4)
