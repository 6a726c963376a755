"""A draft model in this process: texts stay the same, its memory is logged, and one that does not fit is refused."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from kvrelay.common.errors import ModelError, SettingsError
from kvrelay.executor import LLM, Request, SamplingParams, StructuredOutputsParams
from kvrelay.executor.local import LocalBackend
from tests.draft_pairs import save_pair
from tests.models.test_types import saved

from ..relay.http_gateway import VOCAB, write_model

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "threads": 1, "kv_memory_mb": 64}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model of many layers, and a draft model of one layer that guesses its tokens, both with a tokenizer."""
    directories = [tmp_path_factory.mktemp(name) for name in ("deep", "shallow")]
    save_pair(*directories, 12, vocab_size=VOCAB, hidden_size=64, num_attention_heads=4, head_dim=32)
    for directory in directories:
        write_model(directory)
    deep, shallow = map(str, directories)
    return deep, shallow


def test_the_texts_are_those_without(pair: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    people = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2)
    guided = StructuredOutputsParams(json=people)
    requests = [
        Request("the quick brown fox", greedy),
        Request("the lazy dog", SamplingParams(seed=3, n=3, max_tokens=60, ignore_eos=True)),
        Request("again and again", SamplingParams(seed=4, max_tokens=60, repetition_penalty=1.2, ignore_eos=True)),
        Request("as JSON", SamplingParams(seed=5, max_tokens=60, structured_outputs=guided)),
    ]
    with LLM(pair[0], **OPTIONS) as plain:
        expected = [output.outputs for output in plain.generate(requests)]
    caplog.set_level(logging.INFO, logger="kvrelay")
    drafting = {"speculation": "draft-model", "draft_model": pair[1], "draft_kv_memory_mb": 2}
    with LLM(pair[0], **drafting, **OPTIONS) as llm:
        # Also one by one: alone, a request gets drafts on any machine.
        told = [llm.generate(requests), [llm.submit(request).result(60) for request in requests]]
        ledger = cast("LocalBackend", llm._executor._backend).worker.debug_kv()["draft_model"]
    for outputs in told:
        assert [output.outputs for output in outputs] == expected
    assert ledger["cached"] > 0
    assert ledger["running"] == 0
    assert (
        f"the draft model {Path(pair[1]).name} takes 0 MiB for weights, and 2 MiB for K/V of 8192 tokens" in caplog.text
    )


def test_a_model_on_two_ranks_has_its_draft_model_on_the_first(
    pair: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The texts are compared in ``tests/decode_worker/test_ranked_drafts.py``."""
    drafting = {"speculation": "draft-model", "draft_model": pair[1], "draft_kv_memory_mb": 2, "tensor_parallel": 2}
    caplog.set_level(logging.INFO, logger="kvrelay")
    with LLM(pair[0], **drafting, **OPTIONS) as llm:
        llm.generate("the quick brown fox", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        assert cast("LocalBackend", llm._executor._backend).worker.debug_kv()["draft_model"]["cached"] > 0
    assert "and 2 MiB for K/V of 8192 tokens on the first rank" in caplog.text


def test_a_model_with_other_tokens_is_refused_by_name(pair: tuple[str, str], tmp_path: Path) -> None:
    other = shutil.copytree(pair[1], tmp_path / "other")
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    (token,) = (token for token, number in tokenizer["model"]["vocab"].items() if number == 200)
    tokenizer["model"]["vocab"]["other"] = tokenizer["model"]["vocab"].pop(token)
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"different tokens, (\d+) and \1 of them: token 200 is '.*' and 'other'"):
        LLM(pair[0], speculation="draft-model", draft_model=str(other), **OPTIONS)
    path.write_text("{}")
    with pytest.raises(ModelError, match="by it the tokens of two models are compared"):
        LLM(pair[0], speculation="draft-model", draft_model=str(other), **OPTIONS)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"speculation": "draft-model"}, SettingsError, "--draft-model None; a draft model needs both"),
        ({"draft_model": "{}"}, SettingsError, "--speculation is off and --draft-model"),
        (
            {"speculation": "draft-model", "draft_model": "{}", "engine": "fake"},
            ModelError,
            "the fake engine makes its tokens up",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(
    pair: tuple[str, str], options: dict[str, Any], error: type[Exception], match: str
) -> None:
    given = {name: value.format(pair[1]) if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(error, match=match):
        LLM(pair[0], **given, **OPTIONS)


def test_what_the_files_show_is_refused_before_anything_is_loaded(
    pair: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvrelay")
    saved("qwen3_next", tmp_path)
    write_model(tmp_path)
    for options, match in (
        ({"draft_model": pair[1], "tensor_parallel": 3}, "--tensor-parallel"),
        ({"draft_model": str(tmp_path)}, "which has recurrent layers: they cannot take back a wrong guess"),
    ):
        with pytest.raises(ModelError, match=match):
            LLM(pair[0], speculation="draft-model", **options, **OPTIONS)
    assert "loading" not in caplog.text
