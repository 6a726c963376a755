"""Workers that join, leave or do not fit, under a running relay."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.errors import KvrelayError
from kvrelay.engine.fake.engine import fake_card
from kvrelay.gateway.metrics import GatewayMetrics
from kvrelay.gateway.workers.discovery import Sharing
from kvrelay.gateway.workers.pool import FoundWorker, WorkerPool
from kvrelay.gateway.workers.worker import first_tokens_first
from kvrelay.wire.messages import Role, Submit, TokenDelta
from kvrelay.wire.network import Network
from kvrelay.wire.settings import LinkSettings

from ..players import ALL, PROMPT, Player, Stage, asking, good, stage, until


def found(*players: Player, retiring: Player | None = None) -> list[FoundWorker]:
    return [FoundWorker(player.role, player.address, accepts=player is not retiring) for player in players]


async def usable(on: Stage, number: int) -> None:
    await until(on.pool, lambda: sum(worker.is_usable for worker in on.pool.workers) == number)


async def test_workers_come_and_go() -> None:
    async with stage(good, good) as on:
        first, second = on.players
        on.pool.update(found(second))
        assert await on.run() == ALL
        assert (len(first.submits), len(second.submits)) == (0, 1)
        on.pool.update(found(first, second))
        await usable(on, 2)
        on.pool.update(found(first))
        assert await on.run() == ALL
        assert (len(first.submits), len(second.submits)) == (1, 1)


async def test_a_retiring_worker_finishes_and_gets_nothing_new() -> None:
    waiting: asyncio.Queue[tuple[Player, Submit]] = asyncio.Queue()
    async with stage(lambda player, submit: waiting.put_nowait((player, submit)), good) as on:
        slow, other = on.players
        on.pool.update(found(slow, other, retiring=other))
        running = asyncio.create_task(on.run(request_id="slow"))
        begun = await asyncio.wait_for(waiting.get(), 20)
        on.pool.update(found(slow, other, retiring=slow))
        assert await on.run() == ALL
        assert len(other.submits) == 1
        good(*begun)
        assert await running == ALL
        assert on.attempts("failed") == 0


async def test_what_runs_on_a_worker_that_is_gone_goes_on_elsewhere() -> None:
    async with stage(lambda player, submit: player.tokens(submit, 0, [100]), good) as on:
        goes, stays = on.players
        on.pool.update(found(goes, stays, retiring=stays))
        deltas = await on.deltas(asking(), lambda _: on.pool.update(found(stays)))
        assert [token.token_id for delta in deltas for token in delta.tokens] == ALL[0]
        assert stays.submits[0].token_ids == [*PROMPT, 100]  # it continued after the first token


async def test_another_worker_under_the_same_address_is_another_worker() -> None:
    async with stage(good) as on:
        (player,) = on.players
        before = on.pool.decodes[player.address]
        on.pool.update([FoundWorker(Role.DECODE, player.address, uid="2")])
        assert on.pool.decodes[player.address] is not before
        await usable(on, 1)
        assert await on.run() == ALL


async def test_a_worker_that_never_accepted_is_not_connected() -> None:
    async with stage(good) as on:
        on.pool.update([*found(*on.players), FoundWorker(Role.DECODE, "tcp://127.0.0.1:1", accepts=False)])
        assert len(on.pool.decodes) == 1


async def test_a_worker_with_other_kv_is_named_and_not_used(caplog: pytest.LogCaptureFixture) -> None:
    async with stage(good, good, prefill=good) as on:
        prefill, fits, other = on.players
        on.pool.update(found(prefill, fits))
        other.card = fake_card(model_id="another")
        on.pool.update(found(*on.players))
        await until(on.pool, lambda: bool(on.pool.decodes[other.address].misfit))
        assert not on.pool.decodes[other.address].is_usable
        decode, one = on.pool.decodes[other.address], on.pool.prefills[prefill.address]
        assert f"{decode} is not used: its KV is not that of {one}" in caplog.text
        assert str(one) == f"prefill worker {one.name} at {prefill.address}"
        assert "another" in caplog.text
        assert on.metrics.registry.get_sample_value("kvrelay_workers_refused", {"model": "tiny"}) == 1
        assert on.pool.not_ready() == []
        # The gateway uses the other layout only when no worker of the first one is left.
        on.pool.update(found(prefill, other))
        misfit = f"its KV is not that of {decode} (model_id: 'another' / 'fake')"
        assert on.pool.not_ready() == [f"no prefill worker is up ({misfit})"]
        on.pool.update(found(other))
        assert on.pool.not_ready() == []


async def test_a_worker_of_another_model_is_named_and_not_used() -> None:
    """A worker of another model connects first. It is not used, and its KV layout does not become the pool's."""
    async with stage(good, good) as on:
        fits, other = on.players
        on.pool.update([])
        on.pool.model = fits.model = "small"
        other.model, other.card = "large", fake_card(model_id="large")
        on.pool.update(found(other))
        await until(on.pool, lambda: bool(on.pool.decodes[other.address].misfit))
        assert on.pool.not_ready() == ["no decode worker is up (it serves 'large', and is listed for 'small')"]
        on.pool.update(found(fits, other))
        await until(on.pool, lambda: on.pool.decodes[fits.address].is_usable)
        assert [worker.address for worker in on.pool.workers if worker.misfit] == [other.address]
        assert await on.run() == ALL
        assert other.submits == []


