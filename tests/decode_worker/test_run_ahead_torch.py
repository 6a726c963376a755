"""The real engine under the real scheduler, a step ahead: random requests get the tokens that they get one step after the other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvrelay.common.sampling import SamplingParams
from kvrelay.decode_worker.model_worker import Remove
from kvrelay.engine.torch_engine import TorchEngine
from tests.decode_worker.rig import Rig
from tests.engine.conftest import SIZES, VOCAB, load, save_model

NUM_BLOCKS = 80


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TorchEngine]:
    """The same model twice, in blocks of 8."""
    directory: Path = tmp_path_factory.mktemp("llama")
    save_model(directory, transformers.LlamaConfig(**SIZES))
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": NUM_BLOCKS, "block_size": 8}
    return {name: load(directory, run_ahead=name, **options) for name in ("on", "off")}


def sampling(draws: random.Random) -> SamplingParams:
    """Some of everything that a step may run ahead with. Few tokens come for most, so that penalties meet them again."""
    few = tuple(sorted(draws.sample(range(VOCAB), draws.choice((4, 9)))))
    return SamplingParams(
        max_tokens=draws.randint(1, 30),
        temperature=draws.choice((0.0, 0.0, 0.7, 1.5)),
        seed=draws.randrange(2**32),
        top_k=draws.choice((0, 0, 12)),
        repetition_penalty=draws.choice((1.0, 1.3, 0.9)),
        presence_penalty=draws.choice((0.0, 0.0, 1.5)),
        frequency_penalty=draws.choice((0.0, 0.6, -0.4)),
        allowed_token_ids=draws.choice(((), few, few)),
        logit_bias=draws.choice(((), ((few[0], 6.0), (few[1], 5.5)), ((few[0], -8.0),))),
        bad_words=draws.choice(((), ((few[2],),))),
        stop_token_ids=draws.choice(((), few[:1], (*few[:2], VOCAB + 5))),
        min_tokens=draws.choice((0, 0, 6)),
        num_logprobs=draws.choice((None, None, 2)),
    )


@pytest.mark.parametrize("seed", range(16))
def test_every_request_gets_the_tokens_that_it_gets_alone_and_step_by_step(
    engines: dict[str, TorchEngine], seed: int
) -> None:
    draws = random.Random(seed)
    rig = Rig(engines["on"], draws.choice((12, 20, NUM_BLOCKS)), max_num_seqs=draws.choice((3, 6, 16)))
    wanted, removed = {}, set()
    for index in range(8):
        prompt, params = [draws.randrange(VOCAB) for _ in range(draws.randint(1, 30))], sampling(draws)
        name, handed_over = f"r{index}", draws.random() < 0.6
        wanted[name] = (prompt, params, handed_over)
        while not rig.add(name, prompt, params, handed_over=handed_over):
            rig.let_go()
            rig.step()
        for _ in range(draws.randint(0, 6)):
            rig.step()
            rig.let_go()
            rig.scribble(draws.randint(1, 5))
        if draws.random() < 0.15:
            removed.add(name)
            rig.worker.handle(Remove((name, 1)))
    while rig.worker.has_work():
        rig.let_go()
        rig.step()
        rig.scribble(draws.randint(1, 5))
    rig.let_go()
    rig.run()
    assert sum(rig.engine.depths) > len(rig.engine.depths) / 3, rig.engine.depths
    for name, (prompt, params, handed_over) in wanted.items():
        alone = Rig(engines["off"])
        alone.add(name, prompt, params, handed_over=handed_over)
        alone.run()
        if name in removed:
            assert rig.outputs[name] == alone.outputs[name][: len(rig.outputs[name])]
        else:
            assert (rig.outputs[name], rig.ends.get(name)) == (alone.outputs[name], alone.ends.get(name)), (
                name,
                params,
            )
