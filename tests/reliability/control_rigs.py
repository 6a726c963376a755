"""A worker behind its control socket, without threads and sockets. The caller passes frames and runs each step.

Exceptions that LoopSocket, the model loop or lease events would catch and log are raised here, and count as findings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry

from kvrelay.common.block_digests import digests_of
from kvrelay.common.block_hash import HashChain
from kvrelay.common.sampling import SamplingParams
from kvrelay.decode_worker.scheduler import DecodeScheduler
from kvrelay.decode_worker.service import DataPorts, DecodeService
from kvrelay.decode_worker.settings import DecodeSchedulerSettings
from kvrelay.engine.fake.engine import FakeEngine, fake_card
from kvrelay.engine.fake.language import token_digests
from kvrelay.engine.guides.guidance import NoGuides
from kvrelay.engine.images.interface import ImageReader
from kvrelay.engine.kv.block_manager import BlockManager
from kvrelay.engine.kv.leased_blocks import LeasedBlocks
from kvrelay.engine.step.leader import Leader
from kvrelay.prefill_worker.links import DecodeLinks
from kvrelay.prefill_worker.scheduler import PrefillScheduler
from kvrelay.prefill_worker.service import PrefillService
from kvrelay.prefill_worker.settings import PrefillSchedulerSettings
from kvrelay.wire.blocks.frames import BlockHeader, parse_header
from kvrelay.wire.blocks.pieces import whole_block
from kvrelay.wire.blocks.send_job import SendTicket
from kvrelay.wire.codec import MAX_CONTROL_FRAME_NBYTES, Codec
from kvrelay.wire.control.server import ControlServer
from kvrelay.wire.leases.lease import LeaseSettings
from kvrelay.wire.leases.table import LeaseTable
from kvrelay.wire.messages import FailureCode, Message, Offer
from kvrelay.wire.metrics import WireMetrics
from kvrelay.wire.network import Network
from kvrelay.wire.settings import LinkSettings
from kvrelay.wire.transfers.table import TransferTable
from kvrelay.wire.transfers.transfer import DecodeLink, TransferSettings
from kvrelay.worker.adapters import AdapterStore
from kvrelay.worker.images import ImageDesk
from kvrelay.worker.metrics import EngineMetrics
from kvrelay.worker.model_worker import ModelWorker
from kvrelay.worker.service import Ports
from kvrelay.worker.submit import WorkerIdentity
from tests.images import PlayedThreads
from tests.images import reader as image_reader

EPOCH = 7
CARD = fake_card()
FINGERPRINT = CARD.layout.fingerprint()
BLOCK_SIZE, BLOCK_NBYTES, VOCAB = CARD.layout.block_size, CARD.block_nbytes, CARD.vocab_size
MAX_SENT = 2000


def offer_of(request_id: str, token_ids: list[int], gateway_id: str, max_tokens: int) -> Offer:
    """The offer of an honest prefill worker."""
    return Offer(
        request_id=request_id,
        attempt=1,
        gateway_id=gateway_id,
        fingerprint=FINGERPRINT,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        block_hashes=HashChain(FINGERPRINT, BLOCK_SIZE).hashes_of_all(token_ids),
    )


def kv_blocks(token_ids: list[int]) -> list[bytes]:
    """The bytes of every block that an honest fake engine computes, with zeros after the last token."""
    size = CARD.layout.geometry.token_nbytes
    kv = b"".join((digest * size)[:size] for digest in token_digests(token_ids))
    return [kv[start : start + BLOCK_NBYTES].ljust(BLOCK_NBYTES, b"\0") for start in range(0, len(kv), BLOCK_NBYTES)]


class _Server(ControlServer):
    """A control server that keeps its answers instead of sending them. It checks that they fit into a frame."""

    def __init__(self, handler: Any, network: Network) -> None:
        metrics = WireMetrics(CollectorRegistry())
        super().__init__("inproc://nobody", handler, LinkSettings(), metrics=metrics, network=network)
        self.sent: deque[tuple[str, Message]] = deque(maxlen=MAX_SENT)
        self._encoder = Codec()

    def _answer(self, routing_id: bytes, message: Message) -> bool:
        """Keep an answer. All peers seem to read."""
        assert len(self._encoder.encode(message)) <= MAX_CONTROL_FRAME_NBYTES
        self.sent.append((routing_id.decode(errors="replace"), message))
        return True


class _Rig:
    """The common parts of both rigs."""

    reader: ImageReader | None = None

    def __init__(self) -> None:
        self.network = Network.open()
        self.commands: deque[Any] = deque()
        self.reports: deque[Any] = deque()
        self.now_s = 1000.0
        self.blocks = BlockManager(CARD.num_blocks, BLOCK_SIZE, self.clock)
        self.engine = FakeEngine(CARD)
        card = CARD if self.reader is None else msgspec.structs.replace(CARD, no_images="")
        self.identity = WorkerIdentity("worker", EPOCH, card, max_waiting=64, max_running=64)
        self.metrics = EngineMetrics(CollectorRegistry(), self.blocks, num_running=lambda: 0, num_waiting=lambda: 0)
        self.server: _Server
        self.model: ModelWorker
        self.service: DecodeService | PrefillService
        self._codec = Codec()

    def clock(self) -> float:
        return self.now_s

    def ports(self) -> Ports:
        images = ImageDesk(self.reader, self.call, self.identity.card.no_images, PlayedThreads(is_at_once=True))
        return Ports(
            self.server.send, cast("Any", self), self.call, NoGuides(), lambda: None, AdapterStore(None, None), images
        )

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """See OnLoop."""
        function(*args)

    def post(self, command: Any) -> None:
        """See ModelLoop."""
        self.commands.append(command)

    def wake(self) -> None:
        """See ModelLoop."""

    def hear(self, routing_id: bytes, frame: bytes) -> None:
        """Receive a frame from a peer."""
        self.server._on_frames([routing_id, frame])

    def say(self, routing_id: str, message: Message) -> None:
        """Receive a message from an honest peer."""
        self.hear(routing_id.encode(), self._codec.encode(message))

    def turn(self, num_steps: int) -> None:
        """Handle commands, run a step and deliver its reports, ``num_steps`` times."""
        for _ in range(num_steps):
            while self.commands:
                self.model.handle(self.commands.popleft())
            if self.model.has_work():
                self.model.step()
            while self.reports:
                self.service.on_report(self.reports.popleft())

    def check(self) -> None:
        """Check that all blocks are accounted for."""
        self.blocks.check_integrity()
        assert self.blocks.ledger().balances, self.blocks.ledger()

    def close(self) -> None:
        """Close the only socket."""
        self.server._router.close(linger=0)
        self.network.close()


class DecodeRig(_Rig):
    """A decode worker."""

    def __init__(self) -> None:
        super().__init__()
        scheduler = DecodeScheduler(DecodeSchedulerSettings(), self.blocks, CARD.max_model_len, "cpu")
        self.model = ModelWorker(Leader(self.engine), scheduler, self.metrics, self.reports.append, self.clock)
        self.service: DecodeService = DecodeService(self.identity, self.blocks, self.clock)
        self.leases = LeaseTable(
            LeaseSettings(EPOCH, FINGERPRINT, BLOCK_SIZE, whole_block(BLOCK_NBYTES), 30.0),
            LeasedBlocks(self.blocks),
            self.engine.store,
            self.service,
            WireMetrics(CollectorRegistry()),
            self.clock,
        )
        self.server = _Server(self.service, self.network)
        self.service.connect(self.ports())
        self.service.attach(self.leases, DataPorts("tcp://nowhere:1"))

    def land(self, lease_id: int, offer: Offer, index: int, block: bytes) -> None:
        """Receive a right block."""
        draft = BlockHeader(lease_id, EPOCH, index, BLOCK_NBYTES, offer.block_hashes[index])
        header = parse_header(draft.pack(digests_of(memoryview(block))))
        self.leases.begin_piece(header)
        self.leases.write_piece(header, memoryview(block))()


class PlayedLink:
    """Both connections to a decode worker. It keeps all messages and blocks."""

    def __init__(self) -> None:
        self.said: deque[Message] = deque(maxlen=MAX_SENT)
        self.shipped: deque[tuple[BlockHeader, bytes]] = deque(maxlen=MAX_SENT)
        self.link = DecodeLink(self, cast("Any", _PlayedData(self)))

    def send(self, message: Message) -> bool:
        """See ControlClient."""
        self.said.append(message)
        return True


class _PlayedData:
    def __init__(self, played: PlayedLink) -> None:
        self._played = played

    def send(self, header: BlockHeader, payload: memoryview, sealer: Any = None) -> SendTicket:
        """See BlockSender. The block is packed and its ticket ends at once."""
        header.pack(digests_of(payload))
        self._played.shipped.append((header, bytes(payload)))
        ticket = SendTicket()
        ticket.take()
        ticket.end()
        return ticket


class PrefillRig(_Rig):
    """A prefill worker with two decode workers, one of them honest."""

    reader = image_reader()
    honest_address, fuzz_address = "tcp://honest:1", "tcp://fuzz:1"

    def __init__(self) -> None:
        super().__init__()
        self.honest_link, self.fuzz_link = PlayedLink(), PlayedLink()
        scheduler = PrefillScheduler(PrefillSchedulerSettings(), self.blocks, CARD.max_model_len, "cpu")
        self.model = ModelWorker(Leader(self.engine), scheduler, self.metrics, self.reports.append, self.clock)
        self.service: PrefillService = PrefillService(self.identity, self.blocks, self.clock)
        geometry, metrics = CARD.layout.geometry, WireMetrics(CollectorRegistry())
        transfers = TransferTable(self.engine.store, geometry, self.service, TransferSettings(), metrics, self.clock)
        self.server = _Server(self.service, self.network)
        self.service.connect(self.ports())
        self.service.attach(cast("DecodeLinks", self), transfers)

    def link_to(self, address: str) -> DecodeLink | None:
        """See DecodeLinks. There are only these two links."""
        played = {self.honest_address: self.honest_link, self.fuzz_address: self.fuzz_link}.get(address)
        return None if played is None else played.link

    def reset(self, address: str, reason: str) -> None:
        """See DecodeLinks. The link is lost."""
        self.service.on_link_down(address, self.link_to(address), FailureCode.PEER_LOST, reason)
