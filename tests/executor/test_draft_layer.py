"""A checkpoint's layer for drafting in this process: texts stay the same, and settings that do not fit are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.executor import LLM, Request, SamplingParams, StructuredOutputsParams
from tests.draft_layers import save_known_layer

from ..relay.http_gateway import VOCAB, write_model

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "kv_memory_mb": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory: Path = tmp_path_factory.mktemp("model")
    save_known_layer(directory, vocab_size=VOCAB)
    write_model(directory)
    return str(directory)


def test_the_texts_are_those_without(model: str) -> None:
    people = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
    guided = StructuredOutputsParams(json=people)
    requests = [
        Request("the quick brown fox", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)),
        Request("the lazy dog", SamplingParams(seed=3, n=3, max_tokens=40, ignore_eos=True)),
        Request("as JSON", SamplingParams(seed=5, max_tokens=40, structured_outputs=guided)),
    ]
    with LLM(model, **OPTIONS) as plain:
        expected = [output.outputs for output in plain.generate(requests)]
    with LLM(model, speculation="mtp", **OPTIONS) as llm:
        assert [output.outputs for output in llm.generate(requests)] == expected


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"draft_model": "x"}, SettingsError, "--speculation is mtp and --draft-model"),
        ({"pipeline_parallel": 2}, ModelError, "--speculation is mtp, and --pipeline-parallel 2; a layer for drafting"),
        ({"backend": "transformers"}, ModelError, "--speculation is mtp; models that run through transformers"),
        ({"engine": "fake"}, ModelError, "--speculation is mtp; the fake engine has no hidden states"),
        ({"draft_kv_memory_mb": 1, "max_num_seqs": 512}, ModelError, "--draft-kv-memory-mb is 1, .* guesses need 64"),
        ({"draft_kv_memory_mb": 1, "max_num_seqs": 64, "block_size": 256}, ModelError, "is 1, 0 tokens for each of"),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_model_is_loaded(
    model: str, options: dict[str, Any], error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.executor.local.load_engine", lambda *_, **__: pytest.fail("the model is loaded"))
    given = {name: model if name == "draft_model" else value for name, value in options.items()}
    with pytest.raises(error, match=match):
        LLM(model, speculation="mtp", **given, **OPTIONS)
