"""The API's parameters against transformers: with a hand-off and without, one request at a time and all in one batch.

Each request of :mod:`tests.e2e.promises` is sent in these four ways. All answers must be equal, and equal transformers'.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import LogitsProcessorList

from kvrelay.launcher.client import counter_values
from kvrelay.launcher.local.deployment import LocalDeployment

from .conftest import wait_until_idle
from .promises import (
    CITY_REGEX,
    DATE_REGEX,
    MAX_TOKENS,
    SENTENCE_REGEX,
    WISHES,
    Answer,
    ask_alone,
    ask_together,
    assert_same,
)
from .reference import OpenAIPenalties, Reference, assert_drawn

pytestmark = pytest.mark.timeout(300)

Answers = dict[str, dict[str, Answer]]  # by way, then by request


@pytest.fixture(scope="module")
def reference(model_directory: Path) -> Iterator[Reference]:
    """transformers' model on one thread, as more threads would compete with the deployment's."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Reference(model_directory)
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def answers(deployment: LocalDeployment, local_deployment: LocalDeployment) -> Answers:
    """The answers to all requests in all four ways. The order of the ways decides what is cached: "relay" computes new
    prompts one at a time, "local" computes them together."""

    def counted(deployment: LocalDeployment, name: str, **labels: str) -> float:
        return sum(counter_values(deployment.admin_urls["decode-0"], name, labels))

    found: Answers = {}
    num_steps: dict[str, float] = {}
    num_before = counted(deployment, "kvrelay_handoffs_total", outcome="verified")
    for name, ask, where in (
        ("relay, alone", ask_alone, deployment),
        ("relay, together", ask_together, deployment),
        ("local, together", ask_together, local_deployment),
        ("local, alone", ask_alone, local_deployment),
    ):
        before = counted(where, "kvrelay_step_seconds_count")
        found[name] = asyncio.run(ask(where.url, WISHES))
        num_steps[name] = counted(where, "kvrelay_step_seconds_count") - before
        wait_until_idle(where)
    assert counted(deployment, "kvrelay_handoffs_total", outcome="verified") - num_before >= 2 * len(WISHES)
    for place in ("relay", "local"):  # the requests did share batches
        assert num_steps[f"{place}, together"] < num_steps[f"{place}, alone"] / 4, num_steps
    return found


@pytest.fixture
def first(answers: Answers) -> dict[str, Answer]:
    """The answers of one way. ``test_all_ways_give_the_same`` compares the others with it."""
    return answers["relay, alone"]


@pytest.mark.parametrize("name", WISHES)
def test_all_ways_give_the_same(answers: Answers, reference: Reference, name: str) -> None:
    first, *others = (by_wish[name] for by_wish in answers.values())
    for way, other in zip(list(answers)[1:], others, strict=True):
        assert_same(first.choices, other.choices, f"{name} ({way})")
    assert all(one.prompt_ids == reference.encode(WISHES[name].prompt) for one in (first, *others))
    for one in (first, *others):
        assert one.num_prompt_tokens == len(first.prompt_ids)
        assert one.num_output_tokens == sum(len(output) for output in one.outputs)


def test_each_setting_changes_the_text(first: dict[str, Answer], reference: Reference) -> None:
    """With each of six settings the output differs from the greedy one, so that their tests show something."""
    for name in (
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "bad_words",
        "min_tokens",
    ):
        [output] = first[name].outputs
        assert output != reference.generate(first[name].prompt_ids, len(output))[0], name


def _options(name: str, reference: Reference, num_prompt_tokens: int) -> dict[str, Any]:
    """The options of ``generate`` for one request."""
    fields = WISHES[name].fields
    options: dict[str, Any] = {}
    match name:
        case "repetition_penalty":
            options[name] = fields[name]
        case "presence_penalty" | "frequency_penalty":
            presence, frequency = fields.get("presence_penalty", 0), fields.get("frequency_penalty", 0)
            penalties = OpenAIPenalties(num_prompt_tokens, presence, frequency)
            options["logits_processor"] = LogitsProcessorList([penalties])
        case "logit_bias":
            options["sequence_bias"] = {(int(token),): float(bias) for token, bias in fields[name].items()}
        case "bad_words":
            options["bad_words_ids"] = [
                reference.encode(before + word) for word in fields[name] for before in ("", " ")
            ]
        case "min_tokens":
            options["min_new_tokens"] = fields[name]
            options["eos_token_id"] = [*reference.end_ids, *fields["stop_token_ids"]]
        case "allowed_token_ids":
            options["prefix_allowed_tokens_fn"] = lambda _, __: fields[name]
        case _:
            pass
    return options


@pytest.mark.parametrize(
    "name",
    [
        "greedy",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "bad_words",
        "min_tokens",
        "allowed_token_ids",
        "logprobs",
        "prompt_logprobs",
        "echo",
    ],
)
def test_greedy_tokens_are_those_of_transformers(first: dict[str, Answer], reference: Reference, name: str) -> None:
    answer, max_tokens = first[name], WISHES[name].body["max_tokens"]
    options = _options(name, reference, len(answer.prompt_ids))
    assert answer.outputs == reference.generate(answer.prompt_ids, max_tokens, **options)
    [choice] = answer.choices
    is_stop_token = choice["stop_reason"] is not None  # a stop token's text is left out
    text = reference.decode(choice["token_ids"][: -1 if is_stop_token else None])
    assert choice["text"] == (WISHES[name].prompt + text if name == "echo" else text)
    has_ended = choice["token_ids"][-1] in options.get("eos_token_id", reference.end_ids)
    assert choice["finish_reason"] == ("stop" if has_ended else "length")


