"""Clients of Hugging Face's TGI, unmodified, against the demo model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError

from kvrelay.launcher.local.deployment import LocalDeployment

from .conftest import wait_until_idle

pytestmark = pytest.mark.timeout(300)

PROMPT = "The capital of France is"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}


@pytest.fixture
def client(deployment: LocalDeployment) -> Iterator[InferenceClient]:
    """A client with the deployment's URL in place of a TGI's. All blocks must be free afterwards."""
    yield InferenceClient(deployment.url, timeout=240)
    wait_until_idle(deployment)


def test_it_is_taken_for_a_tgi(deployment: LocalDeployment) -> None:
    client = InferenceClient(deployment.url, provider="hf-inference")
    assert client.health_check()
    info = client.get_endpoint_info()
    assert (info["model_dtype"], info["model_device_type"]) == ("torch.float32", "cpu")
    assert info["max_total_tokens"] == 8192


def test_text_whole_and_streamed(client: InferenceClient) -> None:
    text = client.text_generation(PROMPT, max_new_tokens=12, return_full_text=False)
    assert "Paris" in text
    assert client.text_generation(PROMPT, max_new_tokens=12) == PROMPT + text  # the route's default, as TGI's
    assert "".join(client.text_generation(PROMPT, max_new_tokens=12, stream=True)) == text
    *_, last = client.text_generation(PROMPT, max_new_tokens=12, stream=True, details=True, return_full_text=False)
    assert last.generated_text == text
    assert last.details is not None
    assert (last.details.finish_reason, last.details.generated_tokens, last.details.seed) == ("length", 12, None)


def test_details(client: InferenceClient) -> None:
    answer = client.text_generation(
        PROMPT, max_new_tokens=5, details=True, decoder_input_details=True, top_n_tokens=3, return_full_text=False
    )
    details = answer.details
    assert details is not None
    assert "".join(token.text for token in details.prefill) == PROMPT
    assert details.prefill[0].logprob is None
    assert all(token.logprob < 0 for token in details.prefill[1:])
    assert "".join(token.text for token in details.tokens) == answer.generated_text
    assert details.top_tokens is not None
    for token, top in zip(details.tokens, details.top_tokens, strict=True):
        assert len(top) == 3
        best: Any = top[0]  # the client does not parse lists of lists
        assert (best["id"], best["logprob"]) == (token.id, pytest.approx(token.logprob))


def test_grammars(client: InferenceClient) -> None:
    year: Any = {"type": "regex", "value": "[0-9]{4}"}
    assert client.text_generation("In the year ", max_new_tokens=9, grammar=year, return_full_text=False).isdigit()
    city: Any = {"type": "json", "value": SCHEMA}
    text = client.text_generation(PROMPT, max_new_tokens=60, grammar=city, return_full_text=False)
    assert json.loads(text).keys() == {"city"}


def test_refusals_are_what_the_client_knows(client: InferenceClient) -> None:
    with pytest.raises(ValidationError, match=r"top_p.*less than 1"):
        client.text_generation(PROMPT, top_p=1.5)
    with pytest.raises(ValidationError, match=r"best_of is 2.*streamed"):
        list(client.text_generation(PROMPT, best_of=2, do_sample=True, stream=True))
    with pytest.raises(ValidationError, match="max_new_tokens is 9000"):
        client.text_generation(PROMPT, max_new_tokens=9000)


async def test_the_async_client(deployment: LocalDeployment) -> None:
    async with AsyncInferenceClient(deployment.url, timeout=240) as client:
        whole = await client.text_generation(PROMPT, max_new_tokens=8, return_full_text=False)
        stream = await client.text_generation(PROMPT, max_new_tokens=8, stream=True)
        assert "".join([text async for text in stream]) == whole
    await asyncio.to_thread(wait_until_idle, deployment)
