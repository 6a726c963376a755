"""A transfer whose way to the decode worker has died: it fails as one, and its blocks are let go of."""

from __future__ import annotations

from collections import Counter

from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import SamplingParams
from kvrelay.wire.errors import WireError
from kvrelay.wire.messages import FailureCode, Grant, Message, Offer
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.transfers import DecodeLink, TransferSettings, TransferTable


class Store:
    """Counts who reads what."""

    def __init__(self) -> None:
        self.open: Counter[int] = Counter()

    def open_read(self, block_id: int) -> memoryview:
        self.open[block_id] += 1
        return memoryview(b"x")

    def close_read(self, block_id: int) -> None:
        self.open[block_id] -= 1


class Handler:
    def __init__(self) -> None:
        self.failed: list[tuple[FailureCode, str]] = []
        self.released: list[tuple[str, int]] = []

    def on_verified(self, key: tuple[str, int]) -> None:
        raise AssertionError(key)

    def on_failed(self, key: tuple[str, int], code: FailureCode, detail: str, retry_after_s: float | None) -> None:
        self.failed.append((code, detail))

    def on_blocks_released(self, key: tuple[str, int]) -> None:
        self.released.append(key)


class Control:
    def send(self, message: Message) -> bool:
        return True


class DeadSender:
    def send(self, *_: object) -> object:
        raise WireError("this block sender is closed: its decode worker is lost")


def test_a_sender_that_died_fails_the_transfer_and_leaves_no_block_open() -> None:
    store, handler = Store(), Handler()
    table = TransferTable(store, handler, TransferSettings(), WireMetrics(CollectorRegistry()), lambda: 0.0)
    link = DecodeLink(Control(), DeadSender())  # type: ignore[arg-type]
    offer = Offer(
        request_id="r",
        attempt=1,
        gateway_id="g",
        fingerprint=b"",
        token_ids=[1, 2, 3],
        num_prompt_tokens=3,
        sampling=SamplingParams(max_tokens=1),
        block_hashes=[b"a", b"b"],
    )
    table.open(("r", 1), link, offer, [4, 7])
    grant = Grant(request_id="r", attempt=1, lease_id=1, epoch=1, num_cached_blocks=0, ttl_s=10.0)
    table.on_message(link, grant)
    table.blocks_ready(("r", 1), 2)
    assert handler.failed == [(FailureCode.PEER_LOST, "this block sender is closed: its decode worker is lost")]
    assert not +store.open, "a block is read for ever"
    table.tick()
    assert handler.released == [("r", 1)]