def test_a_stop_string_ends_what_transformers_says(first: dict[str, Answer], reference: Reference) -> None:
    answer = first["stop"]
    [choice], [greedy] = answer.choices, reference.generate(answer.prompt_ids, MAX_TOKENS)
    stop = WISHES["stop"].fields["stop"][1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == reference.decode(greedy).partition(stop)[0]
    num_needed = next(count for count in range(len(greedy)) if stop in reference.decode(greedy[:count]))
    assert choice["token_ids"] == greedy[:num_needed]


def test_log_probabilities(first: dict[str, Answer], reference: Reference) -> None:
    for name, num_top in (("logprobs", 5), ("echo", 2)):
        answer = first[name]
        [choice] = answer.choices
        token_ids = answer.prompt_ids + choice["token_ids"]
        expected = reference.logprobs(token_ids)
        told = choice["logprobs"]
        num_skipped = 0 if name == "echo" else len(answer.prompt_ids)
        assert told["tokens"] == [reference.tokenizer.decode([token]) for token in token_ids[num_skipped:]]
        for place, token in enumerate(token_ids[num_skipped:]):
            if num_skipped + place == 0:
                assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
                continue
            row = expected[num_skipped + place - 1]
            assert told["token_logprobs"][place] == pytest.approx(row[token].item(), abs=1e-3, rel=0)
            values, ids = row.topk(num_top)
            top = dict(zip(reference.tokenizer.batch_decode(ids[:, None]), values.tolist(), strict=True))
            assert told["top_logprobs"][place] == pytest.approx(top, abs=1e-3, rel=0)
            assert told["text_offset"][place] == len("".join(told["tokens"][:place]))


def test_log_probabilities_of_the_prompt(first: dict[str, Answer], reference: Reference) -> None:
    answer = first["prompt_logprobs"]
    nothing, *told = answer.choices[0]["prompt_logprobs"]
    assert nothing is None
    expected = reference.logprobs(answer.prompt_ids)
    for row, token, found in zip(expected, answer.prompt_ids[1:], told, strict=False):
        values, ids = row.topk(3)
        top = {str(key): value for key, value in zip(ids.tolist(), values.tolist(), strict=True)}
        wanted = {str(token): row[token].item(), **top}
        assert {key: value["logprob"] for key, value in found.items()} == pytest.approx(wanted, abs=1e-3, rel=0)
        assert {key: value["rank"] for key, value in found.items() if key in top} == {
            key: rank + 1 for rank, key in enumerate(top)
        }


@pytest.mark.parametrize("width", [2, 4, 8])
def test_beams_are_those_of_transformers(first: dict[str, Answer], reference: Reference, width: int) -> None:
    answer = first[f"beams {width}"]
    expected = reference.generate(
        answer.prompt_ids, MAX_TOKENS, num_beams=width, num_return_sequences=width, length_penalty=1.0
    )
    assert answer.outputs == expected
    assert [choice["text"] for choice in answer.choices] == [reference.decode(output) for output in expected]


def _warpers(name: str) -> LogitsProcessorList:
    fields = WISHES[name].fields
    known = (
        ("repetition_penalty", transformers.RepetitionPenaltyLogitsProcessor),
        ("temperature", transformers.TemperatureLogitsWarper),
        ("top_k", transformers.TopKLogitsWarper),
        ("top_p", transformers.TopPLogitsWarper),
        ("min_p", transformers.MinPLogitsWarper),
        ("typical_p", transformers.TypicalLogitsWarper),
    )
    return LogitsProcessorList([warper(fields[field]) for field, warper in known if field in fields])


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "typical_p", "all filters", "n"])
def test_what_is_drawn_is_what_the_noise_takes_of_transformers_distribution(
    first: dict[str, Answer], reference: Reference, name: str
) -> None:
    answer, wish = first[name], WISHES[name]
    assert len(answer.choices) == wish.num_choices
    assert len({tuple(output) for output in answer.outputs}) == wish.num_choices
    for number, output in enumerate(answer.outputs):
        logits = reference.logits(answer.prompt_ids + output)[len(answer.prompt_ids) - 1 : -1]
        seed = int(wish.fields["seed"])
        assert_drawn(logits, answer.prompt_ids, output, _warpers(name), seed=seed, choice=number)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("json_schema", SENTENCE_REGEX), ("regex", DATE_REGEX), ("choice", "Paris|Rome"), ("grammar", CITY_REGEX)],
)
def test_guided_tokens_are_the_likeliest_that_may_come(
    first: dict[str, Answer], reference: Reference, name: str, pattern: str
) -> None:
    answer = first[name]
    [output] = answer.outputs
    reference.assert_guided(answer.prompt_ids, output, pattern)
    assert answer.choices[0]["finish_reason"] == "stop"
    if name == "json_schema":
        assert json.loads(answer.choices[0]["text"]).keys() == {"capital", "sure", "letters"}
