"""The decode worker's service with its model thread and its leases played by hand: what comes twice, late, wrong or never."""

from __future__ import annotations

import logging
from typing import cast

import pytest
from prometheus_client import CollectorRegistry

from kvrelay.common.block_hash import HashChain
from kvrelay.common.sampling import FinishReason, SampledToken, SamplingParams
from kvrelay.decode_worker.progress import Progress
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.decode_worker.service import DecodeService
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.decode_worker.welcome import DataPorts
from kvrelay.decode_worker.worker import LeasedBlocks
from kvrelay.engine.fake.engine import FakeEngine, expected_output, fake_card
from kvrelay.engine.kv.block_manager import BlockManager, Owner, OwnerKind, sequence_owner
from kvrelay.engine.step.sequence import Sequence
from kvrelay.wire.leases.lease import LeaseSettings, whole_block
from kvrelay.wire.leases.table import LeaseTable
from kvrelay.wire.messages import (
    Cancel,
    Cancelled,
    Commit,
    Failed,
    FailureCode,
    Grant,
    Message,
    Offer,
    Preempted,
    Refuse,
    Reject,
    Role,
    Submit,
    Timings,
    TokenDelta,
    Tokens,
)
from kvrelay.wire.metrics import WireMetrics
from kvrelay.worker.loop import ModelLoop
from kvrelay.worker.metrics import EngineMetrics
from kvrelay.worker.model_worker import Add, Command, ModelWorker, Remove, Report
from kvrelay.worker.service import Ports
from kvrelay.worker.submit import WorkerIdentity

CARD = fake_card()
FINGERPRINT = CARD.layout.fingerprint()
BLOCK = CARD.layout.block_size
EPOCH = 7


def submit(name: str, num_tokens: int = 6, max_tokens: int = 3) -> Submit:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    tokens = list(range(num_tokens))
    return Submit(request_id=name, attempt=1, token_ids=tokens, num_prompt_tokens=num_tokens, sampling=sampling)


def offer(name: str, token_ids: list[int], num_prompt_tokens: int | None = None) -> Offer:
    return Offer(
        request_id=name,
        attempt=1,
        gateway_id="gateway",
        fingerprint=FINGERPRINT,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        sampling=SamplingParams(max_tokens=8, temperature=0.0),
        block_hashes=HashChain(FINGERPRINT, BLOCK).hashes_of_all(token_ids),
    )


class Rig:
    """Everything of a decode worker but threads and sockets. Commands and reports travel when the test says so."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.deaf: set[str] = set()  # peers that nothing can be sent to
        self.commands: list[Command] = []
        self.reports: list[Report[Progress]] = []
        self.now_s = 1000.0
        self.blocks = BlockManager(CARD.num_blocks, BLOCK, lambda: 0.0)
        self.scheduler = DecodeScheduler(DecodeSchedulerSettings(), self.blocks, CARD.max_model_len)
        self.engine = FakeEngine(CARD)
        metrics = EngineMetrics(CollectorRegistry(), self.blocks, num_running=lambda: 0, num_waiting=lambda: 0)
        self.model = ModelWorker(self.engine, self.scheduler, metrics, self.reports.append, lambda: self.now_s)
        self.service = DecodeService(WorkerIdentity("decode", EPOCH, CARD, 512), self.blocks, lambda: self.now_s)
        leases = LeaseTable(
            LeaseSettings(EPOCH, FINGERPRINT, BLOCK, whole_block(CARD.block_nbytes), 30.0),
            LeasedBlocks(self.blocks),
            self.engine.store,
            self.service,
            WireMetrics(CollectorRegistry()),
            lambda: self.now_s,
        )
        ports = Ports(self._send, cast("ModelLoop[Command]", self))
        self.service.attach(ports, leases, DataPorts("tcp://nowhere:1"))

    def _send(self, role: Role, peer_id: str, message: Message) -> bool:
        if peer_id in self.deaf:
            return False
        self.sent.append((peer_id, message))
        return True

    def post(self, command: Command) -> None:
        """As ModelLoop."""
        self.commands.append(command)

    def wake(self) -> None:
        """As ModelLoop."""

    def ask(self, message: Message, peer_id: str = "gateway", role: Role = Role.GATEWAY) -> None:
        self.service.on_message(peer_id, role, message)

    def handle(self) -> None:
        """The model thread takes its commands."""
        while self.commands:
            self.model.handle(self.commands.pop(0))

    def hear(self) -> None:
        """The asyncio loop hears of everything that the model thread did."""
        while self.reports:
            self.service.on_report(self.reports.pop(0))

    def finish(self) -> None:
        """All goes on until nobody has anything to do."""
        for _ in range(200):
            self.handle()
            if self.model.has_work():
                self.model.step()
            self.hear()
            if not (self.commands or self.model.has_work()):
                return
        raise AssertionError("it never ends")

    def deltas(self, name: str) -> list[TokenDelta]:
        batches = [message.items for _, message in self.sent if isinstance(message, Tokens)]
        return [item for items in batches for item in items if item.request_id == name]

    def output(self, name: str) -> list[int]:
        return [token.token_id for delta in self.deltas(name) for token in delta.tokens]

    def told(self, kind: type[Message]) -> list[Message]:
        return [message for _, message in self.sent if isinstance(message, kind)]

    def assert_nothing_left(self) -> None:
        assert self.service.num_entries == 0
        self.scheduler.check_integrity()
        ledger = self.blocks.ledger()
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks, ledger


def test_a_cancel_that_crosses_the_last_token_keeps_the_name_until_the_removal_is_answered() -> None:
    """Else the answer, which is still on its way, would end the next request of that name under the model thread's feet."""
    rig = Rig()
    rig.ask(submit("a", max_tokens=1))
    rig.handle()
    rig.model.step()
    rig.ask(Cancel(request_id="a", attempt=1))
    rig.hear()  # the last token; the removal is not handled yet
    rig.ask(submit("a"))
    assert [message.code for message in rig.told(Failed) if isinstance(message, Failed)] == [FailureCode.INVALID]
    rig.finish()
    assert rig.told(Cancelled) == [Cancelled(request_id="a", attempt=1)]
    assert rig.output("a") == []
    rig.ask(submit("a"))
    rig.finish()
    assert rig.output("a") == expected_output(list(range(6)), 3, CARD.vocab_size)
    rig.assert_nothing_left()


