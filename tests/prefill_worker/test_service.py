"""The prefill worker's service with model thread, links and transfers played by hand: what comes twice, late or never."""

from __future__ import annotations

from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.sampling import SampledToken, SamplingParams
from kvrelay.engine.fake.engine import FakeEngine, expected_output, fake_card
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.prefill_worker.links import DecodeLinks
from kvrelay.prefill_worker.scheduler import Computed, PrefillScheduler
from kvrelay.prefill_worker.service import PrefillService
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.wire.errors import WireError
from kvrelay.wire.messages import (
    Cancel,
    Cancelled,
    DecodeTarget,
    Failed,
    FailureCode,
    HandedOver,
    Message,
    Offer,
    Role,
    Submit,
    Timings,
    Tokens,
)
from kvrelay.wire.transfers import DecodeLink, TransferTable
from kvrelay.worker.loop import ModelLoop
from kvrelay.worker.metrics import EngineMetrics
from kvrelay.worker.model_worker import Command, ModelWorker, Report
from kvrelay.worker.service import Ports
from kvrelay.worker.submit import WorkerIdentity

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
    """Every transfer is granted and committed at once; it ends when the test says so."""

    def __init__(self) -> None:
        self.open_keys: list[tuple[str, int]] = []
        self.committed: list[tuple[str, int]] = []
        self.aborted: list[tuple[str, int]] = []
        self.broken: set[tuple[str, int]] = set()

    def open(self, key: tuple[str, int], link: DecodeLink, offer: Offer, block_ids: list[int]) -> None:
        self.open_keys.append(key)

    def blocks_ready(self, key: tuple[str, int], num_blocks: int) -> None:
        if key in self.broken and num_blocks > 0:
            raise WireError("this block sender is closed: its decode worker is lost")

    def commit(self, key: tuple[str, int], token: SampledToken, num_cached_tokens: int, timings: Timings) -> None:
        self.committed.append(key)

    def abort(self, key: tuple[str, int], reason: str) -> None:
        self.aborted.append(key)

    def tick(self) -> None:
        pass


class PlayedLinks:
    """Links are up, unless the test says otherwise."""

    def __init__(self) -> None:
        self.down: set[str] = set()
        self.resets: list[str] = []

    def link_to(self, address: str) -> DecodeLink | None:
        return None if address in self.down else cast("DecodeLink", object())

    def reset(self, address: str, reason: str) -> None:
        self.resets.append(address)

    def sweep(self) -> None:
        pass


