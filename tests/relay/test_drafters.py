"""Speculation by a draft model or a head, through the whole relay on real engines. Preemption and failover change no token."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.decode_worker import drafts
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.step.interface import Engine
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.relay.relay import Relay
from kvrelay.gateway.relay.request import GenerationRequest, RequestTimings
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.prefill_worker.worker import PrefillWorker
from kvrelay.wire.messages import TokenDelta
from tests.draft_pairs import save_pair
from tests.engine.conftest import load, tokens
from tests.heads import save_known_pair
from tests.relay.workers import ADDRESS, gateway, worker_setup

OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "cpu_kernels": "native", "num_blocks": 60, "block_size": 8}
WIDE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 32}
NUM_LAYERS = 16
NUM_TOKENS = 80
WISHES = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, num_logprobs=2),
    "random": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, seed=5, num_logprobs=0),
    "second choice": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, seed=5, choice=1),
    "penalised": SamplingParams(max_tokens=NUM_TOKENS, temperature=0.7, seed=6, presence_penalty=0.4),
}
PROMPTS = {name: tokens(place, 30) for place, name in enumerate(WISHES)}

Told = dict[str, list[SampledToken]]


@dataclass(frozen=True)
class Pair:
    """A model, and the draft model or head that guesses its tokens."""

    drafter: str
    model: Path
    guesser: Path


@pytest.fixture(autouse=True)
def worth_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always draft as many tokens as possible: the real number depends on time (see ``decode_worker/test_drafts.py``)."""
    monkeypatch.setattr(drafts, "num_to_draft", lambda chance, row_share, draft_share, most: most)


@pytest.fixture(scope="module", params=["draft-model", "head"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model of many layers, with a draft model of one layer that guesses its tokens, or a head that is sometimes wrong."""
    pair = Pair(request.param, tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("guesser"))
    if pair.drafter == "head":
        save_known_pair(pair.model, pair.guesser, mistakes=0.03, num_hidden_layers=NUM_LAYERS)
    else:
        save_pair(pair.model, pair.guesser, NUM_LAYERS, **WIDE)
    return pair


def decode_worker(
    pair: Pair, registry: CollectorRegistry, name: str, *, drafts: bool, num_blocks: int = 60
) -> DecodeWorker:
    engine = load(pair.model, **{**OPTIONS, "num_blocks": num_blocks})
    settings = DecodeSchedulerSettings(max_num_seqs=32)
    draft_engine: Engine | None = None
    if drafts:
        settings = replace(settings, speculation=pair.drafter, draft_model=str(pair.guesser))
        draft_engine = load(pair.guesser, **OPTIONS) if pair.drafter == "draft-model" else None
    return DecodeWorker(engine, settings, ADDRESS, worker_setup(name, registry), draft_engine=draft_engine)


def prefill_worker(pair: Pair) -> PrefillWorker:
    return PrefillWorker(load(pair.model, **OPTIONS), PrefillSchedulerSettings(), worker_setup("prefill"))


async def ask(relay: Relay, name: str, told: Told, heard: asyncio.Event | None = None) -> None:
    def take(delta: TokenDelta) -> bool:
        told.setdefault(name, []).extend(delta.tokens)
        if heard is not None and len(told[name]) >= 10:
            heard.set()
        return True

    await relay.run(GenerationRequest(name, PROMPTS[name], WISHES[name], RequestTimings(0.0)), take)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> Told:
    """The tokens of each request when it runs alone and without drafts."""

    async def told() -> Told:
        told: Told = {}
        worker = decode_worker(pair, CollectorRegistry(), "d", drafts=False)
        async with gateway([prefill_worker(pair)], [worker]) as relay:
            for name in WISHES:
                await ask(relay, name, told)
        return told

    return asyncio.run(told())


def accepted(registry: CollectorRegistry, drafter: str) -> float:
    name = "kvrelay_accepted_draft_tokens_total"
    return registry.get_sample_value(name, {"drafter": drafter}) or 0


@pytest.mark.parametrize("num_blocks", [60, 20], ids=["room for all", "preemption"])
async def test_the_tokens_are_those_of_a_worker_without(pair: Pair, expected: Told, num_blocks: int) -> None:
    told: Told = {}
    registry = CollectorRegistry()
    worker = decode_worker(pair, registry, "d", drafts=True, num_blocks=num_blocks)
    async with gateway([prefill_worker(pair)], [worker]) as relay:
        await asyncio.gather(*(ask(relay, name, told) for name in WISHES))
        # A request that runs alone has drafts for its whole answer.
        await ask(relay, "greedy", alone := {})
    assert told == expected
    assert alone["greedy"] == expected["greedy"]
    assert accepted(registry, pair.drafter) > 20
    assert bool(registry.get_sample_value("kvrelay_preemptions_total")) == (num_blocks == 20)
    assert (worker.draft_model is None) == (pair.drafter == "head")
    if worker.draft_model is not None:
        assert not worker.draft_model.blocks.owners()
        worker.draft_model.check_integrity()


@pytest.mark.parametrize("dies", [0, 1], ids=["the one that drafts dies", "the other one dies"])
async def test_failover_goes_on_with_the_same_tokens(pair: Pair, expected: Told, dies: int) -> None:
    told: Told = {}
    decodes = [decode_worker(pair, CollectorRegistry(), f"d{place}", drafts=place == 0) for place in range(2)]
    dead: list[DecodeWorker] = []
    metrics = GatewayMetrics(CollectorRegistry())
    async with gateway([prefill_worker(pair)], decodes, metrics=metrics, dead=dead) as relay:
        under_way = asyncio.Event()
        running = asyncio.gather(*(ask(relay, name, told, under_way) for name in WISHES))
        await under_way.wait()
        while not all(worker.service.entries for worker in decodes):  # the first may be faster than the last arrives
            assert not running.done()
            await asyncio.sleep(0.001)
        dead.append(decodes[dies])
        await dead[0]._server.stop()
        await dead[0].stop()
        await running
    assert told == expected
    assert metrics.registry.get_sample_value("kvrelay_attempts_total", {"model": "tiny", "outcome": "peer_lost"})