def test_a_cancel_that_crosses_a_failed_step_is_answered_once() -> None:
    rig = Rig()
    rig.ask(submit("a"))
    rig.handle()
    rig.model.on_step_failed(RuntimeError("boom"))
    rig.ask(Cancel(request_id="a", attempt=1))
    rig.finish()
    assert rig.told(Cancelled) == [Cancelled(request_id="a", attempt=1)]
    assert not rig.told(Failed)
    rig.assert_nothing_left()


def test_a_preemption_is_told_and_the_sequence_goes_on_when_there_is_room() -> None:
    rig = Rig()
    thief = Owner(OwnerKind.LEASE, "thief")
    rig.ask(submit("a", max_tokens=9))
    rig.handle()
    rig.model.step()
    rig.blocks.allocate(thief, rig.blocks.num_allocatable)
    for _ in range(BLOCK):
        rig.model.step()
    rig.hear()
    assert rig.told(Preempted) == [Preempted(request_id="a", attempt=1)]
    rig.blocks.release(thief)
    rig.finish()
    assert rig.output("a") == expected_output(list(range(6)), 9, CARD.vocab_size)
    rig.assert_nothing_left()


def test_a_command_that_cannot_be_handled_ends_its_sequence_alone() -> None:
    rig = Rig()
    rig.ask(submit("a"))
    rig.ask(submit("b"))
    command = rig.commands[1]
    assert isinstance(command, Add)
    command.sequence.arrival_s = cast("float", "late")  # which the queue's order cannot be asked of
    rig.model.handle(rig.commands.pop(0))
    with pytest.raises(TypeError) as raised:
        rig.model.handle(command)
    rig.model.on_command_failed(rig.commands.pop(0), raised.value)
    rig.finish()
    failed = rig.told(Failed)
    assert [message.request_id for message in failed if isinstance(message, Failed)] == ["b"]
    assert rig.output("a") == expected_output(list(range(6)), 3, CARD.vocab_size)
    rig.assert_nothing_left()


def test_a_handed_over_sequence_that_cannot_be_taken_in_gives_its_blocks_back() -> None:
    rig = Rig()
    made = Sequence("a", 1, [1, 2], 2, SamplingParams(max_tokens=8), 0.0)
    allocation = rig.blocks.allocate(sequence_owner(made.key), 2)
    assert allocation is not None
    made.block_table = allocation.block_ids
    rig.model.on_command_failed(Add(made), TypeError("late"))
    assert rig.reports == [Report(failed=(made.key,), detail="not taken in: TypeError")]
    assert rig.blocks.ledger().num_free == CARD.num_blocks


