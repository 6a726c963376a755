"""Beam searches on the real engine find the beams of transformers: alone, in a mixed batch, preempted, handed over or not."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvrelay.common.sampling import BeamSearch, SamplingParams
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.launcher.models import resolve_model
from tests.decode_worker.rig import Rig, greedy
from tests.engine.conftest import SIZES, VOCAB, load, save_model, tokens

ONE_STOP = (2,)
MANY_STOPS = tuple(range(0, VOCAB, 9))  # many stop tokens, so that beams end at all lengths
EARLY: dict[bool | None, bool | str] = {True: True, False: False, None: "never"}
PROMPT_LEN = 19


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchEngine, Any]:
    """Our engine in fp32 and transformers' model."""
    directory = tmp_path_factory.mktemp("llama")
    model = save_model(directory, transformers.LlamaConfig(**SIZES))
    return load(directory, dtype="float32"), model


def search(width: int, stops: Seq[int] = MANY_STOPS, max_tokens: int = 20, **options: Any) -> SamplingParams:
    params = BeamSearch(width=width, num_return=width, **options)
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=tuple(stops), beam_search=params)


def reference(model: Any, prompt: list[int], sampling: SamplingParams) -> tuple[list[list[int]], list[float]]:
    """transformers' beams and their scores, best first."""
    params = sampling.beam_search
    assert params is not None
    stops = list(sampling.stop_token_ids)
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            num_beams=params.width,
            num_return_sequences=params.num_return,
            max_new_tokens=sampling.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=EARLY[params.early_stopping],
            eos_token_id=stops,
            pad_token_id=stops[0],
            return_dict_in_generate=True,
            output_scores=True,
        )
    outputs = [row[len(prompt) :] for row in found.sequences.tolist()]
    ends = [next((index + 1 for index, token in enumerate(row) if token in stops), len(row)) for row in outputs]
    return [row[:end] for row, end in zip(outputs, ends, strict=True)], found.sequences_scores.tolist()


@pytest.mark.parametrize(  # every width with every way to stop; test_search.py has all settings of a search
    ("width", "length_penalty", "early_stopping"),
    [
        (2, -1.0, True), (2, 1.0, False), (2, 2.0, None), (4, 0.0, True), (4, 0.5, False), (4, -1.0, None),
        (8, 1.0, True), (8, 2.0, False), (8, 0.5, None),
    ],
)  # fmt: skip
def test_beams_and_scores_are_those_of_transformers(
    tiny: tuple[TorchEngine, Any], width: int, length_penalty: float, early_stopping: bool | None
) -> None:
    engine, model = tiny
    rig = Rig(engine, max_num_seqs=16)
    for index, stops in enumerate((ONE_STOP, MANY_STOPS)):
        sampling = search(width, stops, length_penalty=length_penalty, early_stopping=early_stopping)
        prompt = tokens(width + index, PROMPT_LEN)
        beams, scores = reference(model, prompt, sampling)
        rig.local("local", prompt, sampling)
        assert rig.run()["local"] == beams
        assert [beam.score for beam in rig.beams["local"]] == pytest.approx(scores, abs=1e-3)
        assert rig.add("handed", prompt, sampling)
        assert rig.run()["handed"] == beams


@pytest.mark.parametrize("early_stopping", [True, False, None])
def test_one_beam_is_greedy(tiny: tuple[TorchEngine, Any], early_stopping: bool | None) -> None:
    rig, prompt = Rig(tiny[0]), tokens(1, PROMPT_LEN)
    stops = tuple(range(0, VOCAB, 20))
    rig.local("beam", prompt, search(1, stops, 40, early_stopping=early_stopping))
    rig.local("greedy", prompt, SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=stops))
    results = rig.run()
    assert results["beam"] == [results["greedy"]]
    assert len(results["greedy"]) < 40


