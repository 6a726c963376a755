"""Two types of model that read images, through `kvrelay local`: real processes, files and HTTP, and transformers beside them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import torch
from transformers import PreTrainedModel

from kvrelay.common.images import ImageSpan, PromptImage, image_digest
from kvrelay.engine.images.files import decoded
from kvrelay.engine.images.reader import ProcessorReader
from kvrelay.engine.models.hf.reading import make_reader
from kvrelay.launcher.client import counter_values
from kvrelay.launcher.local.deployment import LocalDeployment
from kvrelay.launcher.settings import LocalSettings
from tests.models.test_images import NUM_TOKENS, Prompt, generate, png
from tests.models.tiny_images import save_image_model

from .conftest import wait_until_idle

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # transformers warns of fields that tiny configurations lack
]
FIRST, SECOND = png((60, 33), 1), png((31, 60), 2)
QUESTION = ("what is in ", FIRST, " the picture", SECOND, " and what is not")


@dataclass(frozen=True)
class Served:
    """A deployment, and its model in this process."""

    deployment: LocalDeployment
    model: PreTrainedModel
    reader: ProcessorReader

    def expected(self, *parts: str | bytes) -> tuple[list[int], list[int]]:
        """The tokens of a user's message of texts and files, and transformers' greedy answer."""
        files = [part for part in parts if isinstance(part, bytes)]
        shown = iter(self.reader.process([decoded(one, 0)])[1][0] for one in files)
        between = "<|vision_start|>%s<|vision_end|>" if "qwen" in self.model.config.model_type else "%s"
        texts = [between % next(shown) if isinstance(part, bytes) else part for part in parts]
        ids = self.reader.tokens_of(f"<user>{''.join(texts)}<eos><assistant>")
        images = [PromptImage(ImageSpan(0, 1, image_digest(one)), one) for one in files]
        return ids, generate(self.model, self.reader, Prompt(ids, images))[0]

    def handed_over(self) -> float:
        """Verified hand-offs so far."""
        decode = self.deployment.admin_urls["decode-0"]
        return sum(counter_values(decode, "kvrelay_handoffs_total", {"outcome": "verified"}))


@contextmanager
def serving(model_type: str, directory: Path, **options: Any) -> Iterator[Served]:
    """A deployment of a tiny model of this type."""
    model = save_image_model(model_type, directory)
    settings = LocalSettings.of(
        model=str(directory),
        port=0,
        device="cpu",
        dtype="float32",
        threads=1,
        kv_memory_mb=16,
        room_timeout_s=120,
        **options,
    )
    with torch.random.fork_rng(), LocalDeployment.from_settings(settings, directory) as deployment:
        deployment.wait_ready(timeout_s=180)
        yield Served(deployment, model, make_reader(directory))
        wait_until_idle(deployment)


@pytest.fixture(
    scope="module",
    params=[
        ("qwen2_5_vl", 1),
        *(pytest.param(one, marks=pytest.mark.full) for one in (("smolvlm", 1), ("qwen2_5_vl", 2))),
    ],
    ids=lambda param: "-".join(map(str, param)),
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A gateway, one prefill worker and one decode worker, of one rank or two each."""
    model_type, num_ranks = request.param
    directory = tmp_path_factory.mktemp(model_type)
    ranks = {"prefill_tensor_parallel": num_ranks, "decode_tensor_parallel": num_ranks}
    with serving(model_type, directory, **ranks) as found:
        yield found


def in_base64(file: bytes) -> str:
    return base64.b64encode(file).decode()


def openai_parts(*parts: str | bytes) -> list[Any]:
    """A message's content in the form of OpenAI's chats."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{in_base64(part)}"}}
        for part in parts
    ]


def test_answers_are_those_of_transformers(served: Served) -> None:
    """Also of the same texts with other images, and again, when the prompt is cached."""
    before = served.handed_over()
    require_answers_of_transformers(served)
    assert served.handed_over() - before == 3


def test_a_decode_worker_alone_gives_the_answers_of_transformers(tmp_path: Path) -> None:
    with serving("gemma3", tmp_path, prefill=0) as alone:
        require_answers_of_transformers(alone)
        url = f"{alone.deployment.url}/v1/chat/completions"
        content = openai_parts("what is in ", FIRST[:-200])
        answer = httpx.post(url, json={"messages": [{"role": "user", "content": content}]}, timeout=60)
        assert answer.status_code == 400, answer.text
        assert "messages[0].content[1] cannot be read as one of PNG" in answer.text


def require_answers_of_transformers(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.deployment.url}/v1", api_key="unused", max_retries=0) as client:
        name = client.models.list().data[0].id
        cached: list[int] = []
        for parts in (QUESTION, (*QUESTION[:3], FIRST, QUESTION[4]), QUESTION):
            answer = client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": openai_parts(*parts)}],
                max_tokens=NUM_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            ids, tokens = served.expected(*parts)
            extra = answer.choices[0].model_extra
            assert extra is not None
            assert extra["token_ids"] == tokens
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(ids)
            assert answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        assert cached[2] > cached[1] > cached[0] == 0


def test_other_apis_take_the_same_images(served: Served) -> None:
    ids, _ = served.expected(*QUESTION)
    url = served.deployment.url
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        name = client.models.list().data[0].id
        content: list[Any] = [
            {"type": "input_text", "text": part}
            if isinstance(part, str)
            else {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{in_base64(part)}"}
            for part in QUESTION
        ]
        response = client.responses.create(
            model=name, input=[{"role": "user", "content": content}], max_output_tokens=8
        )
        assert response.usage is not None
        assert response.usage.input_tokens == len(ids)
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0) as claude:
        blocks: list[Any] = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": in_base64(part)}}
            for part in QUESTION
        ]
        told = claude.messages.count_tokens(model=name, messages=[{"role": "user", "content": blocks}])
        message = claude.messages.create(model=name, max_tokens=8, messages=[{"role": "user", "content": blocks}])
        assert told.input_tokens == message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
