"""A chat's next turn: the worker that gets it, the tokens it finds cached, and how long its blocks are kept.

Real workers on fake engines (which check every byte of K/V before they sample), real sockets, and the gateway's own relay on top.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.block_hash import HashChain
from kvrelay.common.retention import Retention
from kvrelay.decode_worker.worker import DecodeWorker
from kvrelay.engine.fake.engine import fake_card
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.relay.relay import Relay
from kvrelay.gateway.relay.request import GenerationSpec
from kvrelay.gateway.settings import RelaySettings
from kvrelay.gateway.workers.worker import Worker
from kvrelay.prefill_worker.worker import PrefillWorker

from .workers import decode_worker, gateway, generate, prefill_worker

VOCAB = 1000
BLOCK = 4


def tokens(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@dataclass
class Cluster:
    """Workers, and a gateway's relay over them."""

    prefills: list[PrefillWorker]
    decodes: list[DecodeWorker]
    registries: list[CollectorRegistry]  # prefill workers first
    relay: Relay
    metrics: GatewayMetrics

    async def generate(
        self, name: str, prompt: list[int], max_tokens: int, retention: Retention | None = None, cache_salt: str = ""
    ) -> tuple[list[int], int]:
        spec = GenerationSpec(retention=retention, cache_salt=cache_salt)
        return await generate(self.relay, name, prompt, max_tokens, spec=spec)

    def values(self, name: str, **labels: str) -> list[float]:
        """A metric of each worker, prefill workers first."""
        return [registry.get_sample_value(name, labels) or 0.0 for registry in self.registries]

    async def settled(self) -> None:
        """Wait until no worker knows any request, and the gateway knows of none: a late report may count those that are over."""

        def is_busy(worker: Worker) -> bool:
            assert worker.load is not None, f"{worker.address} is not up"
            return bool(worker.load.num_requests or worker.load.num_waiting_tokens)

        async with asyncio.timeout(20):
            while any(worker.service.entries for worker in [*self.prefills, *self.decodes]):
                await asyncio.sleep(0.005)  # polls for a state, bounded by the timeout above
            while any(map(is_busy, self.relay.pool.workers)):
                await asyncio.sleep(0.005)

    async def know_their_speed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Wait until all prefill workers have reported their speed. Before that, the gateway hands every prompt over.

        From then on all workers seem equally fast: the real speed depends on the machine.
        """
        pool = self.relay.pool
        async with asyncio.timeout(20):
            while not all(w.status and w.status.prompt_tokens_per_s for w in pool.prefills.values()):
                pool.changed.clear()
                await pool.changed.wait()
        monkeypatch.setattr(Worker, "tokens_per_s", 10_000.0)


@asynccontextmanager
async def cluster(num_prefills: int, num_decodes: int, settings: RelaySettings) -> AsyncIterator[Cluster]:
    """Workers and a relay that are ready. Afterwards every block must be free or cached."""
    card = fake_card(num_blocks=512, block_size=BLOCK)
    registries = [CollectorRegistry() for _ in range(num_prefills + num_decodes)]
    prefills = [prefill_worker(registries[index], card, name=f"prefill-{index}") for index in range(num_prefills)]
    decodes = [
        decode_worker(registries[num_prefills + index], card, name=f"decode-{index}") for index in range(num_decodes)
    ]
    metrics = GatewayMetrics(CollectorRegistry())
    async with gateway(prefills, decodes, settings, metrics=metrics) as relay:
        yield Cluster(prefills, decodes, registries, relay, metrics)


def full_blocks(num_tokens: int) -> int:
    """The number of these tokens that lie in full blocks."""
    return num_tokens // BLOCK * BLOCK


@pytest.mark.parametrize("num_prefills", [0, 1], ids=["computed by the decode worker", "handed over"])
async def test_a_prefix_is_found_by_requests_of_the_same_salt_only(num_prefills: int) -> None:
    async with cluster(num_prefills, 1, RelaySettings(local_prefill="fallback")) as c:
        prompt = tokens(1, 101)
        for name, salt, is_cached in (
            ("first", "mine", False),
            ("second", "mine", True),
            ("third", "yours", False),
            ("fourth", "", False),
            ("fifth", "", True),
            ("sixth", "yours", True),
        ):
            _, num_cached = await c.generate(name, prompt, 4, cache_salt=salt)
            assert num_cached == (full_blocks(100) if is_cached else 0), name
            await c.settled()


async def test_the_second_turn_of_each_chat_goes_where_its_prefix_lies() -> None:
    """Eight chats run at a time over two workers of each role, and every prompt is handed over."""
    async with cluster(2, 2, RelaySettings(local_prefill="fallback")) as c:
        prompts = {f"chat{index}": tokens(index, 101 + 3 * index) for index in range(8)}
        firsts = await asyncio.gather(*(c.generate(f"{name}-1", prompt, 12) for name, prompt in prompts.items()))
        assert [num_cached for _, num_cached in firsts] == [0] * 8
        assert all(count > 0 for count in c.values("kvrelay_sampled_tokens_total")), "nobody was idle"
        await c.settled()
        reused_before = sum(c.values("kvrelay_kv_blocks_reused_total"))
        turns = {
            name: [*prompt, *output, *tokens(100, 20)]
            for (name, prompt), (output, _) in zip(prompts.items(), firsts, strict=True)
        }
        seconds = await asyncio.gather(*(c.generate(f"{name}-2", prompt, 12) for name, prompt in turns.items()))
        # The prefill worker has cached the prompt. The decode worker has also cached the output but its last token.
        assert [num_cached for _, num_cached in seconds] == [full_blocks(len(prompt)) for prompt in prompts.values()]
        reused = sum(c.values("kvrelay_kv_blocks_reused_total")) - reused_before
        assert reused == sum((len(prompt) + 12 - 1) // BLOCK for prompt in prompts.values())


async def test_a_short_second_turn_skips_the_hand_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(2, 2, RelaySettings()) as c:
        prompts = {f"chat{index}": tokens(index, 100 + 3 * index) for index in range(8)}
        outputs = {name: (await c.generate(f"{name}-1", prompt, 12))[0] for name, prompt in prompts.items()}
        await c.settled()
        await c.know_their_speed(monkeypatch)
        handed_over = sum(c.values("kvrelay_handoffs_total", outcome="verified"))
        for name, prompt in prompts.items():
            turn = [*prompt, *outputs[name], *tokens(100, 8)]
            assert (await c.generate(f"{name}-2", turn, 12))[1] == full_blocks(len(prompt) + 12 - 1)
            await c.settled()
        assert sum(c.values("kvrelay_handoffs_total", outcome="verified")) == handed_over


async def test_without_prefill_workers_a_turn_finds_its_decode_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "tokens_per_s", 10_000.0)  # a worker that was slow would lose its prefixes
    async with cluster(0, 2, RelaySettings()) as c:
        prompts = {f"chat{index}": tokens(index, 90 + 3 * index) for index in range(6)}
        firsts = await asyncio.gather(*(c.generate(f"{name}-1", prompt, 10) for name, prompt in prompts.items()))
        turns = [
            (name, prompt, [*prompt, *output, *tokens(100, 40)])
            for (name, prompt), (output, _) in zip(prompts.items(), firsts, strict=True)
        ]
        for name, prompt, turn in turns:
            await c.settled()
            assert (await c.generate(f"{name}-2", turn, 10))[1] == full_blocks(len(prompt) + 10 - 1)


async def test_who_has_a_prompt_no_more_as_was_thought_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway's prefix map is stale: the decode worker has evicted the prompt. It refuses, and a second attempt finishes."""
    async with cluster(1, 1, RelaySettings()) as c:
        prompt = tokens(1, 100)
        output, _ = await c.generate("a", prompt, 12)
        await c.settled()
        await c.know_their_speed(monkeypatch)
        blocks, others = c.decodes[0].blocks, Owner(OwnerKind.SEQUENCE, "others")
        assert blocks.allocate(others, blocks.num_allocatable) is not None  # everything cached is evicted
        blocks.release(others)
        turn = [*prompt, *output, *tokens(2, 3)]
        await c.generate("b", turn, 12)
        outcomes = c.metrics.attempts
        assert outcomes.labels("tiny", "not_cached")._value.get() == 1
        assert outcomes.labels("tiny", "finished")._value.get() == 2
        await c.settled()
        assert (await c.generate("c", turn, 12))[1] == full_blocks(len(turn) - 1)  # known again
        assert outcomes.labels("tiny", "not_cached")._value.get() == 1