def test_the_best_few_are_returned_with_log_probabilities(tiny: tuple[TorchEngine, Any]) -> None:
    engine, model = tiny
    rig, prompt = Rig(engine), tokens(5, PROMPT_LEN)
    sampling = SamplingParams(
        max_tokens=8,
        temperature=0.0,
        stop_token_ids=MANY_STOPS,
        num_logprobs=3,
        beam_search=BeamSearch(width=4, num_return=2, length_penalty=0.0),
    )
    rig.local("a", prompt, sampling)
    assert rig.run()["a"] == reference(model, prompt, sampling)[0]
    for beam in rig.beams["a"]:
        assert sum(token.logprob or 0.0 for token in beam.tokens) == pytest.approx(beam.score, abs=1e-4)
        token_ids = [*prompt, *(token.token_id for token in beam.tokens)]
        with torch.no_grad():
            log_probs = torch.log_softmax(model(torch.tensor([token_ids])).logits[0].float(), dim=-1)
        for index, token in enumerate(beam.tokens):
            row = log_probs[len(prompt) + index - 1]
            assert token.logprob == pytest.approx(row[token.token_id].item(), abs=1e-3)
            assert [value for _, value in token.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)


def everything() -> dict[str, tuple[list[int], SamplingParams]]:
    """Searches of four widths and three ordinary sequences."""
    wanted = {f"b{width}": (tokens(width, PROMPT_LEN + width), search(width)) for width in (1, 2, 4, 8)}
    return wanted | {f"g{index}": (tokens(20 + index, 5 + 7 * index), greedy(20)) for index in range(3)}


def test_different_widths_and_ordinary_sequences_in_one_batch_are_as_alone(tiny: tuple[TorchEngine, Any]) -> None:
    engine, model = tiny
    together = Rig(engine, max_num_seqs=18)
    for index, (name, (prompt, sampling)) in enumerate(everything().items()):
        if index % 2:
            assert together.add(name, prompt, sampling)
        else:
            together.local(name, prompt, sampling)
    results = together.run()
    assert together.most_running > 12
    for name, (prompt, sampling) in everything().items():
        alone = Rig(engine)
        alone.local(name, prompt, sampling)
        assert alone.run()[name] == results[name], name
        if sampling.num_sequences > 1:
            assert results[name] == reference(model, prompt, sampling)[0], name


@pytest.mark.parametrize("num_steps", [4, 17])
def test_a_preempted_search_finds_the_same_beams(tiny: tuple[TorchEngine, Any], num_steps: int) -> None:
    """A lease takes all free blocks, step by step, until the search is preempted. The search still finds the same beams."""
    engine, model = tiny
    prompt, sampling = tokens(9, PROMPT_LEN), search(4, ONE_STOP)
    rig = Rig(engine, num_blocks=12)
    rig.local("a", prompt, sampling)
    for _ in range(num_steps):
        rig.step()
    lease = Owner(OwnerKind.LEASE, "x")
    for _ in range(20):
        if rig.blocks.num_allocatable and not rig.num_preemptions:
            rig.blocks.release(lease)
            rig.blocks.allocate(lease, rig.blocks.num_allocatable)
        if rig.num_preemptions or not rig.scheduler.running:
            break
        rig.step()
    rig.blocks.release(lease)
    assert rig.run()["a"] == reference(model, prompt, sampling)[0]
    assert rig.num_preemptions == 1


@pytest.mark.parametrize("width", [2, 4])
def test_the_demo_model_s_beams_are_those_of_transformers(demo: tuple[TorchEngine, Any], width: int) -> None:
    engine, model = demo
    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model("demo"))
    prompt: list[int] = tokenizer("The three largest cities of Italy are")["input_ids"]
    sampling = search(width, (0, 2), 9)
    beams, scores = reference(model, prompt, sampling)
    rig = Rig(engine)
    if width == 4:
        assert rig.add("a", prompt, sampling)
    else:
        rig.local("a", prompt, sampling)
    assert rig.run()["a"] == beams
    assert [beam.score for beam in rig.beams["a"]] == pytest.approx(scores, abs=1e-3)


@pytest.fixture(scope="module")
def demo() -> tuple[TorchEngine, Any]:
    """The demo model in fp32, in our engine and in transformers."""
    directory: Path = resolve_model("demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return load(directory, dtype="float32", block_size=16), model
