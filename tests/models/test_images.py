"""Prompts with images: tokens and log probabilities of transformers' own ``generate``, over two engines, one without towers.

The first engine computes prompts with no image, one, and two of different sizes, in chunks and side by side. The second one gets
the blocks and an offset of positions, and generates for all prompts in one batch.
"""

from __future__ import annotations

import inspect
import io
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kvrelay.common.block_hash import HashChain
from kvrelay.common.errors import ModelError
from kvrelay.common.images import ImageSpan, PromptImage, image_digest
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.backends.cpu.ops import CpuPagedOps
from kvrelay.engine.config.model import needs_transformers, read_config
from kvrelay.engine.factory import load_images
from kvrelay.engine.images.files import decoded
from kvrelay.engine.images.interface import ReadImages
from kvrelay.engine.images.reader import ProcessorReader, numbers_of, tensor_of
from kvrelay.engine.kv.geometry import geometry_of
from kvrelay.engine.kv.pool import KvPool
from kvrelay.engine.models.hf import check as check_module
from kvrelay.engine.models.hf.check_images import check_images, encode_check, plain_image_logits
from kvrelay.engine.models.hf.loading import load_model
from kvrelay.engine.models.hf.reading import make_reader
from kvrelay.engine.settings import FakeSettings, ModelSettings
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine

from .test_types import BLOCK_SIZE, engine_of, saved
from .tiny import MORE
from .tiny_image_kinds import TORCHVISION_KINDS, VOCAB
from .tiny_images import image_types, save_image_model

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out

# One type of each kind: tiles, squares, rows of unequal length, three axes of positions, features for several layers, states, and
# tokens that see each other.
ALIKE = frozenset({"smolvlm", "llava", "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3"})
NUM_TOKENS = 10
NUM_BLOCKS = 400
SIZES = ((), ((60, 33),), ((31, 60), (90, 90)))  # of the images of three prompts
TOLERANCE = 3e-4


@dataclass(frozen=True)
class Prompt:
    """Tokens, and the files in their places."""

    token_ids: list[int]
    images: list[PromptImage]


def png(size: tuple[int, int], seed: int) -> bytes:
    """A file with random pixels."""
    pixels = torch.randint(256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    written = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(written, format="PNG")
    return written.getvalue()


def prompt_of(reader: ProcessorReader, sizes: Seq[tuple[int, int]], seed: int) -> Prompt:
    """A prompt with images of these sizes between random tokens, as a gateway makes it."""
    told = reader.texts(sizes)
    generator = torch.Generator().manual_seed(seed)

    def text() -> list[int]:
        return torch.randint(50, VOCAB, (5 + seed,), generator=generator).tolist()  # no special tokens

    token_ids, images = text(), []
    for number, (size, one) in enumerate(zip(sizes, told.texts, strict=True)):
        tokens = reader.tokens_of(one.text)
        places = [place for place, token in enumerate(tokens, len(token_ids)) if token == told.placeholder]
        assert len(places) == one.num_placeholders > 0
        data = png(size, seed + number)
        images.append(PromptImage(ImageSpan(places[0], places[-1] + 1, image_digest(data)), data))
        token_ids += tokens + text()
    return Prompt(token_ids, images)


def reader_of(directory: Path, engine: TorchEngine) -> ProcessorReader:
    """As a worker gets it."""
    reader = load_images(ModelSettings(model=str(directory)), FakeSettings(), engine.card)
    assert isinstance(reader, ProcessorReader), engine.card.no_images
    return reader


@torch.inference_mode()
def generate(model: PreTrainedModel, reader: ProcessorReader, prompt: Prompt) -> tuple[list[int], torch.Tensor]:
    """A greedy continuation by transformers, and its log probabilities ``[NUM_TOKENS, vocab]``."""
    inputs: dict[str, Any] = {}
    input_ids = torch.tensor([prompt.token_ids])
    if prompt.images:
        inputs, _ = reader.process([decoded(image.data, 0) for image in prompt.images])
        takes = inspect.signature(model.forward).parameters
        is_image = (input_ids == reader.texts([]).placeholder).long()
        inputs |= {name: is_image for name in ("mm_token_type_ids", "token_type_ids") if name in takes}
    output = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, pad_token_id=0, max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS, return_dict_in_generate=True, output_logits=True, **inputs,
    )  # fmt: skip
    logprobs = torch.log_softmax(torch.cat(output.logits).float(), dim=-1)
    return output.sequences[0, len(prompt.token_ids) :].tolist(), logprobs


