"""The ledger's balance, /debug/kv and /metrics for a pool in a known state."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvrelay.common.retention import Retention
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.books import ledger_json, ranges, unbalanced
from kvrelay.engine.kv.ledger import Ledger
from kvrelay.engine.kv.owners import Owner, OwnerKind
from kvrelay.worker.metrics import EngineMetrics


@pytest.fixture
def blocks() -> BlockManager:
    """10 blocks: 3 running (one of them shared), 2 leased, 1 cached, 4 free."""
    blocks = BlockManager(10, 4, lambda: 0.0)
    gone, first, second = (Owner(OwnerKind.SEQUENCE, name) for name in ("gone/1", "a/1", "b/1"))
    blocks.allocate(gone, 1)
    blocks.publish(gone, 0, b"g" * 16)
    blocks.release(gone)
    blocks.allocate(first, 2)
    blocks.publish(first, 0, b"a" * 16)
    blocks.allocate(second, 2, [b"a" * 16])
    blocks.allocate(Owner(OwnerKind.LEASE, "7"), 2)
    blocks.check_integrity()
    assert blocks.ledger() == Ledger(10, num_free=4, num_cached=1, num_leased=2, num_running=3)
    return blocks


def test_a_ledger_that_does_not_balance_is_not_ready(blocks: BlockManager) -> None:
    blocks._physical._free.pop()  # a block is lost
    (reason,) = unbalanced(blocks)
    assert reason.startswith("the ledger does not balance: Ledger(num_blocks=10, num_free=3,")
    with pytest.raises(AssertionError, match="lost: "):
        blocks.check_integrity()


def test_every_block_has_a_place(blocks: BlockManager) -> None:
    ledger = ledger_json(blocks)
    (group,) = ledger["groups"]
    places = group["blocks"]
    assert set(places) == {"cached", "sequence a/1", "sequence b/1", "lease 7"}
    free = _numbers(ledger["free_blocks"])
    seen = {number for text in places.values() for number in _numbers(text)}
    assert seen == set(range(10)) - set(free)
    assert len(free) == 4


def _numbers(text: str) -> list[int]:
    spans = [piece.split("-") for piece in text.split(",") if piece]
    return [number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)]


def test_ranges_are_short() -> None:
    assert ranges([]) == ""
    assert ranges([7, 3, 0, 1, 2, 9, 10]) == "0-3,7,9-10"
    assert ranges(range(100_000)) == "0-99999"


def test_the_ledger_as_json(blocks: BlockManager) -> None:
    ledger = ledger_json(blocks)
    del ledger["groups"][0]["blocks"], ledger["free_blocks"]
    assert ledger == {
        "num_blocks": 10,
        "free": 4,
        "cached": 1,
        "leased": 2,
        "running": 3,
        "balances": True,
        "groups": [{"window": None, "num_blocks": 6, "free": 0, "cached": 1, "leased": 2, "running": 3}],
        "retained": {"blocks": 0, "at_most": 5, "by_priority": {}},
        "owners": {"sequence a/1": 2, "sequence b/1": 2, "lease 7": 2},
    }


def test_each_group_has_its_ledger() -> None:
    blocks = BlockManager(6, 4, lambda: 0.0, windows=(None, 4))
    owner = Owner(OwnerKind.SEQUENCE, "a/1")
    blocks.allocate(owner, 2)
    blocks.slide(owner, 7)
    ledger = ledger_json(blocks)
    full, window = ledger["groups"]
    assert (full["running"], full["window"], full["blocks"]["sequence a/1"]) == (2, None, "0-1")
    assert (window["running"], window["window"], window["blocks"]["sequence a/1"]) == (1, 4, "3")
    assert (ledger["running"], ledger["free"]) == (3, 3)


def test_what_is_retained_is_shown(blocks: BlockManager) -> None:
    (held,) = [one for one in blocks.owners() if one.key == "b/1"]
    blocks.publish(held, 1, b"b" * 16)
    block_id = blocks.owned_blocks(held)[1]
    blocks.release(held, Retention(priority=80))  # a/1 still holds the first block
    registry = CollectorRegistry()
    EngineMetrics(registry, blocks, num_running=lambda: 0, num_waiting=lambda: 0)
    assert registry.get_sample_value("kvrelay_retained_blocks") == 1
    shown = ledger_json(blocks)["retained"]
    assert shown == {"blocks": 1, "at_most": 5, "by_priority": {"80": str(block_id)}}


def test_gauges_read_the_state_and_counters_count(blocks: BlockManager) -> None:
    registry, running = CollectorRegistry(), [3]
    metrics = EngineMetrics(registry, blocks, num_running=lambda: running[0], num_waiting=lambda: 5)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    for prefix in ("kvrelay_", "vllm:"):
        assert value(f"{prefix}num_requests_running") == 3
        assert value(f"{prefix}num_requests_waiting") == 5
        assert value(f"{prefix}kv_cache_usage_perc") == 0.5
    places = {place: value("kvrelay_kv_blocks", place=place) for place in ("free", "cached", "leased", "running")}
    assert places == {"free": 4, "cached": 1, "leased": 2, "running": 3}
    running[0] = 1
    blocks.release(Owner(OwnerKind.LEASE, "7"))
    assert value("vllm:num_requests_running") == 1
    assert value("kvrelay_kv_blocks", place="free") == 6
    assert value("kvrelay_kv_cache_usage_perc") == pytest.approx(0.3)
    counters = {
        "kvrelay_prompt_tokens_total": metrics.prompt_tokens,
        "kvrelay_cached_prompt_tokens_total": metrics.cached_tokens,
        "kvrelay_sampled_tokens_total": metrics.sampled_tokens,
        "kvrelay_preemptions_total": metrics.preemptions,
        "kvrelay_failed_steps_total": metrics.failed_steps,
    }
    for amount, (name, counter) in enumerate(counters.items(), 1):
        assert value(name) == 0
        counter.inc(amount)
        assert value(name) == amount
    metrics.step_s.observe(0.03)
    assert value("kvrelay_step_seconds_count") == 1
    assert value("kvrelay_step_seconds_bucket", le="0.05") == 1
    assert value("kvrelay_step_seconds_bucket", le="0.025") == 0
    assert b"\nvllm:num_requests_running 1.0\n" in generate_latest(registry)
