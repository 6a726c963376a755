"""A worker's service and model worker, without threads and sockets. The rigs of both roles are built on this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from prometheus_client import CollectorRegistry

from kvrelay.common.model_card import ModelCard
from kvrelay.engine.fake.engine import FakeEngine
from kvrelay.engine.images.interface import ImageReader
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.step.leader import Leader
from kvrelay.wire.messages import Cancel, Cancelled, Failed, FailureCode, Message, Role, Submit, TokenDelta, Tokens
from kvrelay.worker.adapters import AdapterStore
from kvrelay.worker.images import ImageDesk
from kvrelay.worker.loop import ModelLoop
from kvrelay.worker.metrics import EngineMetrics
from kvrelay.worker.model_worker import Command, ModelWorker, Report
from kvrelay.worker.scheduling.scheduler import Scheduler
from kvrelay.worker.service import Ports, Service
from kvrelay.worker.submit import WorkerIdentity
from tests.guides import PlayedGuides
from tests.images import PlayedThreads

EPOCH = 7

S = TypeVar("S", bound=Service[Any])


class ServiceRig(Generic[S]):
    """The test delivers commands and reports, and answers requests for guides. A role adds its side of hand-offs."""

    max_told = 100  # the most tokens that this role sends of one request

    def __init__(
        self,
        card: ModelCard,
        blocks: BlockManager,
        scheduler: Scheduler,
        service: type[S],
        reader: ImageReader | None = None,
    ) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.deaf: set[str] = set()  # peers to which sending fails
        self.commands: list[Command] = []
        self.reports: list[Report] = []
        self.now_s = 1000.0
        self.blocks = blocks
        self.guides = PlayedGuides()
        self.threads = PlayedThreads()
        self.engine = FakeEngine(card)
        metrics = EngineMetrics(CollectorRegistry(), blocks, num_running=lambda: 0, num_waiting=lambda: 0)
        self.model = ModelWorker(Leader(self.engine), scheduler, metrics, self.reports.append, self.clock)
        self.service = service(
            WorkerIdentity("worker", EPOCH, card, max_waiting=512, max_running=64), blocks, self.clock
        )
        self.service.connect(
            Ports(
                self._send,
                cast("ModelLoop", self),
                self.call,
                self.guides,
                lambda: scheduler.prompt_tokens_per_s,
                AdapterStore(None, None),
                ImageDesk(reader, self.call, card.no_images, self.threads),
            )
        )

    def clock(self) -> float:
        return self.now_s

    def _send(self, role: Role, peer_id: str, message: Message) -> bool:
        if peer_id in self.deaf:
            return False
        self.sent.append((peer_id, message))
        return True

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """See OnLoop."""
        function(*args)

    def post(self, command: Command) -> None:
        """See ModelLoop."""
        self.commands.append(command)

    def wake(self) -> None:
        """See ModelLoop."""

    def submit(self, name: str, max_tokens: int = 3) -> Submit:
        """A request as this role gets it."""
        raise NotImplementedError

    def ask(self, message: Message, peer_id: str = "gateway", role: Role = Role.GATEWAY) -> None:
        self.service.on_message(peer_id, role, message)

    def handle(self) -> None:
        """The model worker handles all its commands."""
        while self.commands:
            self.model.handle(self.commands.pop(0))

    def hear(self) -> None:
        """The service gets all reports of the model worker."""
        while self.reports:
            self.service.on_report(self.reports.pop(0))

    def finish(self) -> None:
        """Handle commands, run steps and deliver reports until there is nothing left to do."""
        for _ in range(200):
            self.handle()
            if self.model.has_work():
                self.model.step()
            self.hear()
            if not (self.commands or self.model.has_work()):
                return
        raise AssertionError("it never ends")

    def end(self, how: str) -> None:
        """End the request "a": by a ``cancel``, by its ``deadline``, or because its ``gateway`` is ``lost``."""
        if how == "cancel":
            self.ask(Cancel(request_id="a", attempt=1))
        elif how == "deadline":
            self.now_s += 6.0
            self.service.tick()
        else:
            self.service.on_peer_lost("gateway", Role.GATEWAY)

    def settle(self) -> None:
        """Finish all requests; a role's hand-offs succeed meanwhile."""
        self.finish()

    def deltas(self, name: str) -> list[TokenDelta]:
        batches = [message.items for _, message in self.sent if isinstance(message, Tokens)]
        return [item for items in batches for item in items if item.request_id == name]

    def output(self, name: str) -> list[int]:
        return [token.token_id for delta in self.deltas(name) for token in delta.tokens]

    def told(self, kind: type[Message]) -> list[Message]:
        return [message for _, message in self.sent if isinstance(message, kind)]

    def failed(self) -> list[Failed]:
        return [message for _, message in self.sent if isinstance(message, Failed)]

    def failures(self) -> list[tuple[str, FailureCode]]:
        return [(message.request_id, message.code) for message in self.failed()]

    def cancelled(self) -> list[str]:
        return [message.request_id for _, message in self.sent if isinstance(message, Cancelled)]

    def assert_nothing_left(self) -> None:
        assert not self.service.entries
        self.model._scheduler.check_integrity()
        ledger = self.blocks.ledger()
        assert ledger.num_free + ledger.num_cached == ledger.num_blocks, ledger