class Rig:
    """Everything of a prefill worker but threads and sockets. Commands and reports travel when the test says so."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.commands: list[Command] = []
        self.reports: list[Report[Computed]] = []
        self.now_s = 1000.0
        self.transfers = PlayedTransfers()
        self.links = PlayedLinks()
        self.blocks = BlockManager(CARD.num_blocks, CARD.layout.block_size, lambda: 0.0)
        self.scheduler = PrefillScheduler(PrefillSchedulerSettings(), self.blocks, CARD.max_model_len)
        metrics = EngineMetrics(CollectorRegistry(), self.blocks, num_running=lambda: 0, num_waiting=lambda: 0)
        self.model = ModelWorker(FakeEngine(CARD), self.scheduler, metrics, self.reports.append, lambda: self.now_s)
        self.service = PrefillService(WorkerIdentity("prefill", 7, CARD, 512), self.blocks, lambda: self.now_s)
        self.service.attach(
            Ports(self._send, cast("ModelLoop[Command]", self)),
            cast("DecodeLinks", self.links),
            cast("TransferTable", self.transfers),
        )

    def _send(self, role: Role, peer_id: str, message: Message) -> bool:
        self.sent.append((peer_id, message))
        return True

    def post(self, command: Command) -> None:
        """As ModelLoop."""
        self.commands.append(command)

    def wake(self) -> None:
        """As ModelLoop."""

    def ask(self, message: Message, peer_id: str = "gateway") -> None:
        self.service.on_message(peer_id, Role.GATEWAY, message)

    def handle(self) -> None:
        """The model thread takes its commands."""
        while self.commands:
            self.model.handle(self.commands.pop(0))

    def hear(self) -> None:
        """The asyncio loop hears of everything that the model thread did."""
        while self.reports:
            self.service.on_report(self.reports.pop(0))

    def finish(self) -> None:
        """All is computed, and heard of."""
        for _ in range(200):
            self.handle()
            if self.model.has_work():
                self.model.step()
            self.hear()
            if not (self.commands or self.model.has_work()):
                return
        raise AssertionError("it never ends")

    def release_sends(self) -> None:
        for key in self.transfers.open_keys:
            self.service.on_blocks_released(key)
        self.transfers.open_keys.clear()

    def told(self, kind: type[Message]) -> list[Message]:
        return [message for _, message in self.sent if isinstance(message, kind)]

    def failures(self) -> list[tuple[str, FailureCode]]:
        return [(message.request_id, message.code) for _, message in self.sent if isinstance(message, Failed)]

    def assert_nothing_left(self) -> None:
        assert self.service.num_entries == 0
        assert self.service._linkless == {}
        self.scheduler.check_integrity()
        ledger = self.blocks.ledger()
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks, ledger


def test_a_cancel_that_crosses_the_token_keeps_the_name_until_the_removal_is_answered() -> None:
    """Else its answer would say of the next request of that name that the model thread is done with its blocks."""
    rig = Rig()
    rig.ask(submit("a"))
    rig.handle()
    rig.model.step()
    rig.ask(Cancel(request_id="a", attempt=1))
    rig.hear()  # the token; the removal is not handled yet
    rig.release_sends()
    rig.ask(submit("a"))
    assert rig.failures() == [("a", FailureCode.INVALID)]
    rig.finish()
    assert rig.told(Cancelled) == [Cancelled(request_id="a", attempt=1)]
    rig.ask(submit("a"))
    rig.finish()
    [tokens] = rig.told(Tokens)
    assert isinstance(tokens, Tokens)
    assert [token.token_id for token in tokens.items[0].tokens] == expected_output(PROMPT, 1, CARD.vocab_size)
    rig.service.on_verified(("a", 1))
    rig.release_sends()
    assert rig.told(HandedOver) == [HandedOver(request_id="a", attempt=1)]
    rig.assert_nothing_left()


def test_a_cancel_that_crosses_a_failed_step_is_answered_once() -> None:
    rig = Rig()
    rig.ask(submit("a"))
    rig.handle()
    rig.model.on_step_failed(RuntimeError("boom"))
    rig.ask(Cancel(request_id="a", attempt=1))
    rig.hear()
    rig.finish()
    assert rig.told(Cancelled) == [Cancelled(request_id="a", attempt=1)]
    assert rig.failures() == []
    rig.assert_nothing_left()


def test_a_prompt_that_cannot_even_be_scheduled_is_ended_alone() -> None:
    rig = Rig()
    rig.ask(submit("a"))
    rig.ask(submit("b", max_tokens=1))
    rig.handle()
    rig.scheduler.waiting[0].chain = None
    with pytest.raises(AssertionError) as raised:
        rig.model.step()
    rig.model.on_step_failed(raised.value)
    rig.finish()
    assert rig.failures() == [("a", FailureCode.INTERNAL)]
    assert len(rig.told(Tokens)) == 1
    rig.assert_nothing_left()


def test_a_command_that_cannot_be_handled_ends_its_prompt_alone() -> None:
    rig = Rig()
    rig.ask(submit("a"))
    rig.model.on_command_failed(rig.commands.pop(0), RuntimeError("boom"))
    rig.ask(submit("b", max_tokens=1))
    rig.finish()
    assert rig.failures() == [("a", FailureCode.INTERNAL)]
    assert len(rig.told(Tokens)) == 1
    rig.assert_nothing_left()


def test_one_link_that_breaks_in_the_middle_of_a_report_costs_no_other_its_token() -> None:
    rig = Rig()
    rig.transfers.broken.add(("a", 1))
    rig.ask(submit("a"))
    rig.ask(submit("b", max_tokens=1))
    rig.finish()
    assert rig.failures() == []  # its sends may still read the blocks
    assert rig.transfers.aborted == [("a", 1)]
    assert len(rig.told(Tokens)) == 1
    rig.release_sends()
    assert rig.failures() == [("a", FailureCode.INTERNAL)]
    rig.assert_nothing_left()


def test_only_the_gateway_that_asked_can_cancel() -> None:
    """Nor does the end of another one."""
    rig = Rig()
    rig.ask(submit("a", max_tokens=1))
    rig.ask(Cancel(request_id="a", attempt=1), "another")
    assert rig.sent == [("another", Cancelled(request_id="a", attempt=1))]
    rig.service.on_peer_lost("another", Role.GATEWAY)
    rig.finish()
    assert len(rig.told(Tokens)) == 1
    rig.assert_nothing_left()


def test_a_decode_worker_that_takes_no_blocks_is_fenced_off() -> None:
    """Cancelled, but sends in flight still read the blocks, on a link whose control side is well."""
    rig = Rig()
    rig.ask(submit("a"))
    rig.finish()
    rig.ask(Cancel(request_id="a", attempt=1))
    rig.service.tick()
    rig.now_s += 4.0
    rig.service.tick()
    assert rig.links.resets == []
    rig.now_s += 2.0
    rig.service.tick()
    rig.service.tick()  # the sends end soon, not at once: the new link must not be reset with the old one
    assert rig.links.resets == [DECODE]
    rig.release_sends()
    rig.assert_nothing_left()


def test_what_waits_for_a_link_is_forgotten_with_its_request() -> None:
    rig = Rig()
    rig.links.down.add(DECODE)
    for name in ("a", "b"):
        rig.ask(submit(name))
    rig.finish()
    rig.ask(Cancel(request_id="a", attempt=1))
    rig.service.tick()
    assert [entry.sequence.request_id for entry in rig.service._linkless[DECODE]] == ["b"]
    rig.now_s += 11.0
    rig.service.tick()
    assert rig.failures() == [("b", FailureCode.PEER_LOST)]
    rig.assert_nothing_left()


def test_a_link_that_comes_up_late_gets_offer_and_commit() -> None:
    rig = Rig()
    rig.links.down.add(DECODE)
    rig.ask(submit("a"))
    rig.finish()
    assert rig.transfers.open_keys == []
    rig.service.on_link_up(DECODE, cast("DecodeLink", object()))
    assert rig.transfers.open_keys == rig.transfers.committed == [("a", 1)]
    rig.service.on_verified(("a", 1))
    rig.release_sends()
    rig.assert_nothing_left()
