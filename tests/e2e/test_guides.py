"""Guided answers of the demo model through the whole relay, and locally."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import jsonschema
import pytest

from kvrelay.launcher.local import LocalDeployment

from .conftest import wait_until_idle
from .test_demo import prompt

pytestmark = pytest.mark.timeout(300)

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 1000, "maximum": 50_000_000},
        "kind": {"enum": ["town", "capital"]},
    },
    "required": ["city", "population", "kind"],
    "additionalProperties": False,
}


def ask(deployment: LocalDeployment, **fields: object) -> httpx.Response:
    body = {"prompt": "Paris, in JSON: ", "max_tokens": 120, "temperature": 0, **fields}
    return httpx.post(f"{deployment.url}/v1/completions", json=body, timeout=240)


def text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "stop", choice
    found: str = choice["text"]
    return found


def test_every_kind_of_guide_through_the_relay(deployment: LocalDeployment) -> None:
    answer = json.loads(text(ask(deployment, structured_outputs={"json": SCHEMA})))
    jsonschema.validate(answer, SCHEMA)
    assert re.fullmatch("[A-Z][a-z]{3,9}", text(ask(deployment, structured_outputs={"regex": "[A-Z][a-z]{3,9}"})))
    assert text(ask(deployment, structured_outputs={"choice": ["Paris", "Rome"]})) in {"Paris", "Rome"}
    grammar = 'root ::= "city: " [A-Z] [a-z]{3,8} "."'
    assert re.fullmatch(r"city: [A-Z][a-z]{3,8}\.", text(ask(deployment, structured_outputs={"grammar": grammar})))
    wait_until_idle(deployment)


def test_a_guide_that_does_not_compile_is_a_400_that_quotes_the_reason(deployment: LocalDeployment) -> None:
    for fields, param, reason in (
        ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs.json", "uniqueItems"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ):
        response = ask(deployment, **fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(f"{param} cannot be followed: ")
        assert reason in error["message"]
    wait_until_idle(deployment)


def test_guided_and_free_requests_share_a_batch(deployment: LocalDeployment) -> None:
    """Among guided ones, a free request's answer is what it is alone."""
    tokens = prompt(5, 40)
    alone = ask(deployment, prompt=tokens, max_tokens=16, ignore_eos=True).json()["choices"][0]["text"]
    with httpx.Client(base_url=deployment.url, timeout=240) as client:

        def post(fields: dict[str, object]) -> httpx.Response:
            return client.post(
                "/v1/completions", json={"prompt": "Rome: ", "max_tokens": 120, "temperature": 0, **fields}
            )

        guided = {"structured_outputs": {"json": SCHEMA}}
        free = {"prompt": tokens, "max_tokens": 16, "ignore_eos": True}
        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(post, [guided, free, guided, free, guided, guided]))
    for index, answer in enumerate(answers):
        if index in {1, 3}:
            assert answer.json()["choices"][0]["text"] == alone
        else:
            jsonschema.validate(json.loads(text(answer)), SCHEMA)


def test_local_prefill_gives_the_same(deployment: LocalDeployment, local_deployment: LocalDeployment) -> None:
    answers = [text(ask(one, structured_outputs={"json": SCHEMA})) for one in (deployment, local_deployment)]
    assert answers[0] == answers[1]
    assert ask(local_deployment, structured_outputs={"regex": "(a"}).status_code == 400
