"""A checkpoint's layer for drafting, on one rank and on two: the tokens are those without it, and good guesses come true."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrelay.common.sampling import SamplingParams
from kvrelay.decode_worker.head import HeadDrafter
from kvrelay.engine.drafting import own_layer
from kvrelay.engine.settings import Guessing
from kvrelay.engine.step.interface import DeviceFailedError, Engine
from tests.decode_worker.rig import Rig, greedy
from tests.decode_worker.test_ranks_torch import sampling
from tests.decode_worker.workload import Wish, assert_as_alone, run_disturbed
from tests.draft_layers import save_known_layer
from tests.engine.conftest import VOCAB
from tests.engine.ranks.conftest import load_ranks
from tests.engine.ranks.rig import pids

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of what tiny configurations leave out

NUM_BLOCKS = 80
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_blocks": NUM_BLOCKS, "block_size": 8, "run_ahead": "on"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its layer is sometimes wrong."""
    directory: Path = tmp_path_factory.mktemp("model")
    save_known_layer(directory, mistakes=0.03)
    return directory


@pytest.fixture(scope="module", params=[1, 2])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    found = load_ranks(model, request.param, guessing=Guessing(mtp_kv_bytes=2**22, taps=()), **OPTIONS)
    yield found
    found.close()


def test_every_request_gets_the_tokens_that_it_gets_without_drafts(engine: Engine) -> None:
    """Random requests with all kinds of sampling, guides, hand-offs, shared prompts and preemptions."""
    draws = random.Random(1)
    is_one = engine.num_slots == 16 and not pids()
    shared = [draws.randrange(VOCAB) for _ in range(40)]
    wishes: dict[str, Wish] = {}
    alone: dict[str, Rig] = {}
    for index in range(8):
        prompt, params = [draws.randrange(VOCAB) for _ in range(draws.randint(1, 20))], sampling(draws)
        prompt = shared[: draws.choice((0, 0, 24, 40))] + prompt
        params = msgspec.structs.replace(params, choice=index % 3, max_tokens=params.max_tokens + 10)
        name, handed_over = f"r{index}", is_one and draws.random() < 0.6
        wishes[name] = Wish(prompt, params, handed_over, draws.choice((0, 0, 0, 5, 40)))
        alone[name] = wishes[name].alone(Rig(engine), name)
    rig = Rig(engine, 16, head=own_layer(engine), max_num_seqs=16, max_batched_tokens=32)
    run_disturbed(rig, wishes, draws)
    assert rig.drafted_by("head") > 0
    assert rig.num_preemptions > 0
    assert_as_alone(rig, alone)


def test_drafts_come_true(engine: Engine) -> None:
    """Also with random sampling, because model and layer use the same noise."""
    rig = Rig(engine, head=own_layer(engine))
    rig.add("greedy", [1, 2, 3, 4], greedy(60), handed_over=False)
    chosen = SamplingParams(max_tokens=60, temperature=0.9, seed=5, top_p=0.9)
    rig.add("random", [1, 2, 3, 5], chosen, handed_over=False)
    rig.run()
    assert [len(rig.outputs[name]) for name in ("greedy", "random")] == [60, 60]
    assert rig.drafted() > 60
    assert 0.3 < rig.drafted("accepted_draft") / rig.drafted() < 1


def test_what_cannot_guess_costs_guesses_and_a_lost_rank_ends_the_worker(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test: a layer that has failed is not asked again, and of two ranks one is killed."""
    expected = Rig(engine)
    expected.add("r", [1, 2, 3], greedy(40), handed_over=False)
    expected.run()
    calls: list[int] = []

    def fail(self: HeadDrafter, *_: object) -> None:
        calls.append(1)
        raise RuntimeError("out of luck")

    head: Any = own_layer(engine)
    monkeypatch.setattr(type(head), "draft", fail)
    rig = Rig(engine, head=head)
    rig.add("r", [1, 2, 3], greedy(40), handed_over=False)
    rig.run()
    assert rig.outputs == expected.outputs
    assert len(calls) == 3
    if others := pids():
        rig.add("s", [1, 2, 3], greedy(40), handed_over=False)
        rig.step()
        os.kill(others[-1], signal.SIGKILL)
        with pytest.raises(DeviceFailedError, match=r"rank \d .* was ended by SIGKILL"):
            rig.run(breaks=True)