async def test_workers_without_a_model_belong_to_the_only_one() -> None:
    """With several models each worker goes to the pool of its model. With one model, workers without a name belong to it."""
    pools = {name: cast(WorkerPool, Given()) for name in ("small", "large")}
    everybody = [FoundWorker(Role.DECODE, f"tcp://{name}:1", model=name) for name in ("small", "large", "medium", "")]
    Sharing(pools)(everybody)
    assert [pool.names for pool in pools.values()] == [["tcp://small:1"], ["tcp://large:1"]]  # type: ignore[attr-defined]
    only = Given()
    Sharing({"small": cast(WorkerPool, only)})(everybody)
    assert only.names == ["tcp://small:1", "tcp://:1"]


class Given:
    """Stands in for a pool, and keeps the workers' addresses."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def update(self, found: list[FoundWorker]) -> None:
        self.names = [worker.address for worker in found]


async def test_a_misfit_that_is_gone_is_no_misfit_any_more() -> None:
    async with stage(good) as on:
        (worker,) = on.pool.workers
        worker.misfit = "its KV is another"
        worker.on_lost("the connection broke")
        assert on.pool.not_ready() == ["no decode worker is up (the connection broke)"]


async def test_a_pool_of_none_is_named() -> None:
    async with stage(good, prefill=good) as on:
        prefill, decode = on.players
        on.pool.update(found(prefill))
        assert on.pool.absent == ["there is no decode worker"]
        assert on.pool.not_ready() == []  # another gateway could not serve either
        on.pool.update(found(decode))
        await usable(on, 1)
        assert on.pool.absent == on.pool.not_ready() == []
        assert await on.run() == ALL  # the decode worker also prefills
        assert decode.submits[0].decode is None


async def test_without_prefill_workers_there_may_be_no_service() -> None:
    async with stage(good, prefill=good, needs_prefill_workers=True, room_timeout_s=0.0) as on:
        on.pool.update(found(on.players[1]))
        await usable(on, 1)
        assert on.pool.absent == ["there is no prefill worker"]
        with pytest.raises(KvrelayError, match="there is no prefill worker; try again later"):
            await on.run()


@pytest.mark.parametrize("needs_prefill_workers", [False, True])
async def test_while_the_only_prefill_worker_is_lost_decode_workers_compute_prompts(
    needs_prefill_workers: bool,
) -> None:
    """The only prefill worker is listed but lost. Decode workers prefill, unless the settings need prefill workers."""
    async with stage(good, prefill=good, needs_prefill_workers=needs_prefill_workers, room_timeout_s=0.0) as on:
        (worker,) = on.pool.prefills.values()
        assert not on.pool.is_local_only
        worker.on_lost("the connection broke")
        if needs_prefill_workers:
            assert on.pool.not_ready() == ["no prefill worker is up (the connection broke)"]
            return
        assert on.pool.not_ready() == []
        assert await on.run() == ALL
        assert on.players[1].submits[0].decode is None


async def test_prefill_workers_that_were_never_up_are_waited_for() -> None:
    async with stage(good) as on:
        on.pool.update([*found(on.players[0]), FoundWorker(Role.PREFILL, "tcp://127.0.0.1:9")])
        assert not on.pool.is_local_only
        assert on.pool.not_ready()


async def test_workers_on_their_way_out_are_as_good_as_none() -> None:
    """All workers of a role retire. The gateway counts them as absent for new requests."""
    async with stage(good, prefill=good) as on:
        prefill, decode = on.players
        on.pool.update(found(prefill, decode, retiring=prefill))
        assert on.pool.is_local_only
        assert await on.run() == ALL
        assert decode.submits[0].decode is None
        on.pool.update(found(prefill, decode, retiring=decode))
        assert on.pool.absent == ["there is no decode worker"]
        assert on.pool.not_ready() == []


async def test_a_gateway_that_was_told_nothing_is_not_ready() -> None:
    """It reports that it has no workers, which an alert sees, too."""
    metrics = GatewayMetrics(CollectorRegistry())
    pool = WorkerPool(
        "g",
        metrics.of_model("tiny"),
        LinkSettings(),
        Network.open(),
        needs_prefill_workers=False,
    )
    assert pool.not_ready() == ["who the workers are is not known yet"]
    for role in ("prefill", "decode"):
        assert metrics.registry.get_sample_value("kvrelay_workers_up", {"model": "tiny", "role": role}) == 0
    pool.update([])
    assert pool.not_ready() == []
    assert pool.absent == ["there is no decode worker"]
    await pool.stop()


def test_who_has_no_token_yet_comes_first() -> None:
    """Deltas of sequences without a token come first. All others keep their order."""
    items = [
        TokenDelta(request_id=name, attempt=1, index=index, tokens=[])
        for name, index in zip("abcd", (7, 0, 3, 0), strict=True)
    ]
    assert [item.request_id for item in first_tokens_first(items)] == ["b", "d", "a", "c"]
    later = [items[0], items[2]]
    assert first_tokens_first(later) is later
