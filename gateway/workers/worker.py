"""One worker, as its gateway sees it: a control link, the last report, and its attempts."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrelay.gateway.workers.load import Load, WorkerView
from kvrelay.wire.control.client import ControlClient
from kvrelay.wire.messages import (
    AskImages,
    Cancelled,
    Failed,
    HandedOver,
    Hello,
    HelloRefused,
    ImagesTold,
    KeyTokens,
    Message,
    Preempted,
    Role,
    Status,
    TokenDelta,
    Tokens,
    Welcome,
    Withdrawn,
    WorkerState,
)
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.network import Network
from kvrelay.wire.security.authentication import ClientProof
from kvrelay.wire.security.keys import WireKeys
from kvrelay.wire.settings import LinkSettings

if TYPE_CHECKING:
    from kvrelay.gateway.workers.pool import WorkerPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """An attempt's event: one of its workers is lost."""

    role: Role
    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    """An attempt's event: a worker ends it unfinished. Holds the worker's last message."""

    role: Role
    answer: Failed | Cancelled


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """An attempt's event: the request's time is up."""


AttemptEvent = TokenDelta | HandedOver | Preempted | Withdrawn | GaveUp | WorkerLost | DeadlinePassed
Listener = Callable[[AttemptEvent], None]  # an attempt's callback; must not raise or wait


