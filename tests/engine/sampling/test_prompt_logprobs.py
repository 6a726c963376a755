"""Prompt log probabilities against a forward pass of transformers: whole, in chunks, after a preemption, in any
batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.engine.sampling import prompt_logprobs
from kvrelay.engine.step.interface import StepRow
from kvrelay.engine.step.sequence import Sequence
from kvrelay.engine.torch_engine import TorchEngine
from tests.engine.conftest import VOCAB, load, sequence, tokens
from tests.engine.led import step
from tests.engine.test_torch_engine import reference, run


def check(model: Any, row: Sequence, num_top: int) -> None:
    """Check that each prompt token but the first has an entry with transformers' log probabilities."""
    expected = reference(model, row.token_ids[: row.num_prompt_tokens])
    assert [entry.token_id for entry in row.prompt_logprobs] == row.token_ids[1 : row.num_prompt_tokens]
    for position, entry in enumerate(row.prompt_logprobs):
        assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=1e-3)
        top = expected[position].topk(min(num_top, VOCAB))
        assert [value for _, value in entry.top_logprobs] == pytest.approx(top.values.tolist(), abs=1e-3)
        for token_id, value in entry.top_logprobs:
            assert value == pytest.approx(float(expected[position, token_id]), abs=1e-3)


def prompt(seed: int, length: int, num_top: int, blocks: list[int]) -> Sequence:
    return sequence(tokens(seed, length), blocks, num_prompt_logprobs=num_top)


@pytest.mark.parametrize("chunks", [[300], [1, 1, 298], [16, 16, 268], [150, 149, 1], [7, 130, 163]])
def test_whole_and_in_chunks(chunks: list[int], llama: tuple[Path, Any]) -> None:
    directory, model = llama
    engine = load(directory)
    row = prompt(1, 300, 5, list(range(20)))
    for done, count in enumerate(chunks):
        run(engine, [(row, count)])
        assert len(row.prompt_logprobs) == min(sum(chunks[: done + 1]), 299)
    check(model, row, 5)
    for _ in range(3):  # decoding adds no entries
        run(engine, [(row, 1)])
    assert len(row.prompt_logprobs) == 299


def test_in_a_batch_of_prompts_and_decode_rows(llama: tuple[Path, Any]) -> None:
    directory, model = llama
    engine = load(directory)
    decode = sequence(tokens(2, 20), [0, 1, 2])
    run(engine, [(decode, 20)])
    rows = [
        prompt(3, 40, 0, [3, 4, 5]),
        sequence(tokens(4, 30), [6, 7, 8]),
        prompt(5, 1, 3, [9]),
        prompt(6, 50, 1000, [10, 11, 12, 13]),
        prompt(7, 2, 2, [14]),
    ]
    run(engine, [(rows[0], 21), (decode, 1), (rows[1], 30), (rows[2], 1), (rows[3], 33), (rows[4], 2)])
    run(engine, [(rows[3], 17), (decode, 1), (rows[0], 19)])
    for row, num_top in ((rows[0], 0), (rows[2], 3), (rows[3], 1000), (rows[4], 2)):
        check(model, row, num_top)
    assert rows[1].prompt_logprobs == []
    assert rows[2].prompt_logprobs == []
    assert rows[3].prompt_logprobs[0].top_logprobs[0][1] < 0
    assert len(rows[3].prompt_logprobs[0].top_logprobs) == VOCAB


def test_beside_a_sequence_that_shares_the_beginning(llama: tuple[Path, Any]) -> None:
    """A prefix's blocks may be shared only once its log probabilities are known."""
    directory, model = llama
    engine = load(directory)
    first = prompt(8, 70, 2, [0, 1, 2, 3, 4])
    run(engine, [(first, 70)])
    second = sequence(first.token_ids[:64] + tokens(9, 20), [5, 6, 7, 8, 9, 10], num_prompt_logprobs=2)
    assert second.num_cacheable_tokens == 0
    run(engine, [(second, 40)])
    # After a preemption the entries remain, so two of the first sequence's blocks can replace its own.
    assert second.num_cacheable_tokens == 40
    second.block_tables[0][:2] = first.block_tables[0][:2]
    second.num_computed_tokens = 32
    run(engine, [(second, 52)])
    check(model, first, 2)
    check(model, second, 2)
    assert second.num_cacheable_tokens == second.num_tokens - 1


def test_after_a_preemption_nothing_is_there_twice(llama: tuple[Path, Any]) -> None:
    directory, model = llama
    engine = load(directory)
    row = prompt(10, 60, 1, [0, 1, 2, 3])
    for count in (25, 60, 62):  # preempted within the prompt, after it, and after two output tokens
        run(engine, [(row, count if count < 60 else row.num_uncomputed_tokens)])
        if count > 60:
            run(engine, [(row, 1)])
        row.num_computed_tokens = 0
    check(model, row, 1)


def test_a_sequence_that_starts_behind_what_it_lacks_is_a_schedulers_bug(llama: tuple[Path, Any]) -> None:
    row = prompt(11, 40, 1, [0, 1, 2])
    row.num_computed_tokens = 16
    with pytest.raises(AssertionError, match="has log probabilities up to 0, computes from 16"):
        step(load(llama[0]), [StepRow(row, 24)])


def test_no_more_logits_at_a_time_than_allowed(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine: TorchEngine = load(llama[0])
    sizes: list[int] = []
    logits_of = engine._model.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return logits_of(hidden)

    monkeypatch.setattr(engine._model, "logits", watched)
    row = prompt(12, 300, 0, list(range(20)))
    run(engine, [(row, 300)])
    assert sizes == [1, prompt_logprobs._MAX_POSITIONS, prompt_logprobs._MAX_POSITIONS, 43]
    sizes.clear()
    run(engine, [(row, 1)])
    assert sizes == [1]
