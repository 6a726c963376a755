"""Models of transformers over our Triton kernels, in their interpreter or on a GPU: softcaps, sinks, windows, unequal heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine import transformers_engine
from kvrelay.engine.backends.cuda.ops import CudaPagedOps
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine
from tests.engine.led import step

from .test_types import NUM_BLOCKS, engine_of, generate, logprobs, saved
from .test_types import PROMPTS as ALL_PROMPTS
from .tiny import VOCAB

BLOCK_SIZE = 8  # a kernel's smallest
CHUNK = 6
NUM_TOKENS = 4
PROMPTS = ALL_PROMPTS[1:]  # the interpreter is slow


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


def relayed(prefill: Run, decode: Run) -> Iterator[list[SampledToken]]:
    """``NUM_TOKENS`` tokens of all prompts: the first two by one engine, the others by another."""
    params = SamplingParams(max_tokens=100, temperature=0.0, num_logprobs=VOCAB)
    waiting = [
        Sequence(
            str(index), 1, list(prompt), len(prompt), params, 0.0, block_table=prefill.blocks(len(prompt) + NUM_TOKENS)
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
        decoding = [one for one in decoding if len(one.token_ids) < one.num_prompt_tokens + NUM_TOKENS]
    for index in range(len(PROMPTS)):
        yield prefill.outputs[str(index)] + decode.outputs[str(index)]


@pytest.mark.full
@pytest.mark.timeout(600)  # the interpreter takes half a minute for each on a quiet machine
@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss", "mimo_v2_flash"])
@pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out
def test_kernels_compute_what_transformers_does(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(model_type, tmp_path)
    is_cuda = torch.cuda.is_available()
    if not is_cuda:
        monkeypatch.setattr(transformers_engine, "_ops_on", lambda *_: CudaPagedOps)
    changes = {"block_size": BLOCK_SIZE, "device": "cuda" if is_cuda else "cpu"}
    engines = [engine_of(tmp_path, **changes) for _ in range(2)]
    outputs = relayed(*map(Run, engines))
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        expected, expected_logprobs = generate(model, prompt, NUM_TOKENS)
        assert [token.token_id for token in tokens] == expected
        torch.testing.assert_close(torch.stack(list(map(logprobs, tokens))), expected_logprobs, atol=2e-4, rtol=2e-4)
