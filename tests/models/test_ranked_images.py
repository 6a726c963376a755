"""Prompts with images on two ranks, of which one encodes: the tokens of transformers, and of an engine of one rank.

The ranks are processes that meet by gloo. They compute prompts in chunks, side by side, and hand them over to one rank and back.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from kvrelay.common.errors import ModelError
from kvrelay.engine.images.interface import ImageError, ReadImages
from kvrelay.engine.images.reader import ProcessorReader
from kvrelay.engine.models.hf import check_images
from kvrelay.engine.models.hf.images import Encoded, ImageEncoder
from kvrelay.engine.models.hf.ranks.cut import require_plan
from kvrelay.engine.ranks.messages import Launch
from kvrelay.engine.ranks.nodes import OtherNodes
from kvrelay.engine.step.interface import Engine, StepRow
from kvrelay.engine.step.leader import Leader
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine
from tests.engine.ranks.conftest import load_ranks
from tests.engine.ranks.test_several_nodes import others, place, running_host
from tests.ports import reserved_port

from .test_images import (
    NUM_BLOCKS,
    NUM_TOKENS,
    SIZES,
    TOLERANCE,
    Prompt,
    computed,
    generate,
    logprobs,
    prompt_of,
    reader_of,
    sequences_of,
)
from .test_kernels import Done
from .test_types import BLOCK_SIZE, engine_of
from .tiny_images import image_types, save_image_config, save_image_model

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out

# Three axes of positions with features for early layers, and tokens that see each other.
KINDS = ("qwen3_vl", "gemma3")
# Squares, tiles, rows of unequal length, three axes alone, inputs of each layer from token ids, experts, and states.
MORE = ("llava", "smolvlm", "mistral3", "qwen2_5_vl", "gemma4", "qwen3_vl_moe", "qwen3_5")
ON_TWO_NODES = "llava"
WHOLE = 400  # tokens of a chunk that has any of the prompts


@dataclass(frozen=True)
class Ranked:
    """A model on two ranks, and beside them."""

    two: Any  # the RankedEngine of a prefill worker
    one: TorchEngine  # of a decode worker
    reader: ProcessorReader
    model: PreTrainedModel
    directory: Path

    def prompts(self, sizes: Seq[Seq[tuple[int, int]]] = SIZES) -> tuple[list[Prompt], list[ReadImages]]:
        """A prompt for each list of sizes, and its images."""
        prompts = [prompt_of(self.reader, ones, seed) for seed, ones in enumerate(sizes)]
        return prompts, [self.reader.read(one.token_ids, len(one.token_ids), one.images) for one in prompts]


def two_ranks(directory: Path, nodes: OtherNodes | None = None) -> Any:
    """The engine of a prefill worker of two ranks. The caller closes it."""
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    return load_ranks(directory, 2, decodes=False, dtype="float32", nodes=nodes, **sizes)


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("TOLERANCES", {torch.float32: 0.0}, "with images the model over paged K/V is not what transformers computes"),
        pytest.param("ImageEncoder", None, "the model encodes no image alone", marks=pytest.mark.full),
    ],
)
def test_two_ranks_that_do_not_pass_the_check_serve_text(
    setting: str, value: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank alone compares, and alone encodes. This comes first, because a process is in one group at a time."""
    model = save_image_model("llava", tmp_path)
    monkeypatch.setattr(check_images, setting, value)
    monkeypatch.setattr(check_images, "_ROUNDED", 0.0)
    two = two_ranks(tmp_path)
    try:
        assert two.card.no_images.startswith(reason)
        prompt = Prompt(list(range(60, 75)), [])
        (tokens,) = computed(two, sequences_of(two, [prompt], [ReadImages((), ())]), 8, 4)
        wanted = model.generate(torch.tensor([prompt.token_ids]), do_sample=False, max_new_tokens=4, min_new_tokens=4)
        assert [one.token_id for one in tokens] == wanted[0, 15:].tolist()
    finally:
        two.close()


