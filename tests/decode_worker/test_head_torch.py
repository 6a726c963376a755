"""An EAGLE-3 head in the real engine: random requests get the same bits as without it, and good drafts are accepted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.step.interface import DeviceFailedError
from kvrelay.engine.torch_engine import TorchEngine
from tests.decode_worker.rig import Rig, greedy
from tests.decode_worker.test_run_ahead_torch import sampling, unlike_the_last
from tests.decode_worker.workload import Wish, assert_as_alone, run_disturbed
from tests.engine.conftest import SIZES, VOCAB, load, save_model
from tests.guides import TokensState
from tests.heads import WIDE, save_head, save_known_pair

NUM_BLOCKS = 80
KV_BYTES = 2**24
# Our CPU kernels, which give a row the same bits in any batch.
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "cpu_kernels": "native", "num_blocks": NUM_BLOCKS, "block_size": 8}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Models, each with a head: one head is always right, one is sometimes wrong, and one is random."""
    pairs = {
        name: (tmp_path_factory.mktemp(name), tmp_path_factory.mktemp("head")) for name in ("known", "nearly", "random")
    }
    save_known_pair(*pairs["known"])
    save_known_pair(*pairs["nearly"], mistakes=0.1)
    save_model(pairs["random"][0], transformers.Qwen3Config(**{**SIZES, **WIDE}))
    save_head(pairs["random"][1], pairs["random"][0], num_drafted=66)
    return pairs


def engine_of(directory: Path, run_ahead: str = "off") -> TorchEngine:
    return load(directory, processors={"unlike": unlike_the_last}, run_ahead=run_ahead, **OPTIONS)


@pytest.mark.parametrize("pair", ["known", "nearly", "random"])
@pytest.mark.parametrize("seed", range(2))
def test_every_request_gets_the_bits_that_it_gets_alone(
    directories: dict[str, tuple[Path, Path]], pair: str, seed: int
) -> None:
    """Random requests with all kinds of sampling, guides and preemptions. Their tokens and log probabilities are bit-equal."""
    draws = random.Random(seed)
    model, head = directories[pair]
    plain = engine_of(model)
    wishes: dict[str, Wish] = {}
    alone: dict[str, Rig] = {}
    shared = [draws.randrange(VOCAB) for _ in range(40)]
    for index in range(8):
        prompt, params = [draws.randrange(VOCAB) for _ in range(draws.randint(1, 60))], sampling(draws)
        prompt = shared[: draws.choice((0, 0, 24, 40))] + prompt
        params = msgspec.structs.replace(params, choice=index % 3, num_logprobs=draws.choice((None, 2)))
        name, handed_over, guided = f"r{index}", draws.random() < 0.6, draws.choice((0, 0, 0, 0, 5, 40))
        wishes[name] = Wish(prompt, params, handed_over, guided)
        alone[name] = wishes[name].alone(Rig(plain), name)
    engine = engine_of(model, draws.choice(("on", "off")))
    rig = Rig(
        engine,
        draws.choice((16, 24, NUM_BLOCKS)),
        head=engine.load_head(head, KV_BYTES),
        max_num_seqs=draws.choice((5, 16, 32)),
        max_batched_tokens=draws.choice((32, 512)),
    )
    run_disturbed(rig, wishes, draws)
    assert rig.drafted_by("head") > 0
    assert_as_alone(rig, alone)
    for name, one in alone.items():
        assert rig.sampled.get(name, []) == one.sampled.get(name, [])


@pytest.mark.parametrize(("pair", "least", "most"), [("known", 0.9, 1.0), ("nearly", 0.3, 0.9), ("random", 0.0, 0.2)])
def test_drafts_come_true_as_far_as_the_head_knows_the_text(
    directories: dict[str, tuple[Path, Path]], pair: str, least: float, most: float
) -> None:
    """Also with random sampling drafts are accepted, because model and head use the same noise. The random head drafts little."""
    requests = {
        "greedy": SamplingParams(max_tokens=100, temperature=0.0),
        "random": SamplingParams(max_tokens=100, temperature=0.9, seed=5, top_p=0.9),
        "penalised": SamplingParams(
            max_tokens=100, temperature=0.7, seed=6, presence_penalty=0.4, repetition_penalty=1.2
        ),
    }
    model, head = directories[pair]
    engine = engine_of(model)
    rig = Rig(engine, head=engine.load_head(head, KV_BYTES))
    for place, (name, params) in enumerate(requests.items()):
        rig.add(name, [1, 2, 3, 4, place], params, handed_over=place % 2 == 0)
    rig.add("forced", [1, 2, 3], requests["random"], guide=TokensState([*range(30, 60)]))
    rig.run()
    accepted = rig.registry.get_sample_value("kvrelay_accepted_draft_tokens_total", {"drafter": "head"}) or 0
    assert least <= accepted / rig.drafted_by("head") <= most
    assert (rig.drafted_by("head") > 200) == (pair != "random")
    num_steps = len(rig.engine.rows)
    assert (num_steps < 60) == (pair == "known"), f"{num_steps} steps"


def test_a_head_that_fails_is_not_asked_any_more(
    directories: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is called three times and fails. All tokens still come, and steps then run ahead."""
    model, directory = directories["known"]
    engine = engine_of(model, "on")
    head = engine.load_head(directory, KV_BYTES)
    num_calls = 0

    def fail(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        raise RuntimeError("out of luck")

    monkeypatch.setattr(head._model, "forward", fail)
    rig = Rig(engine, head=head)
    rig.add("r", [1, 2, 3], greedy(60))
    rig.run()
    assert len(rig.outputs["r"]) == 60
    assert num_calls == 3
    assert max(rig.engine.depths) == 1


def test_a_device_that_fails_is_not_told_as_guesses_that_fail(
    directories: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step says why the worker ends. A line of the log that requests go on would be false."""
    model, directory = directories["known"]
    engine = engine_of(model, "on")
    head = engine.load_head(directory, KV_BYTES)
    num_calls = 0

    def fail(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        raise DeviceFailedError("a rank is lost")

    monkeypatch.setattr(head._model, "forward", fail)
    rig = Rig(engine, head=head)
    rig.add("r", [1, 2, 3], greedy(12))
    rig.run()
    assert num_calls > 0
    assert "guessing failed" not in caplog.text
