"""The prefill worker's service. The test plays the model thread, links and transfers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import msgspec

from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.fake.engine import fake_card
from kvrelay.engine.images.interface import ImageReader
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.prefill_worker.links import DecodeLinks
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from kvrelay.prefill_worker.service import PrefillService
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.wire.messages import DecodeTarget, FailureCode, Offer, Submit
from kvrelay.wire.transfers.table import TransferTable
from kvrelay.wire.transfers.transfer import DecodeLink
from tests.worker.rig import ServiceRig

CARD = fake_card()
PROMPT = list(range(6))
DECODE = "tcp://decode:1"


def submit(name: str, max_tokens: int = 3, address: str = DECODE) -> Submit:
    return Submit(
        request_id=name,
        attempt=1,
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        decode=DecodeTarget(address=address),
    )


class PlayedTransfers:
    """Transfers that are granted and committed at once, and end when the test says so."""

    def __init__(self) -> None:
        self.on_failed: Callable[..., None]
        self.open_keys: list[tuple[str, int]] = []
        self.committed: list[tuple[str, int]] = []
        self.aborted: list[tuple[str, int]] = []
        self.offers: list[Offer] = []
        self.position_offsets: dict[tuple[str, int], int] = {}  # of the commits
        self.broken: set[tuple[str, int]] = set()
        self.block_left_s = -math.inf

    def left_s(self, key: tuple[str, int]) -> float:
        return self.block_left_s

    def open(self, key: tuple[str, int], link: DecodeLink, offer: Offer, block_tables: list[list[int]]) -> None:
        self.open_keys.append(key)
        self.offers.append(offer)

    def blocks_ready(self, key: tuple[str, int], num_blocks: int) -> None:
        if key in self.broken and num_blocks > 0:
            self.on_failed(key, FailureCode.PEER_LOST, "this block sender is closed: its decode worker is lost", None)

    def commit(self, key: tuple[str, int], token: SampledToken, num_cached_tokens: int, position_offset: int) -> None:
        self.committed.append(key)
        self.position_offsets[key] = position_offset

    def abort(self, key: tuple[str, int], reason: str) -> None:
        self.aborted.append(key)

    def tick(self) -> None:
        pass


class PlayedLinks:
    """Links that are up, unless the test says otherwise."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.resets: list[str] = []

    def link_to(self, address: str) -> DecodeLink | None:
        return None if address in self.down else cast("DecodeLink", object())

    def reset(self, address: str, reason: str) -> None:
        self.resets.append(address)

    def sweep(self) -> None:
        pass


class Rig(ServiceRig[PrefillService]):
    """A prefill worker."""

    max_told = 1

    def __init__(self, reader: ImageReader | None = None) -> None:
        blocks = BlockManager(CARD.num_blocks, CARD.layout.block_size, lambda: 0.0)
        self.scheduler = PrefillScheduler(PrefillSchedulerSettings(), blocks, CARD.max_model_len, "cpu")
        card = CARD if reader is None else msgspec.structs.replace(CARD, no_images="")
        super().__init__(card, blocks, self.scheduler, PrefillService, reader)
        self.transfers = PlayedTransfers()
        self.links = PlayedLinks()
        self.transfers.on_failed = self.service.on_failed
        self.service.attach(cast("DecodeLinks", self.links), cast("TransferTable", self.transfers))

    def submit(self, name: str, max_tokens: int = 3) -> Submit:
        return submit(name, max_tokens)

    def settle(self) -> None:
        self.finish()
        for key in self.transfers.committed:
            self.service.on_verified(key)
        self.transfers.committed.clear()
        self.release_sends()

    def release_sends(self) -> None:
        for key in self.transfers.open_keys:
            self.service.on_blocks_released(key)
        self.transfers.open_keys.clear()

    def assert_nothing_left(self) -> None:
        super().assert_nothing_left()
        assert self.service._linkless() == []