class Worker:
    """The worker at one address. Implements :class:`kvrelay.wire.control.client.ClientHandler`."""

    def __init__(
        self,
        role: Role,
        address: str,
        uid: str,
        owner: WorkerPool,
        hello: Hello,
        link: tuple[LinkSettings, WireMetrics, Network, WireKeys | None],
    ) -> None:
        self.role = role
        self.address = address
        self.uid = uid
        self.name = ""  # its own; that of the last one there while none is up
        self.welcome: Welcome | None = None
        self.fingerprint: bytes | None = None  # of its KV layout, while the worker is up
        self.status: Status | None = None
        self.problem = "not connected yet"
        self.has_answered = False  # since this gateway knows it, be it with a refusal
        self.up_since_s = 0.0  # on the network's clock
        self.misfit = ""  # why it does not fit the other workers; empty if it does
        self.is_retiring = False  # it finishes its requests and gets no new ones
        self.read_images = False  # prompts that it computes may have images, or might when it was last up
        self.load: Load | None = None  # load and attempts, while the worker is up
        self._asked: dict[int, asyncio.Future[ImagesTold | None]] = {}  # by the number of the question
        self._numbers = itertools.count()
        self._owner = owner
        settings, metrics, network, keys = link
        self._clock = network.clock
        proof = None if keys is None else ClientProof(keys, role)
        self.client = ControlClient(address, hello, self, settings, metrics=metrics, network=network, proof=proof)

    def __str__(self) -> str:
        """Role, name (once it was up) and address, for people."""
        return f"{self.role} worker {f'{self.name} at ' if self.name else 'at '}{self.address}"

    def on_welcome(self, welcome: Welcome) -> None:
        """The link is up."""
        self.has_answered = True
        if welcome.role is not self.role:
            self.problem = f"{self.address} is a {welcome.role} worker, but was given as a {self.role} worker"
            logger.error("%s", self.problem)
            return
        self.name = welcome.worker_id
        self.welcome, self.fingerprint = welcome, welcome.card.layout.fingerprint()
        self.status = None
        self.up_since_s = self._clock()
        card = welcome.card
        self.read_images = not card.no_images
        self.load = Load(card.layout.block_size, card.layout.geometry.windows)
        logger.info(
            "%s: up, %s, %d KV blocks, protocol %d", self, card.layout.model_id, card.num_blocks, welcome.protocol
        )
        self._owner.on_welcome(self)
        self._owner.take_stock()

    def on_message(self, message: Message) -> None:
        """Take a report, or pass an answer to its attempt."""
        match message:
            case Status():
                was_wrong, was_usable = self.is_wrong, self.is_usable
                self.status = message
                if self.is_wrong and not was_wrong:
                    self._on_wrong()
                if self.load is not None:
                    self.load.on_status(message, self._clock())
                if self.is_usable is not was_usable:
                    self._owner.take_stock()
                self._owner.changed.set()
            case KeyTokens():
                self._owner.on_key_tokens(message)
            case ImagesTold(query=query):
                if (answer := self._asked.get(query)) is not None and not answer.done():
                    answer.set_result(message)
            case Tokens(items=items):
                for item in first_tokens_first(items):
                    self._owner.deliver((item.request_id, item.attempt), item)
            case HandedOver() | Preempted() | Withdrawn():
                self._owner.deliver(message.key, message)
            case Failed() | Cancelled():
                self._owner.deliver(message.key, GaveUp(self.role, message))
            case _:
                logger.warning("unexpected %s from %s", type(message).__name__, self)

    def on_lost(self, reason: str) -> None:
        """The worker is lost; tell its attempts."""
        logger.warning("%s is lost: %s", self, reason)
        self.abandon(reason)
        self.welcome = self.fingerprint = self.status = self.load = None
        self.problem, self.misfit = reason, ""  # another worker may come back at this address
        self._owner.take_stock()

    def on_refused(self, refused: HelloRefused) -> None:
        """The worker refuses gateways like this one."""
        self.has_answered = True
        if self.problem != refused.detail:
            logger.error("%s refuses this gateway: %s", self, refused.detail)
        self.problem = refused.detail

    def _on_wrong(self) -> None:
        """The worker says that it computes wrongly and will end. Its messages no longer count."""
        reason = "it computes wrongly"
        logger.error("%s: %s", self, reason)
        self.problem = reason
        self._owner.on_wrong(self)
        self.abandon(reason)

    @property
    def is_wrong(self) -> bool:
        """Whether the worker has said that it computes wrongly."""
        return self.status is not None and self.status.state is WorkerState.WRONG

    @property
    def is_usable(self) -> bool:
        """Whether requests may be sent to it."""
        is_leaving = self.is_retiring or (self.status is not None and self.status.state is not WorkerState.READY)
        return self.welcome is not None and self.client.is_up and not is_leaving and not self.misfit

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens per second that it could compute now, as last reported; None if unknown."""
        return None if self.status is None else self.status.prompt_tokens_per_s

    def foreign_to(self, model: str) -> str:
        """Why it does not serve ``model``. Empty if it does, names no model, or is not up."""
        name = "" if self.welcome is None else self.welcome.model
        return f"it serves {name!r}, and is listed for {model!r}" if name and model and name != model else ""

    def differences(self, other: Worker) -> str:
        """How its KV layout differs from that of ``other``. Empty if it does not, or if one of them is not up."""
        if self.welcome is None or other.welcome is None:
            return ""
        differences = other.welcome.card.layout.differences(self.welcome.card.layout)
        return f"its KV is not that of {other} ({'; '.join(differences)})" if differences else ""

    @property
    def reads_images(self) -> bool:
        """Whether it is up, and prompts that it computes may have images."""
        return self.read_images and self.welcome is not None

    def ask_images(self, sizes: Sequence[tuple[int, int]]) -> asyncio.Future[ImagesTold | None]:
        """Ask what a prompt has in the place of images of these sizes. The answer is None if the worker is lost.

        Cancel the future to ask no longer.
        """
        query = next(self._numbers)
        answer = self._asked[query] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self._asked.pop(query))
        if not self.client.send(AskImages(query=query, sizes=list(sizes))):
            answer.set_result(None)
        return answer

    def abandon(self, reason: str) -> None:
        """Tell its attempts, and whoever waits for an answer, that it is lost."""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)
        for key in [] if self.load is None else self.load.attempts:
            self._owner.deliver(key, WorkerLost(self.role, self.address, reason))

    def holds(self, num_tokens: int) -> bool:
        """Whether a request of ``num_tokens``, output included, is within its limit."""
        return self.welcome is not None and num_tokens <= self.welcome.card.max_model_len

    def view(self, num_tokens: int) -> WorkerView | None:
        """The worker as routing sees it; None if it is not usable, or cannot hold a request of ``num_tokens``."""
        if self.welcome is None or self.fingerprint is None or self.load is None or not self.is_usable:
            return None
        card, status = self.welcome.card, self.status
        if num_tokens > card.max_model_len:
            return None
        return WorkerView(
            address=self.address,
            fingerprint=self.fingerprint,
            epoch=self.welcome.epoch,
            num_requests=self.load.num_requests,
            num_waiting_tokens=self.load.num_waiting_tokens,
            num_free_blocks=self.load.num_free_blocks(card.num_blocks),
            num_blocks=card.num_blocks,
            block_size=card.layout.block_size,
            max_running=0 if status is None else status.max_running,
            tokens_per_s=self.tokens_per_s,
            adapters=() if status is None else status.adapters,
            windows=card.layout.geometry.windows,
        )


def first_tokens_first(items: list[TokenDelta]) -> list[TokenDelta]:
    """One step's tokens, reordered: requests without a token so far come first, because they have waited longest.

    New requests are last in a worker's batch, and each request before them takes some of the gateway's time.
    """
    firsts = [item for item in items if item.index == 0]
    return firsts + [item for item in items if item.index] if firsts else items