def test_books_that_do_not_agree_after_a_failure_end_the_loop() -> None:
    rig = Rig()
    rig.ask(submit("a"))
    rig.ask(submit("b"))
    rig.handle()
    rig.model.step()
    rig.blocks.release(sequence_owner(("b", 1)))
    with pytest.raises(AssertionError, match="owns"):
        rig.model.on_command_failed(Remove(("x", 1)), RuntimeError("boom"))


def test_tokens_that_reach_nobody_end_their_sequences() -> None:
    """As after a gateway's death, if the offer came in behind it: nobody would ever take the sequence back."""
    rig = Rig()
    rig.ask(submit("a", max_tokens=100), "gone")
    rig.ask(submit("b", max_tokens=30))
    rig.deaf.add("gone")
    rig.handle()
    for _ in range(3):
        rig.model.step()
        rig.hear()
        rig.handle()
    assert [sequence.request_id for sequence in rig.scheduler.running] == ["b"]
    rig.finish()
    assert rig.output("b") == expected_output(list(range(6)), 30, CARD.vocab_size)
    assert rig.deltas("b")[-1].finish_reason is FinishReason.LENGTH
    rig.assert_nothing_left()


def test_only_the_gateway_that_asked_can_cancel() -> None:
    """Nor does the end of another one."""
    rig = Rig()
    rig.ask(submit("a"))
    rig.ask(Cancel(request_id="a", attempt=1), "another")
    assert rig.sent == [("another", Cancelled(request_id="a", attempt=1))]
    rig.service.on_peer_lost("another", Role.GATEWAY)
    rig.finish()
    assert rig.output("a") == expected_output(list(range(6)), 3, CARD.vocab_size)
    rig.assert_nothing_left()


def test_a_prefill_worker_with_a_gateways_name_cannot_cancel() -> None:
    rig = Rig()
    rig.ask(submit("honest"), peer_id="gateway")
    rig.ask(Cancel(request_id="honest", attempt=1), peer_id="gateway", role=Role.PREFILL)
    assert not rig.sent
    assert rig.service.num_entries == 1


@pytest.mark.parametrize(
    ("offered", "detail"),
    [
        (offer("a", [1] * CARD.max_model_len), "leave no room to generate"),
        (offer("a", [1, CARD.vocab_size]), "a token id lies outside"),
        (offer("a", [1, 2], num_prompt_tokens=3), "num_prompt_tokens is 3"),
        (offer("a", []), "num_prompt_tokens is 0"),
    ],
)
def test_an_offer_is_checked_like_a_submit(offered: Offer, detail: str) -> None:
    rig = Rig()
    rig.ask(offered, "prefill", Role.PREFILL)
    [(_, refused)] = rig.sent
    assert isinstance(refused, Refuse)
    assert refused.code is FailureCode.INVALID
    assert detail in refused.detail
    rig.assert_nothing_left()


@pytest.mark.parametrize("token_id", [-1, CARD.vocab_size])
def test_a_first_token_that_the_model_does_not_have_ends_the_lease(token_id: int) -> None:
    """It would break the step that looks it up, and with it every sequence in the batch."""
    rig = Rig()
    offered = offer("a", [1, 2, 3])
    rig.ask(offered, "prefill", Role.PREFILL)
    [(_, grant)] = rig.sent
    assert isinstance(grant, Grant)
    commit = Commit(
        lease_id=grant.lease_id,
        epoch=EPOCH,
        chain_hash=offered.block_hashes[-1],
        first_token=SampledToken(token_id),
        num_cached_tokens=0,
        timings=Timings(),
    )
    rig.ask(commit, "prefill", Role.PREFILL)
    _, rejected = rig.sent[-1]
    assert isinstance(rejected, Reject)
    assert rejected.code is FailureCode.INTEGRITY  # another attempt may succeed
    assert f"the first token is {token_id}; it must be 0 to {CARD.vocab_size - 1}" in rejected.detail
    rig.assert_nothing_left()


def test_what_is_sent_twice_is_answered_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    for _ in range(2):
        rig.ask(submit("a"))
        rig.ask(offer("b", [1, 2, 3]), "prefill", Role.PREFILL)
    kinds = [type(message).__name__ for _, message in rig.sent]
    assert kinds == ["Grant", "Failed", "Refuse"]
    rig.ask(Cancel(request_id="b", attempt=1))
    rig.ask(Cancel(request_id="b", attempt=1))
    rig.finish()
    assert rig.output("a") == expected_output(list(range(6)), 3, CARD.vocab_size)
    rig.assert_nothing_left()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
