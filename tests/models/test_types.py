"""Every type of transformers that generates text: the same tokens as its own ``generate``, or a refusal by name.

Prompts of unequal length are computed in chunks by one engine, which also decodes others meanwhile; their blocks are handed over,
byte by byte, to another engine, which goes on with all of them in one batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvrelay.common.errors import ModelError
from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.backends.options import EngineOptions
from kvrelay.engine.outline import outline_model
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.engine.transformers_engine import load_transformers_engine
from tests.engine.led import step

from .tiny import VOCAB, NotTinyError, generate, text_types, tiny_model

# One of each kind: windows, softcaps, sinks, experts, latent attention, unequal layers, learned positions, parallel layers, a
# state.
_ALIKE = "llama gemma2 gemma4_text gpt_oss qwen3_moe deepseek_v3 mimo_v2_flash gpt2 cohere2 opt mamba2"
ALIKE = frozenset(_ALIKE.split())
_NATIVE = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"})
_PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
_LISTED = (
    _PAGE.partition("## Types that run through transformers")[2]
    .partition("## What is refused")[0]
    .rpartition("\n\n`")[2]
)
EQUAL = frozenset(re.findall(r"[a-z0-9_-]+", _LISTED)) | _NATIVE
_NOT_TINY = """
blenderbot blt cohere_compass_text dbrx dots3_note dots3_note_text emu3 falcon gemma3 gemma3n gemma4 gemma4_assistant
gemma4_unified gemma4_unified_assistant git got_ocr2 lfm2_moe llama4 mllama moss_transcribe_diarize musicgen
musicgen_melody phi4_multimodal plbart prophetnet qwen3_5 qwen3_5_moe qwen4_exp qwen4_exp_text reformer roc_bert
whisper xlnet zamba2 zaya
"""
NOT_TINY = frozenset(_NOT_TINY.split())

BLOCK_SIZE = 4
NUM_BLOCKS = 96
NUM_TOKENS = 8
CHUNK = 6
_GENERATOR = torch.Generator().manual_seed(2)
PROMPTS = [torch.randint(3, VOCAB, (count,), generator=_GENERATOR).tolist() for count in (5, 13, 22)]


def engine_of(directory: Path, **changes: Any) -> TorchEngine:
    """Over a small pool, in float32."""
    chosen: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    options = EngineOptions(model_dir=directory, model_id="tiny", **(chosen | changes))
    return load_transformers_engine(options, lambda done, total: None)


def saved(model_type: str, directory: Path) -> transformers.PreTrainedModel:
    """A tiny model of the type, saved. Raises NotTinyError."""
    model = tiny_model(model_type)
    model.save_pretrained(directory)
    return model


def logprobs(token: SampledToken) -> torch.Tensor:
    """In vocabulary order."""
    dense = torch.full((VOCAB,), -math.inf)
    for token_id, value in token.top_logprobs:
        dense[token_id] = value
    return dense


class Run:
    """Sequences on an engine, as a scheduler moves them on."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.block_size = engine.card.layout.block_size
        self._free = list(torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist())
        self.outputs: dict[str, list[SampledToken]] = {}

    def blocks(self, num_tokens: int) -> list[int]:
        """Blocks that nobody else has."""
        return [self._free.pop() for _ in range(-(-num_tokens // self.block_size))]

    def step(self, sequences: list[Sequence]) -> None:
        """One step of a chunk, or a token, each."""
        rows = [StepRow(one, min(CHUNK, one.num_uncomputed_tokens)) for one in sequences]
        for row, token in zip(rows, step(self.engine, rows), strict=True):
            row.sequence.num_computed_tokens += row.num_tokens
            if token is not None:
                row.sequence.token_ids.append(token.token_id)
                self.outputs.setdefault(row.sequence.request_id, []).append(token)


class Done:
    """A reader that reads at once."""

    is_done = True


def handed_over(sequence: Sequence, source: Run, target: Run) -> Sequence:
    """The sequence on another engine, which has the bytes of its blocks."""
    blocks = target.blocks(len(sequence.block_table) * target.block_size)
    for there, here in zip(sequence.block_table, blocks, strict=True):
        read = source.engine.store.open_read(there)
        view = read if isinstance(read, memoryview) else read.wait(Done(), 10.0)
        assert view is not None, f"no staging memory for block {there}"
        target.engine.store.open_write(here)[:] = view
        target.engine.store.close_write(here)
        source.engine.store.close_read(there)
    moved = Sequence(sequence.request_id, 2, list(sequence.token_ids), sequence.num_prompt_tokens, sequence.sampling, 0.0,
                     block_table=blocks)  # fmt: skip
    moved.num_computed_tokens = sequence.num_computed_tokens
    return moved


def relayed(prefill: Run, decode: Run, num_tokens: int = NUM_TOKENS) -> Iterator[list[SampledToken]]:
    """``num_tokens`` tokens of all prompts: the first two by one engine, the others by another."""
    params = SamplingParams(max_tokens=100, temperature=0.0, num_logprobs=VOCAB)
    waiting = [
        Sequence(
            str(index), 1, list(prompt), len(prompt), params, 0.0, block_table=prefill.blocks(len(prompt) + num_tokens)
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    computing: list[Sequence] = []
    decoding: list[Sequence] = []
    while waiting or computing:  # one begins after the other, so that chunks and single tokens share steps
        computing += waiting[:1]
        waiting = waiting[1:]
        prefill.step(computing)
        done = [one for one in computing if len(one.token_ids) == one.num_prompt_tokens + 2]
        decoding += [handed_over(one, prefill, decode) for one in done]
        computing = [one for one in computing if one not in done]
    while decoding:
        decode.step(decoding)
        decoding = [one for one in decoding if len(one.token_ids) < one.num_prompt_tokens + num_tokens]
    for index in range(len(PROMPTS)):
        yield prefill.outputs[str(index)] + decode.outputs[str(index)]


def cases() -> list[Any]:
    """All types; but one of each kind is for make test-all."""
    return [name if name in ALIKE else pytest.param(name, marks=pytest.mark.full) for name in text_types()]


@pytest.mark.parametrize("model_type", cases())
@pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
def test_a_type_generates_as_transformers_or_is_refused(model_type: str, tmp_path: Path) -> None:
    try:
        model = saved(model_type, tmp_path)
    except NotTinyError:
        assert model_type in NOT_TINY
        return
    if model_type not in EQUAL:
        with pytest.raises(ModelError, match=r"not served|served yet|cannot be loaded"):
            engine_of(tmp_path)
        return
    prefill, decode = engine_of(tmp_path), engine_of(tmp_path)
    outline = outline_model(tmp_path, "transformers", BLOCK_SIZE)
    assert outline.geometry == prefill.card.layout.geometry
    assert outline.num_parameters == model.num_parameters()
    outputs = relayed(Run(prefill), Run(decode))
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        expected, expected_logprobs = generate(model, prompt, NUM_TOKENS)
        assert [token.token_id for token in tokens] == expected
        torch.testing.assert_close(torch.stack(list(map(logprobs, tokens))), expected_logprobs, atol=2e-4, rtol=2e-4)
