"""An EAGLE-3 head in this process: texts stay the same, and settings that do not fit are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.executor import LLM, Request, SamplingParams, StructuredOutputsParams
from tests.draft_pairs import save_pair
from tests.engine.ranks.rig import pids
from tests.heads import change_tensors, save_head

from ..relay.http_gateway import VOCAB, write_model

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "threads": 1, "kv_memory_mb": 64}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model with a tokenizer, and a random head for it without one."""
    model, shallow, head = (tmp_path_factory.mktemp(name) for name in ("deep", "shallow", "head"))
    save_pair(model, shallow, 12, vocab_size=VOCAB, hidden_size=64, num_attention_heads=4, head_dim=32)
    write_model(model)
    save_head(head, model, num_drafted=VOCAB // 2)
    return str(model), str(head)


def test_the_texts_are_those_without(pair: tuple[str, str]) -> None:
    people = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
    guided = StructuredOutputsParams(json=people)
    requests = [
        Request("the quick brown fox", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)),
        Request("the lazy dog", SamplingParams(seed=3, n=3, max_tokens=40, ignore_eos=True)),
        Request("again and again", SamplingParams(seed=4, max_tokens=40, repetition_penalty=1.2, ignore_eos=True)),
        Request("as JSON", SamplingParams(seed=5, max_tokens=40, structured_outputs=guided)),
    ]
    with LLM(pair[0], **OPTIONS) as plain:
        expected = [output.outputs for output in plain.generate(requests)]
    with LLM(pair[0], speculation="head", draft_model=pair[1], **OPTIONS) as llm:
        assert [output.outputs for output in llm.generate(requests)] == expected


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"speculation": "head"}, SettingsError, "needs both: .* --speculation head"),
        ({"pipeline_parallel": 2}, ModelError, "layers that other stages have: take --tensor-parallel instead"),
        ({"backend": "transformers"}, ModelError, "models that run through transformers have no heads"),
        ({"engine": "fake"}, ModelError, "the fake engine has no hidden states"),
        ({"draft_kv_memory_mb": 1, "max_num_seqs": 512}, ModelError, "--draft-kv-memory-mb is 1, .* guesses need 64"),
        ({"draft_kv_memory_mb": 1, "max_num_seqs": 64, "block_size": 256}, ModelError, "is 1, 0 tokens for each of"),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_model_is_loaded(
    pair: tuple[str, str], options: dict[str, Any], error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.executor.local.load_engine", lambda *_, **__: pytest.fail("the model is loaded"))
    given = options if error is SettingsError else {"speculation": "head", "draft_model": pair[1], **options}
    with pytest.raises(error, match=match):
        LLM(pair[0], **given, **OPTIONS)


def test_ranks_end_with_a_model_whose_head_cannot_be_loaded(pair: tuple[str, str], tmp_path: Path) -> None:
    """What is wrong is in a tensor, which is read when the ranks have loaded."""
    save_head(tmp_path, Path(pair[0]), num_drafted=VOCAB // 2)
    change_tensors(tmp_path, {"d2t": torch.full((VOCAB // 2,), VOCAB)})
    with pytest.raises(ModelError, match="d2t names tokens twice, or beyond the model's"):
        LLM(pair[0], speculation="head", draft_model=str(tmp_path), tensor_parallel=2, **OPTIONS)
    assert not pids()


def test_a_model_is_no_head(pair: tuple[str, str]) -> None:
    with pytest.raises(ModelError, match=r"config.json has no 'draft_vocab_size'; it is no EAGLE-3 head"):
        LLM(pair[0], speculation="head", draft_model=pair[0], **OPTIONS)
