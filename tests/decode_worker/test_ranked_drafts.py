"""Drafts on several ranks and stages: the first rank guesses, all compute the guesses, and no bit of an output changes."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import SamplingParams
from kvrelay.decode_worker.draft_model import DraftModel
from kvrelay.decode_worker.metrics import DraftMetrics
from kvrelay.engine.step.interface import DeviceFailedError, DraftHead, Engine
from kvrelay.engine.torch_engine import TorchEngine
from tests.decode_worker.rig import Rig, greedy
from tests.decode_worker.test_ranks_torch import sampling
from tests.decode_worker.workload import Wish
from tests.draft_models import CheckedDraftModel
from tests.draft_pairs import save_pair
from tests.engine.conftest import VOCAB, load
from tests.engine.ranks.conftest import load_ranks
from tests.engine.ranks.rig import pids
from tests.heads import WIDE, save_known_pair

NUM_BLOCKS = 80
# Our CPU kernels give a row the same bits in any batch, and so do sums over ranks.
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "num_blocks": NUM_BLOCKS, "block_size": 8}


@dataclass
class Drafting:
    """An engine of several processes, and what drafts for it."""

    engine: Engine
    head: DraftHead | None = None
    draft_engine: TorchEngine | None = None

    def rig(self, *sizes: int, **settings: int) -> Rig:
        """A worker with drafts."""
        if self.draft_engine is None:
            return Rig(self.engine, *sizes, head=self.head, **settings)
        return Rig(self.engine, *sizes, drafter=CheckedDraftModel(self.draft_engine, VOCAB), **settings)


@pytest.fixture(
    scope="module",
    params=[
        "head on 2 ranks",
        "draft model on 4 ranks",
        pytest.param("draft model in 2 stages", marks=pytest.mark.full),
    ],
)
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafting]:
    """A head that is sometimes wrong, and lacks an embedding; or a draft model that is right."""
    model, guesser = (tmp_path_factory.mktemp(name) for name in ("model", "guesser"))
    sizes = {"head on 2 ranks": (2, 1), "draft model on 4 ranks": (4, 1), "draft model in 2 stages": (1, 2)}
    num_ranks, num_stages = sizes[request.param]
    if "head" in request.param:
        save_known_pair(model, guesser, mistakes=0.1)
        engine: Any = load_ranks(model, num_ranks, **OPTIONS)
        found = Drafting(engine, head=engine.load_head(guesser, 2**24))
    else:
        save_pair(model, guesser, 4, **WIDE)
        draft_engine = load(guesser, cpu_kernels="native", **OPTIONS)
        found = Drafting(load_ranks(model, num_ranks, num_stages=num_stages, **OPTIONS), draft_engine=draft_engine)
    yield found
    found.engine.close()


def test_every_request_gets_the_bits_that_it_gets_without_drafts(drafting: Drafting) -> None:
    """Random requests with all kinds of sampling, guides and preemptions."""
    draws = random.Random(1)
    rig, plain = drafting.rig(9, max_num_seqs=16, max_batched_tokens=32), Rig(drafting.engine)
    for index in range(8):
        prompt, params = [draws.randrange(VOCAB) for _ in range(draws.randint(1, 20))], sampling(draws)
        params = msgspec.structs.replace(params, choice=index % 3, max_tokens=params.max_tokens + 10)
        wish = Wish(prompt, params, handed_over=False, guided=draws.choice((0, 0, 0, 5, 40)))
        wish.add_to(rig, f"r{index}")
        wish.add_to(plain, f"r{index}")
    plain.run()
    rig.run()
    assert rig.num_preemptions > 0
    assert rig.drafted("accepted_draft") > 0
    assert rig.drafted_by("head" if drafting.draft_engine is None else "draft-model") > 0
    assert (rig.outputs, rig.ends) == (plain.outputs, plain.ends)
    assert rig.sampled == plain.sampled
    assert plain.num_preemptions == plain.drafted() == 0


def test_drafts_come_true(drafting: Drafting) -> None:
    """Also with random sampling, because the first rank guesses with the noise that all ranks sample with."""
    rig = drafting.rig()
    rig.add("greedy", [1, 2, 3, 4], greedy(60), handed_over=False)
    chosen = SamplingParams(max_tokens=60, temperature=0.9, seed=5, top_p=0.9)
    rig.add("random", [1, 2, 3, 5], chosen, handed_over=False)
    rig.run()
    assert [len(rig.outputs[name]) for name in ("greedy", "random")] == [60, 60]
    least = 0.9 if drafting.head is None else 0.3
    assert rig.drafted("accepted_draft") / rig.drafted() > least
    assert rig.drafted() > 60


def test_what_cannot_guess_costs_guesses_and_a_lost_rank_ends_the_worker(
    drafting: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three failures in a row, beside ranks that know nothing of it. The last test: its rank is killed."""
    expected = Rig(drafting.engine)
    expected.add("r", [1, 2, 3], greedy(40), handed_over=False)
    expected.run()
    num_calls = 0

    def fail(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1
        raise RuntimeError("out of luck")

    if drafting.draft_engine is None:
        rig = drafting.rig()
        head: Any = drafting.head
        monkeypatch.setattr(head._model, "forward", fail)
    else:
        metrics = DraftMetrics(CollectorRegistry())
        rig = Rig(drafting.engine, drafter=DraftModel(drafting.draft_engine, VOCAB, 64, lambda: 0.0, metrics))
        monkeypatch.setattr(drafting.draft_engine, "launch", fail)
    rig.add("r", [1, 2, 3], greedy(40), handed_over=False)
    rig.run()
    assert rig.outputs == expected.outputs
    assert num_calls == 3
    rig.add("s", [1, 2, 3], greedy(40), handed_over=False)
    rig.step()
    os.kill(pids()[-1], signal.SIGKILL)
    with pytest.raises(DeviceFailedError, match=r"rank \d .* was ended by SIGKILL"):
        rig.run(breaks=True)
