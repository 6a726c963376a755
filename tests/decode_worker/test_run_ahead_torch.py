"""The real engine and scheduler run a step ahead: random requests get the same tokens as without."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvrelay.common.sampling import SamplingParams, Watermark
from kvrelay.engine.torch_engine import TorchEngine
from kvrelay.worker.model_worker import Remove
from tests.decode_worker.rig import Rig, greedy
from tests.decode_worker.workload import Wish
from tests.engine.conftest import SIZES, VOCAB, load, save_model

NUM_BLOCKS = 80


def unlike_the_last(logits: torch.Tensor, token_ids: Seq[Seq[int]]) -> None:
    """A processor that forbids the last token and its two neighbours."""
    for row, seen in zip(logits, token_ids, strict=True):
        row[max(0, seen[-1] - 1) : seen[-1] + 2] = -torch.inf


class BrokenOnceAsked:
    """A processor that fails for a sequence with a certain number of tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def __call__(self, logits: torch.Tensor, token_ids: Seq[Seq[int]]) -> None:
        if any(len(seen) == self._num_tokens for seen in token_ids):
            raise OSError("the operator's code is broken")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TorchEngine]:
    """Two engines with the same model: one runs ahead, the other does not."""
    directory: Path = tmp_path_factory.mktemp("llama")
    save_model(directory, transformers.LlamaConfig(**SIZES))
    processors = {"unlike": unlike_the_last, "broken": BrokenOnceAsked(6)}
    options: dict[str, Any] = {
        "dtype": "float32", "num_blocks": NUM_BLOCKS, "block_size": 8, "processors": processors
    }  # fmt: skip
    return {name: load(directory, run_ahead=name, **options) for name in ("on", "off")}


def sampling(draws: random.Random) -> SamplingParams:
    """Random sampling without beams. Often few tokens are allowed, so that penalties and bad words meet repeated ones."""
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
        bad_words=draws.choice(((), (), ((few[2],),), ((few[2],), (few[0], few[1]), (few[1], few[1], few[3])))),
        typical_p=draws.choice((1.0, 1.0, 1.0, 0.6)),
        watermark=draws.choice((None, None, None, None, Watermark(delta=6.0))),
        processors=draws.choice(((), (), (), (), ("unlike",))),
        stop_token_ids=draws.choice(((), few[:1], (*few[:2], VOCAB + 5))),
        min_tokens=draws.choice((0, 0, 6)),
        num_logprobs=draws.choice((None, None, 2)),
    )


@pytest.mark.parametrize("seed", range(8))
def test_every_request_gets_the_tokens_that_it_gets_alone_and_step_by_step(
    engines: dict[str, TorchEngine], seed: int
) -> None:
    draws = random.Random(seed)
    settings = {"max_num_seqs": draws.choice((3, 6, 16)), "max_batched_tokens": draws.choice((16, 512))}
    rig = Rig(engines["on"], draws.choice((12, 20, NUM_BLOCKS)), **settings)
    wanted, removed = {}, set()
    for index in range(8):
        prompt, params = [draws.randrange(VOCAB) for _ in range(draws.randint(1, 30))], sampling(draws)
        name, handed_over, guided = f"r{index}", draws.random() < 0.6, draws.choice((0, 0, 0, 0, 5, 40))
        wanted[name] = Wish(prompt, params, handed_over, guided)
        while not wanted[name].add_to(rig, name):
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
    for name, wish in wanted.items():
        alone = wish.alone(Rig(engines["off"]), name)
        if name in removed:
            assert rig.outputs[name] == alone.outputs[name][: len(rig.outputs[name])]
        else:
            assert (rig.outputs[name], rig.ends.get(name)) == (alone.outputs[name], alone.ends.get(name)), (name, wish)


def test_a_deferred_step_that_fails_loses_no_token_of_anybody(engines: dict[str, TorchEngine]) -> None:
    rig = Rig(engines["on"])
    rig.add("broken", [1, 2, 3], greedy(30, processors=("broken",)))
    rig.add("ends", [4, 5, 6], greedy(3))
    rig.add("other", [7, 8], greedy(30))
    rig.run(breaks=True)
    assert rig.failed == ["broken"]
    alone = Rig(engines["off"])
    alone.add("other", [7, 8], greedy(30))
    alone.run()
    assert {name: len(output) for name, output in rig.outputs.items()} == {"broken": 3, "ends": 3, "other": 30}
    assert rig.outputs["other"] == alone.outputs["other"]
