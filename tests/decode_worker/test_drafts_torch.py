"""Speculation on the real engine: random requests get the same tokens and log probabilities as without drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers

from kvrelay.common.sampling import SamplingParams
from kvrelay.engine.torch_engine import TorchEngine
from tests.decode_worker.rig import Rig
from tests.decode_worker.test_run_ahead_torch import sampling, unlike_the_last
from tests.decode_worker.workload import Wish, assert_as_alone, run_disturbed
from tests.drafters import Oracle
from tests.engine.conftest import SIZES, VOCAB, assert_same_tokens, load, save_model
from tests.guides import TokensState

NUM_BLOCKS = 80


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("llama")
    save_model(directory, transformers.LlamaConfig(**SIZES))
    return directory


@pytest.fixture(scope="module")
def engines(directory: Path) -> dict[str, TorchEngine]:
    """Two engines with the same model: one runs ahead in steps without drafts, and one never does."""
    options: dict[str, Any] = {
        "dtype": "float32", "num_blocks": NUM_BLOCKS, "block_size": 8, "processors": {"unlike": unlike_the_last}
    }  # fmt: skip
    return {name: load(directory, run_ahead=name, **options) for name in ("on", "off")}


@pytest.mark.parametrize("seed", range(16))
def test_every_request_gets_the_tokens_that_it_gets_alone_and_without_drafts(
    engines: dict[str, TorchEngine], seed: int
) -> None:
    draws = random.Random(seed)
    wishes: dict[str, Wish] = {}
    alone: dict[str, Rig] = {}
    for index in range(8):
        prompt, params = [draws.randrange(VOCAB) for _ in range(draws.randint(1, 30))], sampling(draws)
        params = msgspec.structs.replace(params, choice=index % 3)  # as of a request with n
        name, handed_over, guided = f"r{index}", draws.random() < 0.6, draws.choice((0, 0, 0, 0, 5, 40))
        wishes[name] = Wish(prompt, params, handed_over, guided)
        alone[name] = wishes[name].alone(Rig(engines["off"]), name)
    oracle = Oracle({name: rig.outputs[name] for name, rig in alone.items()}, draws.choice((2, 9)), VOCAB)
    rig = Rig(
        engines[draws.choice(("on", "off"))],
        draws.choice((12, 20, NUM_BLOCKS)),
        drafter=oracle,
        max_num_seqs=draws.choice((5, 16, 32)),
        max_batched_tokens=draws.choice((32, 512)),
    )
    run_disturbed(rig, wishes, draws)
    assert rig.drafted() > rig.drafted("accepted_draft") > 0
    assert_as_alone(rig, alone)
    for name, one in alone.items():
        assert_same_tokens(rig.sampled.get(name, []), one.sampled.get(name, []), bound=1e-4)


def test_our_cpu_kernels_give_the_same_bits_with_and_without_drafts(tmp_path: Path) -> None:
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32}
    save_model(tmp_path, transformers.LlamaConfig(**sizes))
    engine = load(tmp_path, dtype="bfloat16", cpu_kernels="native", num_blocks=NUM_BLOCKS, block_size=8)
    requests = {
        "greedy": SamplingParams(max_tokens=60, temperature=0.0, num_logprobs=3),
        "random": SamplingParams(max_tokens=60, temperature=0.9, seed=5, num_logprobs=3),
        "penalised": SamplingParams(max_tokens=60, temperature=0.7, seed=6, presence_penalty=0.4, num_logprobs=3),
    }
    plain = Rig(engine)
    for rig in (plain, Rig(engine, drafter=Oracle(plain.outputs, vocab_size=VOCAB))):
        for place, (name, params) in enumerate(requests.items()):
            rig.add(name, [1, 2, 3, 4, place], params)
        rig.add("forced", [1, 2, 3], requests["random"], guide=TokensState([*range(30, 60)]))
        rig.run()
    assert rig.drafted("accepted_draft") > 60
    assert (rig.registry.get_sample_value("kvrelay_accepted_draft_tokens_total", {"drafter": "guide"}) or 0) > 20
    assert rig.sampled == plain.sampled