def sequences_of(engine: TorchEngine, prompts: Seq[Prompt], reads: Seq[ReadImages]) -> list[Sequence]:
    """Sequences with blocks of their own for all tokens."""
    num_groups = len(engine.card.layout.geometry.groups)
    free = iter(torch.randperm(NUM_BLOCKS * num_groups, generator=torch.Generator().manual_seed(5)).tolist())
    found = []
    for number, (prompt, read) in enumerate(zip(prompts, reads, strict=True)):
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, num_logprobs=VOCAB)
        one = Sequence(str(number), 0, list(prompt.token_ids), len(prompt.token_ids), sampling, 0.0, images=read)
        num_blocks = -(-(len(prompt.token_ids) + NUM_TOKENS) // BLOCK_SIZE)
        one.block_tables = [[next(free) for _ in range(num_blocks)] for _ in range(num_groups)]
        one.position_offset = read.position_offset
        found.append(one)
    return found


def computed(engine: TorchEngine, sequences: Seq[Sequence], chunk: int, num_tokens: int) -> list[list[SampledToken]]:
    """``num_tokens`` more tokens of each sequence, whose prompts are computed side by side, ``chunk`` tokens at a time."""
    leader, found = Leader(engine), [[] for _ in sequences]  # type: tuple[Leader, list[list[SampledToken]]]
    while any(len(one) < num_tokens for one in found):
        rows = []
        for place, sequence in enumerate(sequences):
            end = min(sequence.num_computed_tokens + chunk, sequence.num_tokens)
            if sequence.images is not None and sequence.images.takes_whole:
                end = max((span.stop for span in sequence.images.spans if span.start < end < span.stop), default=end)
            if len(found[place]) < num_tokens:
                rows.append(StepRow(sequence, end - sequence.num_computed_tokens))
        for row, result in zip(rows, leader.step(rows), strict=True):
            row.sequence.num_computed_tokens += row.num_tokens
            for token in result.tokens:
                row.sequence.append(token, engine.card.max_model_len)
                found[sequences.index(row.sequence)].append(token)
    return found


def handed_over(prefill: TorchEngine, decode: TorchEngine, sequences: Seq[Sequence]) -> list[Sequence]:
    """The sequences on another engine, which gets their blocks and no images."""
    decode.blocks.copy_(prefill.blocks)
    found = []
    for one in sequences:
        other = Sequence(one.request_id, 0, list(one.token_ids), one.num_prompt_tokens, one.sampling, 0.0)
        other.block_tables = [list(table) for table in one.block_tables]
        other.num_computed_tokens, other.position_offset = one.num_computed_tokens, one.position_offset
        found.append(other)
    return found


def logprobs(token: SampledToken) -> torch.Tensor:
    """A token's log probabilities in vocabulary order."""
    dense = torch.full((VOCAB,), -math.inf)
    for token_id, value in token.top_logprobs:
        dense[token_id] = value
    return dense


def answers(prefill: TorchEngine, decode: TorchEngine, prompts: Seq[Prompt], reads: Seq[ReadImages], chunk: int) -> Any:
    """For each prompt its tokens, and their log probabilities ``[NUM_TOKENS, vocab]``."""
    first = sequences_of(prefill, prompts, reads)
    begun = computed(prefill, first, chunk, 1)
    rest = computed(decode, handed_over(prefill, decode, first), 1, NUM_TOKENS - 1)
    outputs = [one + two for one, two in zip(begun, rest, strict=True)]
    return [([one.token_id for one in tokens], torch.stack(list(map(logprobs, tokens)))) for tokens in outputs]


def cases() -> list[Any]:
    """All types that read images. Those outside ``ALIKE`` run in make test-all only."""
    lacks = pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not installed")
    return [
        name if name in ALIKE else pytest.param(name, marks=[pytest.mark.full, *[lacks] * (name in TORCHVISION_KINDS)])
        for name in image_types()
    ]


@pytest.mark.parametrize("model_type", cases())
def test_a_type_generates_as_transformers(model_type: str, tmp_path: Path) -> None:
    model = save_image_model(model_type, tmp_path)
    prefill = engine_of(tmp_path, reads_images=True, num_blocks=NUM_BLOCKS)
    decode = engine_of(tmp_path, num_blocks=NUM_BLOCKS)
    assert decode.card.no_images == "decode workers read images only with --images"
    assert decode.card.layout == prefill.card.layout
    reader = reader_of(tmp_path, prefill)
    prompts = [prompt_of(reader, sizes, seed) for seed, sizes in enumerate(SIZES)]
    reads = [reader.read(prompt.token_ids, len(prompt.token_ids), prompt.images) for prompt in prompts]
    wanted = [generate(model, reader, prompt) for prompt in prompts]
    for chunk in (8, 64):
        for found, expected in zip(answers(prefill, decode, prompts, reads, chunk), wanted, strict=True):
            assert found[0] == expected[0]
            torch.testing.assert_close(found[1], expected[1], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.full
def test_images_are_read_beside_mistral_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Mistral Small 4. Keys and values are full, as transformers expands them."""
    monkeypatch.setitem(MORE, "mistral", {**MORE["mistral4"], "model_type": "mistral4"})
    test_a_type_generates_as_transformers("mistral3", tmp_path)
    assert read_config(tmp_path)["text_config"]["model_type"] == "mistral4"
    assert needs_transformers("auto", tmp_path)


def test_images_of_a_single_token_are_encoded_alone(tmp_path: Path) -> None:
    model = save_image_model("mistral3", tmp_path)  # transformers' own code for it fails with one such image
    engine = engine_of(tmp_path, reads_images=True, num_blocks=NUM_BLOCKS)
    reader = reader_of(tmp_path, engine)
    prompt = prompt_of(reader, [(24, 24), (15, 17)], 1)
    assert all(one.span.stop == one.span.start + 1 for one in prompt.images)
    read = reader.read(prompt.token_ids, len(prompt.token_ids), prompt.images)
    ((found, _),) = answers(engine, engine_of(tmp_path, num_blocks=NUM_BLOCKS), [prompt], [read], 8)
    assert found == generate(model, reader, prompt)[0]


class PlayedRanks:
    """Collectives of ranks, the others of which say ``number``."""

    def __init__(self, number: int) -> None:
        self._number = number

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """As if the others had added nothing."""
        return partial

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def least(self, number: int) -> int:
        return min(number, self._number)


def test_images_may_be_a_little_farther_off_than_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_image_model("llava", tmp_path)
    dtype = torch.bfloat16
    model, reader = load_model(tmp_path, dtype, torch.device("cpu"), with_towers=True), make_reader(tmp_path)
    plain = plain_image_logits(model, reader)
    one_block = KvPool(geometry_of(model.shape, BLOCK_SIZE, dtype), 1, torch.device("cpu"))
    model.bind(CpuPagedOps(model.shape, one_block.tensor), dtype)
    encode_check(model, plain, reader)

    def check(of_text: float, ranks: Any = None) -> float:
        return check_images(model, plain, lambda shape, pool, *_: CpuPagedOps(shape, pool), dtype, of_text, ranks)

    distance = check(0.0)
    assert distance > 0
    monkeypatch.setitem(check_module.TOLERANCES, dtype, distance / 1.2)
    assert check(distance / 1.2) == distance
    with pytest.raises(ModelError, match="with images the model over paged K/V is not what transformers computes"):
        check(distance / 2)
    with pytest.raises(ModelError, match=r"does not run with images over paged K/V \(another rank failed\)"):
        check(distance, PlayedRanks(0))
    assert check(distance, PlayedRanks(1)) == distance


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TorchEngine, ProcessorReader]:
    """An engine and its reader."""
    directory = tmp_path_factory.mktemp("model")
    save_image_model(request.param, directory)
    engine = engine_of(directory, reads_images=True, num_blocks=NUM_BLOCKS)
    return engine, reader_of(directory, engine)


def first_logprobs(engine: TorchEngine, reader: ProcessorReader, prompt: Prompt) -> torch.Tensor:
    """The log probabilities of the token behind a prompt."""
    read = reader.read(prompt.token_ids, len(prompt.token_ids), prompt.images)
    ((token,),) = computed(engine, sequences_of(engine, [prompt], [read]), 8, 1)
    return logprobs(token)


def test_other_pixels_give_other_answers_and_other_blocks(pair: tuple[TorchEngine, ProcessorReader]) -> None:
    prompt = prompt_of(pair[1], [(60, 33)], 1)
    data = png((60, 33), 77)
    span = prompt.images[0].span
    other = Prompt(prompt.token_ids, [PromptImage(ImageSpan(span.start, span.stop, image_digest(data)), data)])
    again = first_logprobs(*pair, prompt)
    torch.testing.assert_close(first_logprobs(*pair, prompt), again, rtol=0, atol=0)
    assert (first_logprobs(*pair, other) - again).abs().max() > 0.01
    chains = [HashChain(b"", BLOCK_SIZE, images=[one.images[0].span]) for one in (prompt, other)]
    first, second = (chain.hashes_of_all(prompt.token_ids) for chain in chains)
    before = span.start // BLOCK_SIZE
    assert first[:before] == second[:before]
    assert not set(first[before:]) & set(second[before:])


def test_a_prompt_continues_in_the_middle_of_an_image(pair: tuple[TorchEngine, ProcessorReader]) -> None:
    engine, reader = pair
    prompt = prompt_of(reader, [(90, 90), (31, 60)], 1)
    read = reader.read(prompt.token_ids, len(prompt.token_ids), prompt.images)
    (one,) = sequences_of(engine, [prompt], [read])
    ((wanted,),) = computed(engine, [one], 8, 1)
    for span in read.spans:
        (again,) = sequences_of(engine, [prompt], [read])
        again.num_computed_tokens = span.start + 1
        ((token,),) = computed(engine, [again], 64, 1)
        torch.testing.assert_close(logprobs(token), logprobs(wanted), atol=TOLERANCE, rtol=TOLERANCE)


def test_an_image_that_does_not_fit_its_rows_breaks_the_step_alone(pair: tuple[TorchEngine, ProcessorReader]) -> None:
    engine, reader = pair
    prompt = prompt_of(reader, [(60, 33)], 1)
    read = reader.read(prompt.token_ids, len(prompt.token_ids), prompt.images)
    (one,) = sequences_of(engine, [prompt], [read])
    one.token_ids[read.spans[0].start] = 60
    with pytest.raises(ValueError, match=r"image 0 became \d+ rows, and has \d+ placeholders"):
        computed(engine, [one], 8, 1)
    assert torch.isfinite(first_logprobs(engine, reader, prompt)).any()


def refused(directory: Path) -> str:
    """Why an engine reads no images; it serves text."""
    engine = engine_of(directory, reads_images=True)
    assert load_images(ModelSettings(model=str(directory)), FakeSettings(), engine.card) is None
    return engine.card.no_images


def test_a_checkpoint_that_cannot_read_images_serves_text(tmp_path: Path) -> None:
    save_image_model("llava", tmp_path)
    digest = engine_of(tmp_path).card.layout.weights_digest
    held = load_file(tmp_path / "model.safetensors")
    text = {name: one for name, one in held.items() if "vision_tower" not in name}
    save_file(text, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "are missing for LlavaForConditionalGeneration" in refused(tmp_path)
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = tmp_path / "preprocessor_config.json"
    config.write_text(config.read_text().replace("28", "56"))
    assert "the model does not run with images (" in refused(tmp_path)
    assert engine_of(tmp_path).card.layout.weights_digest != digest, "K/V of images depend on how they are prepared"
    config.unlink()
    (tmp_path / "processor_config.json").unlink()
    assert refused(tmp_path) == f"{tmp_path} has no preprocessor_config.json, which says how images are prepared"


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_type_that_torchvision_is_needed_for_serves_text(tmp_path: Path) -> None:
    saved("cohere2_vision", tmp_path, vocab_size=VOCAB)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Cohere2VisionImageProcessor"}')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        save_image_model("llava", tmp_path / "other")
        (tmp_path / name).write_bytes((tmp_path / "other" / name).read_bytes())
    assert "orchvision" in refused(tmp_path)


def test_other_models_say_why_they_read_no_images(tmp_path: Path) -> None:
    saved("gemma2", tmp_path)
    assert refused(tmp_path) == "the model reads text only"


def test_numbers_come_back() -> None:
    for tensor in (torch.rand(2, 3), torch.arange(4), torch.tensor([True, False])):
        torch.testing.assert_close(tensor_of(numbers_of(tensor)), tensor, rtol=0, atol=0)