@pytest.fixture(scope="module", params=[*KINDS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def ranked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranked]:
    """Two ranks, of one type on two nodes, and one rank."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    model = save_image_model(request.param, directory)
    with contextlib.ExitStack() as stack:
        nodes: OtherNodes | None = None
        if request.param == ON_TWO_NODES:
            port = stack.enter_context(reserved_port("127.0.0.2"))
            stack.enter_context(running_host(place(port, 1), directory))
            nodes = others(place(port))
        two = two_ranks(directory, nodes)
        stack.callback(two.close)
        one = engine_of(directory, num_blocks=NUM_BLOCKS, model_id=directory.name)
        yield Ranked(two, one, reader_of(directory, two), model, directory)
        assert not two.not_live()


def moved(source: Engine, target: Engine, sequences: Seq[Sequence]) -> list[Sequence]:
    """The sequences on another engine, which gets their blocks block by block, and no images."""
    found = []
    for one in sequences:
        for group, table in enumerate(one.block_tables):
            for block_id in table:
                read = source.store.open_read(block_id, group)
                there = read if isinstance(read, memoryview) else read.wait(Done(), 10.0)
                assert there is not None
                target.store.open_write(block_id, group)[:] = there
                target.store.close_write(block_id)
                source.store.close_read(block_id)
        other = Sequence(one.request_id, 0, list(one.token_ids), one.num_prompt_tokens, one.sampling, 0.0)
        other.block_tables = [list(table) for table in one.block_tables]
        other.num_computed_tokens, other.position_offset = one.num_computed_tokens, one.position_offset
        found.append(other)
    return found


def test_two_ranks_generate_as_transformers(ranked: Ranked) -> None:
    """A prompt without images, one with one, and one with two. Chunks end in images, behind them, and between their tiles."""
    prompts, reads = ranked.prompts()
    assert ranked.two.card.no_images == ""
    assert ranked.two.card.layout == ranked.one.card.layout
    for chunk in (1, 8, 64):
        first = sequences_of(ranked.two, prompts, reads)
        parts = [computed(ranked.two, first, chunk, 1)]
        second = moved(ranked.two, ranked.one, first)
        parts.append(computed(ranked.one, second, 1, 4))
        parts.append(computed(ranked.two, moved(ranked.one, ranked.two, second), 1, NUM_TOKENS - 5))
        for number, prompt in enumerate(prompts):
            tokens = [token for part in parts for token in part[number]]
            token_ids, expected = generate(ranked.model, ranked.reader, prompt)
            assert [one.token_id for one in tokens] == token_ids
            found = torch.stack(list(map(logprobs, tokens)))
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_other_ranks_hear_of_positions_and_not_of_pixels(ranked: Ranked, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, reads = ranked.prompts([((60, 33),)])
    told: list[Any] = []
    tell = ranked.two._ranks.tell
    monkeypatch.setattr(ranked.two._ranks, "tell", lambda message: (told.append(message), tell(message)))
    computed(ranked.two, sequences_of(ranked.two, prompts, reads), 8, 1)
    (images,) = [join.images for message in told if isinstance(message, Launch) for join in message.plan.joins]
    assert images == msgspec.structs.replace(reads[0], inputs=())


def test_rows_are_freed_with_their_last_token_or_their_sequence(
    ranked: Ranked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first rank; the others keep none."""
    prompts, reads = ranked.prompts([(), ((60, 33), (31, 60))])
    rows: list[weakref.ref[torch.Tensor]] = []
    encode = ImageEncoder.encode

    def encoded(*args: Any) -> Encoded:
        found = encode(*args)
        rows.append(weakref.ref(found.rows))
        return found

    monkeypatch.setattr(ImageEncoder, "encode", encoded)
    text, shown = sequences_of(ranked.two, prompts, reads)
    second = reads[1].spans[1]
    begun = second.stop if reads[1].takes_whole else second.start + 1
    Leader(ranked.two).step([StepRow(shown, begun)])
    assert [one() is None for one in rows] == [True, reads[1].takes_whole]
    computed(ranked.two, [text], WHOLE, 1)
    assert [one() is None for one in rows] == [True, True]


def broken(read: ReadImages) -> ReadImages:
    """Images whose last one the encoder cannot take."""
    *others, last = read.inputs
    name = next(name for name, numbers in last.items() if numbers.dtype == "float32")
    wrong = msgspec.structs.replace(last[name], shape=(3,), data=bytes(12))
    return msgspec.structs.replace(read, inputs=(*others, {**last, name: wrong}))


def test_an_image_that_cannot_be_encoded_breaks_its_step_as_on_one_rank(ranked: Ranked) -> None:
    """The first rank finds out before the others hear of the step. So nobody waits for it, and the next step runs on all."""
    prompts, reads = ranked.prompts()
    expected = computed(ranked.two, sequences_of(ranked.two, prompts, reads), WHOLE, 1)
    num_meetings = ranked.two._group.num_meetings
    reasons = []
    for engine in (ranked.two, engine_of(ranked.directory, reads_images=True, num_blocks=NUM_BLOCKS)):
        with pytest.raises(ImageError) as error:
            computed(engine, sequences_of(engine, prompts, [*reads[:2], broken(reads[2])]), WHOLE, 1)
        reasons.append(str(error.value))
    assert reasons[0] == reasons[1]
    assert ranked.two._group.num_meetings == num_meetings
    assert not ranked.two.not_live()
    ranked.two.check_device()
    again = sequences_of(ranked.two, prompts, reads)
    again[2].token_ids[reads[2].spans[0].start] = 60
    with pytest.raises(ValueError, match=r"image 0 became \d+ rows, and has \d+ placeholders"):
        computed(ranked.two, again, WHOLE, 1)
    assert computed(ranked.two, sequences_of(ranked.two, prompts, reads), WHOLE, 1) == expected


@pytest.mark.full
def test_the_page_names_the_types_that_several_ranks_refuse(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    listed = page.partition("- **Several ranks** read images")[2].partition("\n- ")[0]
    refused = set()
    for model_type in image_types():
        save_image_config(model_type, tmp_path / model_type)
        try:
            require_plan(tmp_path / model_type, 2)
        except ModelError:
            refused.add(model_type)
    assert set(re.findall(r"`(\w+)`", listed)) == refused