async def test_the_other_policy_knows_no_prefixes() -> None:
    async with cluster(1, 1, RelaySettings(policy="least_loaded", local_prefill="fallback")) as c:
        prompt = tokens(1, 100)
        output, _ = await c.generate("a", prompt, 12)
        await c.settled()
        await c.generate("b", [*prompt, *output, *tokens(2, 3)], 12)
        await c.settled()
        assert sum(c.values("kvrelay_handoffs_total", outcome="verified")) == 4  # both workers count both hand-offs


@pytest.mark.parametrize("local", [False, True])
async def test_a_request_s_blocks_stay_as_long_as_it_asks(local: bool) -> None:
    """Both workers retain the blocks of prompt and output. A block of two requests keeps the higher priority."""
    async with cluster(0 if local else 1, 1, RelaySettings(local_prefill="fallback")) as c:
        shared = tokens(1, 40)
        await c.generate("kept", [*shared, *tokens(2, 20)], 9, Retention(priority=80))
        await c.generate("once", [*shared, *tokens(3, 20)], 9, Retention(priority=0))
        await c.generate("plain", tokens(4, 20), 9)
        await c.settled()
        for worker in [*c.prefills, *c.decodes]:
            num_output = 9 - 1 if worker in c.decodes else 0
            assert list(worker.blocks.retained().values()) == [80] * ((60 + num_output) // BLOCK)
            blocks = worker.debug_kv()["ledger"]["retained"]
            assert blocks["blocks"] == (60 + num_output) // BLOCK
            assert blocks["at_most"] == 256
        assert c.values("kvrelay_retained_blocks") == [len(one.blocks.retained()) for one in [*c.prefills, *c.decodes]]
        blocks_of = c.decodes[0].blocks
        others = Owner(OwnerKind.LEASE, "others")
        # Another owner takes all blocks but the retained ones. That evicts only prefixes without retention.
        assert blocks_of.allocate(others, blocks_of.num_allocatable - len(blocks_of.retained())) is not None
        fingerprint = fake_card(block_size=BLOCK).layout.fingerprint()
        kept = HashChain(fingerprint, BLOCK).hashes_of_all([*shared, *tokens(2, 20)])
        assert blocks_of.num_cached_prefix(kept) == 60 // BLOCK
        assert blocks_of.num_cached_prefix(HashChain(fingerprint, BLOCK).hashes_of_all(tokens(4, 20))) == 0
        blocks_of.release(others)
