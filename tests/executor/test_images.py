"""Chats with images in this process: one decode worker gives the tokens of transformers, whatever happens to its blocks."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image
from transformers import PreTrainedModel

from kvrelay.common.images import ImageSpan, PromptImage, image_digest
from kvrelay.common.model_card import IMAGES_OFF
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.engine.models.hf.reading import make_reader
from kvrelay.engine.step.interface import StepRow
from kvrelay.executor import LLM, Chat, InvalidRequestError, SamplingParams
from kvrelay.executor.local import LocalBackend
from kvrelay.worker.scheduling.choice import EVERYBODY, Choice
from kvrelay.worker.scheduling.scheduler import Schedule
from tests.models import test_images as by_transformers
from tests.models.test_images import Prompt, png
from tests.models.tiny_images import save_image_model

from ..gateway.pictures import data_url

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of fields that tiny configurations lack

NUM_TOKENS = 30
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
FIRST, SECOND, THIRD = png((60, 33), 1), png((31, 60), 2), png((90, 90), 3)
SHOWN: list[tuple[str | bytes, ...]] = [
    ("what is in ", FIRST, " the picture", SECOND, " and what is not"),
    ("what is in ", FIRST, " the picture", THIRD, " and what is not"),
    (THIRD, "red green blue"),
    ("who looks at it",),
    ("what is in ", FIRST, " the picture", SECOND, " and what is not, says a user to the assistant"),
]


def chat(*parts: str | bytes) -> Chat:
    """A user's message of texts and PNG files."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return Chat([{"role": "user", "content": content}])


@dataclass
class Tiny:
    """A model on disk, and its answers by transformers."""

    directory: Path
    model: PreTrainedModel
    answers: dict[tuple[str | bytes, ...], list[int]]

    def start(self, **options: Any) -> LLM:
        return LLM(str(self.directory), **{"device": "cpu", "dtype": "float32", "threads": 1, **options})

    def expected(self, token_ids: list[int], *parts: str | bytes) -> list[int]:
        """Transformers' greedy answer to a prompt."""
        if parts not in self.answers:
            files = [part for part in parts if isinstance(part, bytes)]
            images = [PromptImage(ImageSpan(0, 1, image_digest(one)), one) for one in files]
            reader = make_reader(self.directory)
            placeholder = reader.texts([]).placeholder
            sizes = [Image.open(io.BytesIO(one)).size for one in files]
            assert token_ids.count(placeholder) == sum(one.num_placeholders for one in reader.texts(sizes).texts)
            self.answers[parts] = by_transformers.generate(self.model, reader, Prompt(token_ids, images))[0]
        return self.answers[parts]


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl", "gemma3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    """Plain positions, three axes of positions, and images that one step must compute whole."""
    directory = tmp_path_factory.mktemp(request.param)
    with torch.random.fork_rng(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_transformers, "NUM_TOKENS", NUM_TOKENS)
        yield Tiny(directory, save_image_model(request.param, directory), {})


def take_blocks_away(patch: pytest.MonkeyPatch, seed: int) -> list[int]:
    """Let sequences lose their blocks at random, and the prefix cache everything. Returns the lost numbers of computed tokens."""
    draws, lost, plainly = random.Random(seed), list[int](), DecodeScheduler.schedule

    def schedule(self: DecodeScheduler, now_s: float, choice: Choice = EVERYBODY) -> Schedule:
        plan = plainly(self, now_s, choice)
        victims = [one for one in self.running if one not in plan.admitted]
        if victims and len(lost) < 40 and draws.random() < 0.3:
            victim = draws.choice(victims)
            lost.append(victim.num_computed_tokens)
            self._held.preempt(victim, plan)
            evict_all(self._blocks)
        return plan

    def ahead(self: DecodeScheduler, flying: Sequence[StepRow]) -> Schedule | None:
        return None if draws.random() < 0.5 else plainly_ahead(self, flying)

    plainly_ahead = DecodeScheduler.ahead
    patch.setattr(DecodeScheduler, "schedule", schedule)
    patch.setattr(DecodeScheduler, "ahead", ahead)
    return lost


def evict_all(blocks: BlockManager) -> None:
    owner = Owner(OwnerKind.LEASE, "evicting")
    for count in range(blocks.num_allocatable // blocks.num_groups, 0, -1):
        if blocks.allocate(owner, count) is not None:
            return blocks.release(owner)


@pytest.mark.parametrize("speculation", ["off", "ngram", "draft-model"])
def test_answers_are_those_of_transformers(tiny: Tiny, speculation: str) -> None:
    """In chunks, side by side, from the cache, and several choices of one prompt. A draft model sees no images."""
    options: dict[str, Any] = {"run_ahead": "on", "speculation": speculation}
    if speculation == "draft-model":
        options |= {"draft_model": str(tiny.directory), "draft_kv_memory_mb": 16}
    with tiny.start(kv_memory_mb=16, max_batched_tokens=64, max_num_seqs=8, **options) as llm:
        for _ in range(2):
            outputs = llm.generate([chat(*parts) for parts in SHOWN], GREEDY)
            for output, parts in zip(outputs, SHOWN, strict=True):
                assert output.outputs[0].token_ids == tiny.expected(output.prompt_token_ids, *parts)
        assert all(output.num_cached_tokens for output in (outputs[0], outputs[-1]))
        two = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, n=2)
        (output,) = llm.generate(chat(*SHOWN[2][::-1]), two)
        wanted = tiny.expected(output.prompt_token_ids, *SHOWN[2][::-1])
        assert [one.token_ids for one in output.outputs] == [wanted] * 2


@pytest.mark.parametrize("run_ahead", ["off", "on"])
def test_sequences_that_lose_their_blocks_compute_their_images_again(
    tiny: Tiny, run_ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = take_blocks_away(monkeypatch, seed=1)
    with tiny.start(num_blocks=40, max_num_seqs=4, max_batched_tokens=64, run_ahead=run_ahead) as llm:
        outputs = llm.generate([chat(*parts) for parts in SHOWN * 2], GREEDY)
        for output, parts in zip(outputs, SHOWN * 2, strict=True):
            assert output.outputs[0].token_ids == tiny.expected(output.prompt_token_ids, *parts)
    assert len(lost) > 3


def test_a_request_that_is_aborted_leaves_nothing(tiny: Tiny) -> None:
    with tiny.start(kv_memory_mb=16, max_num_seqs=4) as llm:
        results = [llm.submit(chat(*parts), SamplingParams(max_tokens=500, ignore_eos=True)) for parts in SHOWN * 2]
        draws = random.Random(1)
        draws.shuffle(results)
        for result in results:
            result.abort()
        assert all(result.result(60).outputs[0].finish_reason == "cancelled" for result in results)
        (output,) = llm.generate(chat(*SHOWN[0]), GREEDY)
        assert output.outputs[0].token_ids == tiny.expected(output.prompt_token_ids, *SHOWN[0])
        desk = cast("LocalBackend", llm._executor._backend).worker._images
        assert (desk._files_nbytes, desk._read_nbytes) == (0, 0)
        assert llm.get_stats()["num_used_blocks"] == 0


def test_what_cannot_be_read_is_the_callers_error(tiny: Tiny) -> None:
    with (
        tiny.start(kv_memory_mb=16) as llm,
        pytest.raises(InvalidRequestError, match="cannot be read as one of PNG") as failed,
    ):
        llm.generate(chat("what is ", FIRST[:-200]), GREEDY)
    assert failed.value.param == "messages[0].content[1]"
    with tiny.start(kv_memory_mb=16, images=False) as llm, pytest.raises(InvalidRequestError, match=IMAGES_OFF):
        llm.generate(chat("what is ", FIRST), GREEDY)


def test_an_image_of_pillow_is_the_file_that_it_came_from(tiny: Tiny) -> None:
    def content(**last: Any) -> list[Any]:
        return [{"type": "text", "text": "what is "}, *chat(FIRST).messages[0]["content"], last]

    turned, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.open(io.BytesIO(THIRD)).resize((60, 30)).save(turned, "PNG", exif=exif)
    file = {"type": "image_url", "image_url": {"url": data_url(turned.getvalue())}}
    picture = {"type": "image_pil", "image_pil": Image.open(io.BytesIO(turned.getvalue()))}
    with tiny.start(kv_memory_mb=16) as llm:
        chats = [Chat([{"role": "user", "content": content(**last)}]) for last in (file, picture)]
        by_file, by_picture = llm.generate(chats, GREEDY)
        assert by_picture.prompt_token_ids == by_file.prompt_token_ids
        assert by_picture.outputs == by_file.outputs
        wrong = Chat([{"role": "user", "content": content(type="image_pil", image_pil="fox.png")}])
        with pytest.raises(
            InvalidRequestError, match=r"content\[2\].image_pil is of type str; it must be a PIL.Image.Image"
        ):
            llm.generate(wrong, GREEDY)
